"""The default model: greedy tokens equal plain transformers for real prompts, on every way that KV can take.

Where the two best logits of plain transformers lie closer than float error, the comparison of that prompt ends there
(design.md section 3); the test says so.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from shared.engine.batch import StepBudget
from shared.engine.convert import ensure_model
from shared.engine.options import EngineOptions
from shared.engine.torch_engine import TorchEngine
from shared.errors import ModelNotFound
from shared.limits import MIB
from shared.model_dir import ModelDirectory
from shared.settings import DEFAULT_MODEL
from tests.tiny_model import Seen, copy_blocks, finish, request_of, run

pytestmark = pytest.mark.slow

# Read before the fixture that clears the environment: a home that has the model saves its conversion.
HOME = os.environ.get("ROOST_HOME")
BLOCK = 16
SAID_COUNT = 24
# Logits are about 20; float32 sums over 576 numbers, 30 layers deep, differ by less than this with their order.
TIE = 1e-3

SYSTEM = "You are a careful assistant with tools for files, the web and a calendar. Answer in one sentence. "
TEXTS = (
    "Hi",
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n<|im_start|>assistant\n",
    SYSTEM * 12 + "What is a heron?",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelDirectory:
    """The model directory; converted once if no home has it."""
    home = Path(HOME) if HOME else tmp_path_factory.mktemp("home")
    try:
        return ensure_model(DEFAULT_MODEL, home)
    except ModelNotFound:
        pytest.skip("the package with the default model is not installed")


@pytest.fixture(scope="module")
def plain(model: ModelDirectory) -> Any:
    """Plain transformers."""
    return AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts(model: ModelDirectory) -> list[tuple[int, ...]]:
    """Texts as tokens, and one that is an exact multiple of the block size."""
    tokenizer = Tokenizer.from_file(str(model.tokenizer_path))
    tokenized = [tuple(tokenizer.encode(text, add_special_tokens=False).ids) for text in TEXTS]
    return [*tokenized, tokenized[-1][: 4 * BLOCK]]


@pytest.fixture(scope="module")
def expected(plain: Any, prompts: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """What plain transformers says to each prompt, as far as no two logits tie."""
    answers = []
    for prompt in prompts:
        with torch.inference_mode():
            said = plain.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=SAID_COUNT,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        tokens = said.sequences[0, len(prompt) :].tolist()
        gaps = [float(best[0] - best[1]) for best in (logits[0].topk(2).values for logits in said.logits)]
        ties = [index for index, gap in enumerate(gaps) if gap < TIE]
        if ties:
            warnings.warn(f"logits tie at token {ties[0]} of a prompt; compared up to there", stacklevel=1)
        answers.append(tokens[: ties[0]] if ties else tokens)
    return answers


def engine_of(model: ModelDirectory, *, step_tokens: int = 512) -> TorchEngine:
    """The default model with a small pool."""
    budget = StepBudget(alone_tokens=step_tokens, shared_tokens=min(step_tokens, 64), bite_tokens=16)
    return TorchEngine(model, EngineOptions(pool_bytes=96 * MIB, budget=budget))


@pytest.mark.parametrize("step_tokens", [48, 512])
def test_greedy_equals_transformers(
    model: ModelDirectory, prompts: Sequence[tuple[int, ...]], expected: Sequence[list[int]], step_tokens: int
) -> None:
    """One by one and all at once, in chunks or whole, cold and with everything cached."""
    engine = engine_of(model, step_tokens=step_tokens)
    requests = [request_of(f"r{index}", prompt, max_tokens=SAID_COUNT) for index, prompt in enumerate(prompts)]
    batch = run(engine, *requests).tokens
    for item, answer in zip(requests, expected, strict=True):
        assert batch[item.request_id][: len(answer)] == answer
        warm = run(engine, item)
        assert warm.tokens[item.request_id][: len(answer)] == answer
        assert warm.finished[item.request_id].resident_tokens == (len(item.tokens) - 1) // BLOCK * BLOCK
    assert engine.stats().blocks_held == 0


def test_loaded_blocks_and_later_attempts_give_the_same(
    model: ModelDirectory, prompts: Sequence[tuple[int, ...]], expected: Sequence[list[int]]
) -> None:
    """Export -> load into a fresh engine, and a second attempt in the middle of the answer."""
    source, target, seen = engine_of(model), engine_of(model), Seen()
    for index, (prompt, answer) in enumerate(zip(prompts, expected, strict=True)):
        name, emitted = f"r{index}", len(answer) // 2
        run(source, request_of(name, prompt, max_tokens=SAID_COUNT))
        later = request_of(name, (*prompt, *answer[:emitted]), emitted=emitted, max_tokens=SAID_COUNT)
        copy_blocks(source, target, later)
        target.start(name)
        finish(target, seen)
        assert seen.tokens[name][: len(answer) - emitted] == answer[emitted:]
        done = seen.finished[name]
        assert done.resident_tokens + done.loaded_tokens == (len(later.tokens) - 1) // BLOCK * BLOCK
