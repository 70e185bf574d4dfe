"""Pure: block key -> who holds it. One dict lookup a block finds the leading run of a prompt at every holder at once.

Every (holder, tier) has a bit; a key maps to the bits of those that have it. Walking a prompt's keys, the bits that
are left are the holders whose run still goes on. Memory is what holders report, and forgotten with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from proto.ids import BlockKey
from proto.receipt import Source
from proto.residency import Tier

SOURCE_OF_TIER = {Tier.RAM: Source.RAM, Tier.NVME: Source.NVME}


@dataclass(slots=True)
class _Slot:
    holder_id: str
    tier: Tier
    bit: int
    keys: set[BlockKey] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class TierRun:
    """Blocks `first` .. `first + count - 1` of a prompt that one shard has in one tier."""

    first: int
    count: int
    source: Source
    holder_id: str


class BlockIndex:
    """The index. Mutable; owned by the router's core."""

    def __init__(self) -> None:
        self._slots: dict[tuple[str, Tier], _Slot] = {}
        # By the number of the bit.
        self._by_bit: dict[int, _Slot] = {}
        self._free_bits: list[int] = []
        self._masks: dict[BlockKey, int] = {}
        self._tier_masks = dict.fromkeys(Tier, 0)

    @property
    def block_count(self) -> int:
        """Distinct blocks that someone holds."""
        return len(self._masks)

    @property
    def entry_count(self) -> int:
        """Blocks times holders."""
        return sum(len(slot.keys) for slot in self._slots.values())

    def keys_of(self, holder_id: str, tier: Tier) -> frozenset[BlockKey]:
        """What this holder has in this tier."""
        slot = self._slots.get((holder_id, tier))
        return frozenset(slot.keys) if slot else frozenset()

    def store(self, holder_id: str, tier: Tier, keys: Iterable[BlockKey]) -> None:
        """The holder has these now."""
        slot = self._slots.get((holder_id, tier)) or self._new_slot(holder_id, tier)
        masks, held, bit = self._masks, slot.keys, slot.bit
        for key in keys:
            if key not in held:
                held.add(key)
                masks[key] = masks.get(key, 0) | bit

    def drop(self, holder_id: str, tier: Tier, keys: Iterable[BlockKey]) -> None:
        """The holder has these no more; unknown keys change nothing."""
        slot = self._slots.get((holder_id, tier))
        if slot is None:
            return
        for key in keys:
            if key in slot.keys:
                slot.keys.remove(key)
                self._unmark(key, slot.bit)

    def forget(self, holder_id: str) -> None:
        """Everything of this holder goes."""
        for tier in Tier:
            slot = self._slots.pop((holder_id, tier), None)
            if slot is None:
                continue
            for key in slot.keys:
                self._unmark(key, slot.bit)
            self._tier_masks[tier] &= ~slot.bit
            number = slot.bit.bit_length() - 1
            del self._by_bit[number]
            self._free_bits.append(number)

    def _new_slot(self, holder_id: str, tier: Tier) -> _Slot:
        number = self._free_bits.pop() if self._free_bits else len(self._by_bit)
        assert number not in self._by_bit
        slot = _Slot(holder_id, tier, 1 << number)
        self._slots[holder_id, tier] = self._by_bit[number] = slot
        self._tier_masks[tier] |= slot.bit
        return slot

    def _unmark(self, key: BlockKey, bit: int) -> None:
        left = self._masks[key] & ~bit
        if left:
            self._masks[key] = left
        else:
            del self._masks[key]

    # -- questions

    def device_runs(self, keys: Sequence[BlockKey]) -> dict[str, int]:
        """Worker id -> number of leading blocks it has in its pool; workers without the first block are left out."""
        runs: dict[str, int] = {}
        going = self._tier_masks[Tier.DEVICE]
        for place, key in enumerate(keys):
            still = going & self._masks.get(key, 0)
            if still != going:
                if place:
                    self._end_runs(runs, going ^ still, place)
                going = still
                if not going:
                    return runs
        self._end_runs(runs, going if keys else 0, len(keys))
        return runs

    def _end_runs(self, runs: dict[str, int], mask: int, length: int) -> None:
        for slot in self._slots_in(mask):
            runs[slot.holder_id] = length

    def _slots_in(self, mask: int) -> Iterator[_Slot]:
        while mask:
            low = mask & -mask
            yield self._by_bit[low.bit_length() - 1]
            mask ^= low

    def tier_runs(self, keys: Sequence[BlockKey], first: int, last: int) -> tuple[TierRun, ...]:
        """Blocks `first` .. `last - 1` as kvstore shards have them, up to the first that none has. RAM before NVMe."""
        runs: list[TierRun] = []
        ram, nvme = self._tier_masks[Tier.RAM], self._tier_masks[Tier.NVME]
        bit, start, place = 0, first, first
        while place < last:
            mask = self._masks.get(keys[place], 0)
            best = mask & ram or mask & nvme
            if not best:
                break
            if not bit & best:
                if bit:
                    runs.append(self._tier_run(bit, start, place))
                bit, start = best & -best, place
            place += 1
        if bit:
            runs.append(self._tier_run(bit, start, place))
        return tuple(runs)

    def _tier_run(self, bit: int, start: int, end: int) -> TierRun:
        slot = self._by_bit[bit.bit_length() - 1]
        return TierRun(start, end - start, SOURCE_OF_TIER[slot.tier], slot.holder_id)
