"""How an engine is set up, and what one over a given model directory serves. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from proto.generate import WorkerPrice
from shared.engine.batch import StepBudget
from shared.engine.protocol import EngineInfo
from shared.engine.spec import ModelSpec, block_bytes, body_shape
from shared.errors import StartRefused
from shared.limits import MIB
from shared.model_dir import ModelDirectory


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Everything about an engine that is not the model."""

    # Bytes of K and V in the pool; the simulated engine has as many blocks as these would be.
    pool_bytes: int = 1024 * MIB
    block_tokens: int = 16
    # Dtype of weights, K and V.
    kv_dtype: str = "float32"
    # Compute threads of the process; None leaves torch's own choice, which is one per core.
    threads: int | None = None
    budget: StepBudget = field(default_factory=StepBudget)
    # What the simulated engine's steps take.
    price: WorkerPrice = field(default_factory=WorkerPrice)


class PoolTooSmall(StartRefused):
    """The pool does not hold one block."""

    def __init__(self, pool_bytes: int, block_bytes: int) -> None:
        super().__init__(f"a pool of {pool_bytes} bytes does not hold one block of {block_bytes} bytes")
        self.pool_bytes, self.block_bytes = pool_bytes, block_bytes


def engine_info(model: ModelDirectory, options: EngineOptions) -> EngineInfo:
    """What an engine over this model directory serves. Raises UnsupportedModel, PoolTooSmall."""
    spec = ModelSpec.from_config(model.config)
    size_bytes = block_bytes(spec, block_tokens=options.block_tokens, dtype=options.kv_dtype)
    blocks_total = options.pool_bytes // size_bytes
    if blocks_total < 1:
        raise PoolTooSmall(options.pool_bytes, size_bytes)
    return EngineInfo(
        model=model.name,
        fingerprint=model.fingerprint,
        tokenizer_digest=model.tokenizer_digest,
        kv_dtype=options.kv_dtype,
        block_tokens=options.block_tokens,
        rope_scaling=spec.rope_scaling,
        context_tokens=spec.context_tokens,
        vocab_size=spec.vocab_size,
        block_bytes=size_bytes,
        body_shape=body_shape(spec, block_tokens=options.block_tokens),
        blocks_total=blocks_total,
    )
