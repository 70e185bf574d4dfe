"""Pure: THE CORE of the kvstore. What to write where, what to evict, what to announce. Events in, instructions out.

    PutArrived --> waiting (each tier) --> in a batch --> committed: announced, readable
                      |                       |
                      +- no room, tier paused +- batch failed: dropped, counted; the tier pauses

A put goes to both tiers, each at its own pace. The sender's wait ends at the first commit, or when no tier takes it. A tier
whose batch failed is left alone for a while, twice as long each time: it costs speed, never an answer. What is evicted
leaves the index at once and the tier with the next batch, if need be after the pause; routers hear of it after that commit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from proto.ids import BlockKey
from proto.residency import ResidencyDelta, ResidencySnapshot, SnapshotRequest, Tier, TierChange
from services.kvstore.events import (
    Announce,
    BatchCommitted,
    BatchFailed,
    BlockInfo,
    Damaged,
    Event,
    Found,
    Instruction,
    LetGo,
    PutArrived,
    Settled,
    Ticked,
    Touched,
    WriteBatch,
)
from services.kvstore.tier_index import TierIndex

TIERS: Final = (Tier.RAM, Tier.NVME)
# Large enough that a commit's fsync is shared by many blocks, small enough that a turn's own blocks are not kept waiting.
BATCH_BYTES_MAX: Final = 32 * 1024 * 1024
PAUSE_S_MIN: Final = 1.0
PAUSE_S_MAX: Final = 60.0
# A tier that says it is full gives back this share of its capacity: our count and its own differ by fragmentation.
FULL_SHRINK_SHARE: Final = 8
# Keys of one snapshot page, and of one delta; 16 bytes each, far below the bus's payload.
PAGE_KEYS_MAX: Final = 16_384


class _Blocks:
    """Blocks in order of arrival (parents before children), with their weight at hand."""

    def __init__(self) -> None:
        self._by_key: dict[BlockKey, BlockInfo] = {}
        self.size_bytes = 0

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._by_key

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self._by_key)

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, block: BlockInfo) -> None:
        self.discard(block.key)
        self._by_key[block.key] = block
        self.size_bytes += block.size_bytes

    def discard(self, key: BlockKey) -> None:
        block = self._by_key.pop(key, None)
        self.size_bytes -= 0 if block is None else block.size_bytes

    def take(self, bytes_max: int) -> tuple[BlockKey, ...]:
        """The first ones, at least one, up to so many bytes; they are taken out."""
        taken: list[BlockKey] = []
        size_bytes = 0
        for key, block in self._by_key.items():
            if taken and size_bytes + block.size_bytes > bytes_max:
                break
            taken.append(key)
            size_bytes += block.size_bytes
        for key in taken:
            self.discard(key)
        return tuple(taken)

    def check_integrity(self) -> None:
        assert self.size_bytes == sum(block.size_bytes for block in self._by_key.values())


@dataclass(slots=True)
class _TierState:
    """One tier: its index, what waits for the next batch, what is in the present one."""

    index: TierIndex
    waiting: _Blocks = field(default_factory=_Blocks)
    deleting: dict[BlockKey, None] = field(default_factory=dict)
    in_flight: WriteBatch | None = None
    # The puts of `in_flight`.
    writing: frozenset[BlockKey] = frozenset()
    paused_until: float = 0.0
    failures: int = 0
    skipped: int = 0
    evicted: int = 0
    reason: str = ""


class KvStoreCore:
    """One life of one shard."""

    def __init__(self, shard_id: str, epoch: int, capacities: Mapping[Tier, int], *, waiting_bytes_max: int) -> None:
        self.shard_id, self.epoch = shard_id, epoch
        self._waiting_bytes_max = waiting_bytes_max
        self._tiers = {tier: _TierState(TierIndex(capacities[tier])) for tier in TIERS if capacities.get(tier)}
        # Puts that no tier has committed or refused for good yet -> tiers that still may.
        self._open: dict[BlockKey, set[Tier]] = {}
        # Bytes of frames that the shell still holds: waiting or in flight in some tier.
        self._pending = _Blocks()
        self.seq = 0
        # The latest time that an event came with.
        self._now = 0.0

    @property
    def pending_bytes(self) -> int:
        """Frames that the shell holds for a commit. The shell reads no more puts while this is above its bound."""
        return self._pending.size_bytes

    @property
    def is_idle(self) -> bool:
        """Nothing waits for a commit. Deletes may: a tier that fails keeps them for its next batch."""
        return not any(state.waiting or state.in_flight for state in self._tiers.values())

    def is_open(self, key: BlockKey) -> bool:
        """A put of this key is neither readable nor dropped yet."""
        return key in self._open

    def index_of(self, tier: Tier) -> TierIndex | None:
        """The bookkeeping of a tier, None where it is left out. For reading."""
        state = self._tiers.get(tier)
        return None if state is None else state.index

    def tier_of(self, key: BlockKey) -> Tier | None:
        """The fastest tier that has the block."""
        return next((tier for tier, state in self._tiers.items() if state.index.is_stored(key)), None)

    def counts(self, tier: Tier) -> tuple[int, int]:
        """Blocks evicted from a tier and puts that it was spared, over this life."""
        state = self._tiers[tier]
        return state.evicted, state.skipped

    def troubles(self) -> tuple[str, ...]:
        """Tiers that are left alone at present, and why."""
        return tuple(
            f"{tier} tier: {state.reason}" for tier, state in self._tiers.items() if state.failures and state.reason
        )

    def handle(self, event: Event) -> list[Instruction]:
        """What to do about it."""
        if isinstance(event, PutArrived | BatchFailed | Ticked):
            self._now = event.now
        match event:
            case Found():
                return self._found(event)
            case Ticked():
                instructions: list[Instruction] = []
            case PutArrived():
                instructions = self._put(event.block, event.now)
            case BatchCommitted():
                instructions = self._committed(event.tier)
            case BatchFailed():
                instructions = self._failed(event)
            case Touched():
                for state in self._tiers.values():
                    state.index.touch(event.keys)
                return []
            case Damaged():
                instructions = self._damaged(event)
        return [*instructions, *self._next_batches()]

    def snapshot(self, request: SnapshotRequest) -> ResidencySnapshot:
        """One page of what is committed in a tier; `seq` is the last change in it."""
        state = self._tiers.get(request.tier)
        keys = [] if state is None else [key for key in state.index.stored() if key > request.after_key]
        return ResidencySnapshot(
            holder_id=self.shard_id,
            epoch=self.epoch,
            seq=self.seq,
            tier=request.tier,
            keys=tuple(keys[:PAGE_KEYS_MAX]),
            is_last=len(keys) <= PAGE_KEYS_MAX,
        )

    def check_integrity(self) -> None:
        """Assert every invariant. O(blocks)."""
        self._pending.check_integrity()
        for tier, state in self._tiers.items():
            state.index.check_integrity()
            state.waiting.check_integrity()
            assert state.writing == frozenset(state.in_flight.puts if state.in_flight else ())
            for key in state.waiting:
                assert key in state.index and not state.index.is_stored(key) and key not in state.writing
            for key in (*state.waiting, *state.writing):
                assert key in self._pending, "the bytes of a put are kept until its commit"
            for key in state.deleting:
                assert key not in state.index or key in state.waiting
            for key, tiers in self._open.items():
                assert tiers and key in self._pending
                if tier in tiers:
                    assert key in state.waiting or key in state.writing
        for key in self._pending:
            assert self._is_pending(key), "the bytes of a frame are let go when no tier waits for them"

    # -- events

    def _found(self, event: Found) -> list[Instruction]:
        """No announcement: whoever hears of this life asks for a snapshot."""
        state = self._tiers[event.tier]
        for block in event.blocks:
            state.index.restore(block.key, block.parent, block.size_bytes)
        over = state.index.used_bytes - state.index.capacity_bytes
        if over > 0:  # the capacity was lowered since
            self._evict(state, state.index.shrink(over))
        return self._next_batches()

    def _put(self, block: BlockInfo, now: float) -> list[Instruction]:
        taken: set[Tier] = set()
        for tier, state in self._tiers.items():
            if block.key in state.index:
                continue
            is_behind = tier is Tier.NVME and state.waiting.size_bytes + block.size_bytes > self._waiting_bytes_max
            if now < state.paused_until or is_behind:
                state.skipped += 1
                continue
            reserved = state.index.reserve(block.key, block.parent, block.size_bytes)
            self._evict(state, reserved.evicted)
            if reserved.fits:
                state.waiting.add(block)
                taken.add(tier)
            else:
                state.skipped += 1
        if taken:
            self._pending.add(block)
        if block.key in self._open:
            self._open[block.key] |= taken
            return []
        if not taken or self.tier_of(block.key) is not None:
            still = () if self._is_pending(block.key) else (block.key,)
            return [Settled((block.key,)), *([LetGo(still)] if still else [])]
        self._open[block.key] = taken
        return []

    def _committed(self, tier: Tier) -> list[Instruction]:
        state = self._tiers[tier]
        batch = self._end_batch(state)
        state.failures, state.reason, state.paused_until = 0, "", 0.0
        # One that was found damaged, or evicted, while it was being written is in the tier but not in the index.
        stored = tuple(key for key in batch.puts if state.index.commit(key))
        for key in batch.puts:
            if key not in state.index:
                state.deleting[key] = None
        dropped = tuple(key for key in batch.deletes if not state.index.is_stored(key))
        settled = tuple(key for key in batch.puts if self._open.pop(key, None) is not None)
        instructions: list[Instruction] = []
        if stored or dropped:
            instructions.append(self._announce(tier, stored, dropped))
        if settled:
            instructions.append(Settled(settled))
        return [*instructions, *self._let_go(batch.puts)]

    def _failed(self, event: BatchFailed) -> list[Instruction]:
        state = self._tiers[event.tier]
        batch = self._end_batch(state)
        state.reason = event.reason
        pause_s = min(PAUSE_S_MIN * 2**state.failures, PAUSE_S_MAX)
        state.failures = min(state.failures + 1, 16)
        state.paused_until = event.now + pause_s
        lost = (*batch.puts, *state.waiting)
        # What was to go still lies in the tier, and of what was to come there may be an older copy: with the next batch.
        state.deleting = {**dict.fromkeys(batch.deletes), **state.deleting, **dict.fromkeys(lost)}
        state.waiting = _Blocks()
        for key in lost:
            state.index.remove(key)
            state.skipped += 1
        if event.is_full:
            self._evict(state, state.index.shrink(state.index.capacity_bytes // FULL_SHRINK_SHARE))
        settled = tuple(key for key in lost if self._gives_up(key, event.tier))
        return [*([Settled(settled)] if settled else []), *self._let_go(lost)]

    def _gives_up(self, key: BlockKey, tier: Tier) -> bool:
        """This tier will not have the put. True if it was the last that might."""
        tiers = self._open.get(key)
        if tiers is None:
            return False
        tiers.discard(tier)
        if tiers:
            return False
        del self._open[key]
        return True

    def _damaged(self, event: Damaged) -> list[Instruction]:
        state = self._tiers.get(event.tier)
        if state is None or not state.index.is_stored(event.key):
            return []
        state.index.remove(event.key)
        state.deleting[event.key] = None
        return []

    # -- inside

    def _evict(self, state: _TierState, keys: tuple[BlockKey, ...]) -> None:
        state.evicted += len(keys)
        state.deleting.update(dict.fromkeys(keys))

    def _announce(self, tier: Tier, stored: tuple[BlockKey, ...], dropped: tuple[BlockKey, ...]) -> Announce:
        self.seq += 1
        change = TierChange(tier=tier, stored=stored, dropped=dropped)
        return Announce(ResidencyDelta(holder_id=self.shard_id, epoch=self.epoch, seq=self.seq, changes=(change,)))

    def _is_pending(self, key: BlockKey) -> bool:
        return any(key in state.waiting or key in state.writing for state in self._tiers.values())

    def _let_go(self, keys: tuple[BlockKey, ...]) -> list[Instruction]:
        gone = tuple(key for key in keys if key in self._pending and not self._is_pending(key))
        for key in gone:
            self._pending.discard(key)
        return [LetGo(gone)] if gone else []

    def _next_batches(self) -> list[Instruction]:
        batches: list[Instruction] = []
        for tier, state in self._tiers.items():
            may_delete = not state.failures or self._now >= state.paused_until
            if state.in_flight is None and (state.waiting or (state.deleting and may_delete)):
                state.in_flight = self._next_batch(tier, state)
                batches.append(state.in_flight)
        return batches

    def _next_batch(self, tier: Tier, state: _TierState) -> WriteBatch:
        puts = state.waiting.take(BATCH_BYTES_MAX)
        state.writing = frozenset(puts)
        # A block that came back and waits for a later batch is replaced by that put.
        deletes = [key for key in state.deleting if key not in state.index or key in state.writing]
        state.deleting = {}
        return WriteBatch(tier, tuple(deletes), puts)

    def _end_batch(self, state: _TierState) -> WriteBatch:
        batch, state.in_flight, state.writing = state.in_flight, None, frozenset()
        assert batch is not None
        return batch
