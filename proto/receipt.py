"""Pure: what a turn cost and where its KV came from. The same shape for one generation and, summed, for a turn."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from proto.message import Message


class Source(StrEnum):
    """Where a prompt token's KV came from. Over a prompt the counts add up to its length (invariant, tested)."""

    RESIDENT = "resident"  # already in the worker's pool
    RAM = "ram"
    NVME = "nvme"
    POOL = "pool"  # another kvstore shard, over the data port
    SHIPPED = "shipped"  # straight from another worker
    COMPUTED = "computed"  # prefilled now


CACHED_SOURCES = frozenset(Source) - {Source.COMPUTED}


class Seconds(Message):
    """Wall seconds by part. What is left of `total` after the named parts is bus and loop overhead."""

    queue: float = 0.0  # waiting in the router for a worker
    route: float = 0.0  # deciding
    load: float = 0.0  # KV from a tier into the pool
    prefill: float = 0.0
    decode: float = 0.0
    tool: float = 0.0
    total: float = 0.0

    @property
    def bus(self) -> float:
        """Everything that is neither queue, model nor tool: bus, loop, gateway."""
        return max(0.0, self.total - self.queue - self.load - self.prefill - self.decode - self.tool)


class StepReceipt(Message):
    """One generation of a turn."""

    step: int
    worker_id: str
    prefill_worker_id: str | None = None
    attempts: int = 1
    prompt_tokens: int
    generated_tokens: int
    tokens_by_source: dict[Source, int] = Field(default_factory=dict)
    bytes_moved: int = 0
    frames_rejected: int = 0
    # The first reason why a promised load fell back to recompute, if one did.
    fallback: str | None = None
    predicted_s: float | None = None
    seconds: Seconds = Seconds()
    policy: str = ""


class Receipt(Message):
    """A whole turn: its steps and their sums."""

    steps: tuple[StepReceipt, ...] = ()
    seconds: Seconds = Seconds()
    tokens_by_source: dict[Source, int] = Field(default_factory=dict)
    bytes_moved: int = 0
    tool_calls: int = 0
    # Byte-seconds of KV held per tier on behalf of this turn; a tier that was not metered is absent, never 0.
    kv_byte_seconds: dict[str, float] = Field(default_factory=dict)


class Usage(Message):
    """Tokens as OpenAI counts them: prompt tokens include the cached ones."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
