"""One stream whatever happens to it: later attempts, sampling, eviction beside it, damaged weights, penalties."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from proto.chat import Sampling
from shared.engine.torch_engine import TorchEngine
from shared.model_dir import ModelDirectory
from tests import tiny_model
from tests.tiny_model import Seen, copy_blocks, finish, greedy_by_transformers, options, prompt_of, request_of, run

BLOCK = 16
SAMPLED = Sampling(max_tokens=24, temperature=0.9, top_p=0.95, top_k=50, seed=11)


@pytest.mark.parametrize("sampling", [Sampling(max_tokens=24), SAMPLED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("emitted", [1, 11, 12, 23])
def test_a_later_attempt_goes_on(tiny: ModelDirectory, sampling: Sampling, emitted: int) -> None:
    """A worker dies after `emitted` tokens; another, cold or with the blocks of the first, says the rest of the stream."""
    prompt = prompt_of(2 * BLOCK + 4)
    first = TorchEngine(tiny, options())
    whole = run(first, request_of("r", prompt, sampling=sampling)).tokens["r"]
    later = request_of("r", (*prompt, *whole[:emitted]), emitted=emitted, sampling=sampling)
    cold = run(TorchEngine(tiny, options()), later)
    assert (cold.first["r"], cold.tokens["r"]) == (emitted, whole[emitted:])
    warm = TorchEngine(tiny, options())
    assert copy_blocks(first, warm, later) >= 2
    warm.start("r")
    seen = Seen()
    finish(warm, seen)
    assert (seen.first["r"], seen.tokens["r"]) == (emitted, whole[emitted:])


def test_sampled_streams_do_not_feel_their_neighbours(tiny: ModelDirectory) -> None:
    """Seeded sampling in a batch with others, in chunks, with a shared prefix: the tokens are those of a run alone."""
    prefix = prompt_of(3 * BLOCK)
    requests = [
        request_of(f"r{index}", (*prefix, *prompt_of(index * 5 + 1, salt=index)), sampling=replaced)
        for index in range(5)
        for replaced in (SAMPLED.model_copy(update={"seed": index}),)
    ]
    alone = {item.request_id: run(TorchEngine(tiny, options()), item).tokens[item.request_id] for item in requests}
    for step_tokens in (9, 512):
        engine = TorchEngine(tiny, options(step_tokens=step_tokens))
        seen = run(engine, *requests)
        assert seen.tokens == alone
        # The prefix was computed once or adopted, and is there once.
        assert len({block.key for block in engine.resident()}) == len(engine.resident())
    assert run(engine, *requests).tokens == alone


def test_concurrent_prompts_share_what_the_first_one_computes(tiny: ModelDirectory) -> None:
    """Ten agents start with one system prompt while the pool has room for their sharing it, in small steps."""
    prefix = prompt_of(6 * BLOCK)
    engine = TorchEngine(tiny, options(blocks=90, step_tokens=32))
    requests = [request_of(f"r{index}", (*prefix, index, 5), max_tokens=4) for index in range(10)]
    seen = run(engine, *requests)
    for item in requests:
        assert seen.tokens[item.request_id] == greedy_by_transformers(tiny, item.tokens, 4)
    assert max(done.resident_tokens for done in seen.finished.values()) >= BLOCK
    assert len(engine.resident()) == 6


def test_eviction_beside_a_running_stream(tiny: ModelDirectory) -> None:
    """The pool is turned over three times while one stream runs: it keeps its blocks, and the answer is right."""
    engine = TorchEngine(tiny, options(blocks=12))
    prompt = prompt_of(5 * BLOCK)
    engine.claim(request_of("stays", prompt, max_tokens=30))
    engine.start("stays")
    seen = Seen()
    for salt in range(1, 10):
        seen.take(engine.step())
        name = f"r{salt}"
        engine.claim(request_of(name, prompt_of(4 * BLOCK, salt=salt), max_tokens=1))
        engine.start(name)
        while name not in seen.finished:
            seen.take(engine.step())
            engine.check_integrity()
    finish(engine, seen)
    assert seen.tokens["stays"] == greedy_by_transformers(tiny, prompt, 30)


def test_repetition_penalty_and_log_probabilities_are_those_of_transformers(tiny: ModelDirectory) -> None:
    """A user of transformers finds the numbers that they know."""
    prompt = prompt_of(30)
    sampling = Sampling(max_tokens=16, repetition_penalty=1.4, logprobs=0)
    seen = run(TorchEngine(tiny, options()), request_of("r", prompt, sampling=sampling))
    assert seen.tokens["r"] == greedy_by_transformers(tiny, prompt, 16, repetition_penalty=1.4)
    model = AutoModelForCausalLM.from_pretrained(tiny.path, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *seen.tokens["r"]]])).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits.double(), -1).gather(1, torch.tensor(seen.tokens["r"])[:, None])[:, 0]
    assert seen.logprobs["r"] == pytest.approx(expected.tolist(), abs=1e-3)


def test_damaged_kv_is_never_sealed(tiny: ModelDirectory, tmp_path: Path) -> None:
    """One embedding row is damaged: a prompt that has it seals nothing after it, so nothing of it is put to any tier."""
    model = AutoModelForCausalLM.from_pretrained(tiny.path)
    with torch.no_grad():
        model.model.embed_tokens.weight[200] = float("nan")
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.model.embed_tokens.weight.nan_to_num())
    model.save_pretrained(tmp_path / "bad")
    (tmp_path / "bad" / "tokenizer.json").write_bytes(tiny.tokenizer_path.read_bytes())
    engine = TorchEngine(replace(tiny, path=tmp_path / "bad"), options(step_tokens=BLOCK))
    good = tuple(token for token in prompt_of(120) if token != 200)
    tokens = (*good[: 2 * BLOCK + 3], 200, *good[2 * BLOCK + 3 :])
    seen = run(engine, request_of("p", tokens, prefill_only=True))
    assert "not finite" in seen.failed["p"] and not seen.finished
    assert engine.stats().blocks_held == 0
    # The damaged row is in the third block.
    assert not any(200 in block.tokens for block in engine.resident())
    assert len(run(engine, request_of("g", good)).tokens["g"]) == 12


def test_a_damaged_body_that_was_loaded_goes_with_the_request(tiny: ModelDirectory) -> None:
    """A tier gave NaN under a right checksum (it was made so): the request fails once, the next one recomputes."""
    engine = TorchEngine(tiny, options())
    prompt = prompt_of(3 * BLOCK)
    engine.claim(request_of("r", prompt))
    engine.load("r", 0, torch.full(engine.info.body_shape, float("nan")).numpy().tobytes())
    engine.start("r")
    seen = Seen()
    finish(engine, seen)
    assert "not finite" in seen.failed["r"] and engine.resident() == []
    assert run(engine, request_of("r", prompt)).tokens["r"] == greedy_by_transformers(tiny, prompt, 12)


def test_untied_embeddings_and_one_kv_head(tmp_path: Path) -> None:
    """Other shapes of the same family: a head of its own, all query heads on one K and V."""

    model = tiny_model.make_model(
        tmp_path / "model", tiny_model.llama(tie_word_embeddings=False, num_key_value_heads=1)
    )
    engine = TorchEngine(model, options())
    for length in (5, BLOCK, 70):
        prompt = prompt_of(length)
        for attempt in ("cold", "warm"):
            assert run(engine, request_of(attempt, prompt)).tokens[attempt] == greedy_by_transformers(model, prompt, 12)
