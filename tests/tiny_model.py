"""Tiny random models as real model directories, plain transformers to compare with, and a driver for engines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from proto.chat import Sampling
from proto.ids import BlockKey
from shared.engine.batch import StepBudget
from shared.engine.options import EngineOptions
from shared.engine.protocol import (
    BlocksEvicted,
    BlocksSealed,
    Engine,
    EngineEvent,
    EngineRequest,
    RequestFailed,
    RequestFinished,
    TokensEmitted,
)
from shared.model_dir import ModelDirectory, read_model_directory

NAMESPACE = bytes(range(32))
EOS = 256
VOCAB = 260
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": EOS,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
    # Wide enough that greedy answers wander and no two logits are nearly equal.
    "initializer_range": 0.4,
    "tie_word_embeddings": True,
}


def llama(**changes: Any) -> LlamaConfig:
    """Full attention."""
    return LlamaConfig(**{**_SHAPE, **changes})


def mistral() -> MistralConfig:
    """Every layer sees the last 24 tokens only."""
    return MistralConfig(**_SHAPE, sliding_window=24)


def gemma2() -> Gemma2Config:
    """Sliding and full layers in turn, squeezed scores."""
    shape = {**_SHAPE, "tie_word_embeddings": False}
    return Gemma2Config(**shape, sliding_window=24, attn_logit_softcapping=5.0, query_pre_attn_scalar=16)


def gemma3() -> Gemma3TextConfig:
    """Sliding and full layers with a rotary embedding each, normalized queries and keys."""
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    return Gemma3TextConfig(**_SHAPE, sliding_window=24, query_pre_attn_scalar=16, layer_types=layer_types)


def qwen2() -> Qwen2Config:
    """Projections with biases."""
    return Qwen2Config(**_SHAPE)


def qwen3() -> Qwen3Config:
    """Normalized queries and keys."""
    return Qwen3Config(**_SHAPE)


def make_model(path: Path, config: PreTrainedConfig) -> ModelDirectory:
    """Write a checkpoint with random weights and a byte-level tokenizer (id = byte, 256 ends the answer)."""
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)  # type: ignore[no-untyped-call]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(path / "tokenizer.json"))
    return read_model_directory(path, path.parent / "home")


def options(*, blocks: int = 64, block_tokens: int = 16, step_tokens: int = 512) -> EngineOptions:
    """A pool of so many blocks of a tiny model, and steps of so many tokens."""
    block_bytes = 2 * 3 * block_tokens * 2 * 16 * 4
    bite = min(16, step_tokens)
    budget = StepBudget(alone_tokens=step_tokens, shared_tokens=max(bite, step_tokens // 2), bite_tokens=bite)
    return EngineOptions(pool_bytes=blocks * block_bytes, block_tokens=block_tokens, budget=budget)


def greedy_by_transformers(model: ModelDirectory, prompt: Sequence[int], count: int, **changes: Any) -> list[int]:
    """What plain transformers says."""
    with torch.inference_mode():
        said = _plain(model.path, model.config["model_type"]).generate(
            torch.tensor([list(prompt)]), max_new_tokens=count, do_sample=False, eos_token_id=None, **changes
        )
    return list(said[0, len(prompt) :].tolist())


@cache
def _plain(path: Path, model_type: str) -> Any:
    # Only eager attention knows squeezed scores.
    attention = "eager" if model_type == "gemma2" else "sdpa"
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=attention)


def prompt_of(count: int, *, salt: int = 0) -> tuple[int, ...]:
    """`count` token ids that do not repeat soon."""
    return tuple((position * 37 + position * position * 11 + salt * 101 + 5) % 256 for position in range(count))


def request_of(request_id: str, tokens: Sequence[int], *, max_tokens: int = 12, **changes: Any) -> EngineRequest:
    """A greedy request, unless `sampling` says otherwise."""
    changes.setdefault("sampling", Sampling(max_tokens=max_tokens))
    return EngineRequest(request_id=request_id, namespace=NAMESPACE, tokens=tuple(tokens), **changes)


@dataclass
class Seen:
    """Everything that engine events said, checked as it comes."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[float]] = field(default_factory=dict)
    first: dict[str, int] = field(default_factory=dict)
    finished: dict[str, RequestFinished] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    resident: dict[BlockKey, BlockKey] = field(default_factory=dict)

    def take(self, events: Iterable[EngineEvent]) -> None:
        """Book events; asserts their order."""
        for event in events:
            match event:
                case TokensEmitted(request_id, first, token_ids, logprobs):
                    assert request_id not in self.finished
                    said = self.tokens.setdefault(request_id, [])
                    assert first == self.first.setdefault(request_id, first) + len(said), "tokens come in order"
                    said += token_ids
                    self.logprobs.setdefault(request_id, []).extend(logprobs or ())
                case RequestFinished(request_id):
                    assert request_id not in self.finished, "one terminal event"
                    self.finished[request_id] = event
                case RequestFailed(request_id, message):
                    self.failed[request_id] = message
                case BlocksSealed(_, blocks):
                    for block in blocks:
                        assert block.key not in self.resident, "said once"
                        assert block.parent in self.resident or block.parent == bytes(16), "parents first"
                        self.resident[block.key] = block.parent
                case BlocksEvicted(keys):
                    for key in keys:
                        del self.resident[key]
                        assert key not in self.resident.values(), "leaves first"
                case _:
                    pass


def run(engine: Engine, *requests: EngineRequest, seen: Seen | None = None) -> Seen:
    """Claim and start all, step to the end. What was said of blocks must be what is there."""
    fresh = seen is None
    seen = seen or Seen()
    if fresh:
        seen.resident = {block.key: block.parent for block in engine.resident()}
    for request in requests:
        engine.claim(request)
        engine.start(request.request_id)
    finish(engine, seen)
    return seen


def finish(engine: Engine, seen: Seen) -> None:
    """Step until there is no work."""
    steps = 0
    while engine.has_work:
        seen.take(engine.step())
        engine.check_integrity()
        steps += 1
        assert steps < 10_000, "no progress"
    assert set(seen.resident) == {block.key for block in engine.resident()}


def copy_blocks(source: Engine, target: Engine, request: EngineRequest) -> int:
    """Claim on the target and load what the source has of it; how many blocks."""
    claim = target.claim(request)
    copied = 0
    for index in range(claim.resident_blocks, claim.usable_blocks):
        body = source.export(claim.keys[index])
        if body is None:
            break
        target.load(request.request_id, index, memoryview(body))
        copied += 1
    return copied


def write_config(path: Path, **changes: Any) -> None:
    """Change keys of a directory's config.json."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))
