"""Pure: what an engine is. Implemented by `torch_engine` (real weights) and `sim_engine` (no weights, calibrated delays).

All methods are called from one compute thread. A request lives like this:

    claim() -> claimed -> load() 0..n times -> start() -> running -> step() events ... -> Finished
                  \\____________________ cancel() from anywhere, frees everything at once

`claim` finds the resident leading blocks and takes references on them in the same step, and reserves every further block
the request can ever need (prompt + max_tokens), so a running request never runs out of memory. `load` then fills the
next blocks of the chain with bytes that came from a tier; what is not loaded is computed. At least the prompt's last
token is always computed, since its logits choose the first new token.

Layout of one block's body (LAYOUT_VERSION 1): C-contiguous [layers, 2 (K then V), kv_heads, block_tokens, head_dim] in the
KV dtype, keys after rotary embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from proto.chat import FinishReason, Grammar, Sampling
from proto.ids import BlockKey

LAYOUT_VERSION = 1

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What this engine serves; fills a ModelCard."""

    model: str
    fingerprint: str
    tokenizer_digest: str
    kv_dtype: str
    block_tokens: int
    rope_scaling: str
    context_tokens: int
    vocab_size: int
    # Bytes of one block's body, from shared/engine/spec.py.
    block_bytes: int
    body_shape: tuple[int, ...]
    blocks_total: int


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One generation, or with `prefill_only` just its prompt. `tokens` ends with `emitted` tokens of earlier attempts."""

    request_id: str
    namespace: bytes
    tokens: tuple[int, ...]
    sampling: Sampling
    emitted: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    grammar: Grammar | None = None
    # Said instead of sampled, counted from the generation's first token (so the first `emitted` of them are past).
    forced: tuple[int, ...] = ()
    prefill_only: bool = False


@dataclass(frozen=True, slots=True)
class Claim:
    """Answer to `claim`. `keys` are the keys of the prompt's full blocks, the first `resident_blocks` of them are here."""

    keys: tuple[BlockKey, ...]
    resident_blocks: int
    # At most this many leading blocks may come from memory (the last token is always computed).
    usable_blocks: int


@dataclass(frozen=True, slots=True)
class SealedBlock:
    """A full block whose KV is complete. Exportable until it is evicted."""

    key: BlockKey
    parent: BlockKey
    tokens: tuple[int, ...]
    namespace: bytes


@dataclass(frozen=True, slots=True)
class TokensEmitted:
    """New tokens of one request. `first` counts from the generation's first token over all attempts."""

    request_id: str
    first: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """`computed` of `total` prompt tokens that had to be computed are done."""

    request_id: str
    computed: int
    total: int


@dataclass(frozen=True, slots=True)
class BlocksSealed:
    """Blocks that became full, in chain order."""

    request_id: str
    blocks: tuple[SealedBlock, ...]


@dataclass(frozen=True, slots=True)
class BlocksEvicted:
    """Blocks that left the pool to make room. Leaves go before their parents."""

    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """Terminal. The request holds nothing any more; its full blocks stay as evictable cache."""

    request_id: str
    reason: FinishReason
    generated: int  # by this attempt
    resident_tokens: int
    loaded_tokens: int
    computed_tokens: int  # resident + loaded + computed == len(request.tokens)
    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """Terminal, and our fault (NaN logits, a dead grammar): `message` says what."""

    request_id: str
    message: str


EngineEvent = TokensEmitted | PrefillProgress | BlocksSealed | BlocksEvicted | RequestFinished | RequestFailed


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts of this moment; free + cached + held == total (`cached`: full, unreferenced, evictable)."""

    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_held: int
    requests_claimed: int
    requests_prefilling: int
    requests_decoding: int
    prefill_tokens_waiting: int
    # Recent step times, for the price model: (new prefill tokens, decode streams, context tokens, seconds).
    recent_steps: tuple[tuple[int, int, int, float], ...] = field(default=())


class PoolFull(Exception):
    """Not enough free and evictable blocks now; ask again when something has finished."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"needs {needed} blocks, {available} are free or evictable")
        self.needed, self.available = needed, available


class NeverFits(Exception):
    """The request needs more blocks than the pool has, or more tokens than the context window: refuse it for good."""

    def __init__(self, message: str, *, limit_tokens: int, asked_tokens: int) -> None:
        super().__init__(message)
        self.limit_tokens, self.asked_tokens = limit_tokens, asked_tokens


class BadGrammar(Exception):
    """The grammar cannot be compiled or is not supported; the message says which part."""


class BadLoad(Exception):
    """`load` was given a wrong index or a body of the wrong size; nothing was written."""


class Engine(Protocol):
    """See the module's docstring for the life of a request."""

    @property
    def info(self) -> EngineInfo:
        """What is served; constant."""
        ...

    def claim(self, request: EngineRequest) -> Claim:
        """Admit a request. Raises PoolFull, NeverFits, BadGrammar, or ValueError on an id in use; then nothing is held."""
        ...

    def load(self, request_id: str, block_index: int, body: Buffer) -> None:
        """Fill block `block_index` (the next one after the resident and loaded ones) of a claimed request. Raises BadLoad.

        The caller has verified the body. The bytes are copied before the call returns.
        """
        ...

    def start(self, request_id: str) -> None:
        """No more loads; compute the rest. Loaded blocks become sealed (reported by the next step)."""
        ...

    def cancel(self, request_id: str) -> None:
        """Forget a request and give its blocks back at once; full ones stay as cache. Unknown ids are fine. No event."""
        ...

    def step(self) -> list[EngineEvent]:
        """One forward pass over a bounded batch of prefill chunks and decode tokens. Empty when there is no work."""
        ...

    @property
    def has_work(self) -> bool:
        """A started request is unfinished, or events wait to be taken by `step`."""
        ...

    def export(self, key: BlockKey) -> bytes | None:
        """A copy of a sealed block's body, None if it is not resident (any more)."""
        ...

    def resident(self) -> Sequence[SealedBlock]:
        """All sealed blocks, parents before children."""
        ...

    def stats(self) -> EngineStats:
        """Cheap."""
        ...

    def check_integrity(self) -> None:
        """Assert every invariant of pool and table. For tests, idle time and after faults."""
        ...
