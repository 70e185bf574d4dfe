"""Settings of every worker, whichever stage it serves."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from proto.generate import WorkerPrice
from shared.engine.batch import StepBudget
from shared.engine.create import EngineKind
from shared.engine.options import EngineOptions
from shared.limits import MIB
from shared.settings import RoostSettings

_PRICE = WorkerPrice()


class WorkerSettings(RoostSettings):
    """ROOST_WORKER_*."""

    # `torch` runs the model; `sim` makes tokens and seconds up, so that many workers fit one machine.
    worker_engine: EngineKind = "torch"
    # K and V held in memory. 1 GiB is about 23,000 tokens of the default model in float32: three full windows.
    worker_pool_bytes: int = Field(default=1024 * MIB, ge=1)
    # Generations in hand at once. On a CPU more streams a step gain little, and each slows the others.
    worker_streams_max: int = Field(default=8, ge=1, le=1024)
    # Compute threads; unset leaves one per core, which is right for one worker a machine.
    worker_threads: int | None = Field(default=None, ge=1)
    # Tokens of one block. All workers of a model and their kvstore must agree; smaller shares more and costs more calls.
    worker_block_tokens: int = Field(default=16, ge=1, le=256)
    # Type of K and V in the pool and in frames; workers of different types share no blocks.
    worker_kv_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    # Prompt tokens of one step while no stream runs. A claim, a cancel and a pull's numbers wait for the step in progress, and
    # a router gives an assignment up that is not answered in time, so a step must stay well below a second.
    worker_step_tokens: int = Field(default=128, ge=16, le=8192)
    # Prompt tokens of one step beside running streams: what a stream's next token may have to wait for.
    worker_step_tokens_shared: int = Field(default=64, ge=16, le=8192)
    # Loading is cut when no block came for so long; the rest is computed.
    worker_fetch_stall_s: float = Field(default=2.0, gt=0)
    # Blocks that wait to be copied for the kvstore; more are not written. A full prompt of the default model fits.
    worker_puts_waiting_bytes_max: int = Field(default=512 * MIB, ge=0)
    # A prefill worker hands over when the kvstore has the blocks, or after this long without it.
    worker_flush_s: float = Field(default=5.0, gt=0)
    # What the simulated engine's steps take; without meaning for `torch`, which is measured.
    worker_sim_prefill_base_s: float = Field(default=_PRICE.prefill_base_s, ge=0)
    worker_sim_prefill_token_s: float = Field(default=_PRICE.prefill_token_s, ge=0)
    worker_sim_decode_base_s: float = Field(default=_PRICE.decode_base_s, ge=0)
    worker_sim_decode_stream_s: float = Field(default=_PRICE.decode_stream_s, ge=0)

    @property
    def sim_price(self) -> WorkerPrice:
        """What simulated steps take."""
        return WorkerPrice(
            prefill_base_s=self.worker_sim_prefill_base_s,
            prefill_token_s=self.worker_sim_prefill_token_s,
            decode_base_s=self.worker_sim_decode_base_s,
            decode_stream_s=self.worker_sim_decode_stream_s,
        )

    @property
    def engine_options(self) -> EngineOptions:
        """As the engine takes them."""
        alone = max(self.worker_step_tokens, self.worker_step_tokens_shared)
        budget = StepBudget(alone_tokens=alone, shared_tokens=self.worker_step_tokens_shared, bite_tokens=16)
        return EngineOptions(
            pool_bytes=self.worker_pool_bytes,
            block_tokens=self.worker_block_tokens,
            kv_dtype=self.worker_kv_dtype,
            threads=self.worker_threads,
            budget=budget,
            price=self.sim_price,
        )
