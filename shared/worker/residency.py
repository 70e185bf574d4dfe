"""Pure: which blocks this worker holds, as it tells the router. Numbered changes from 1 on, and pages of what is there.

Numbers and keys change in one step, so a page's number is exactly what is in it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Final

from proto.ids import BlockKey
from proto.residency import ResidencyDelta, ResidencySnapshot, SnapshotRequest, Tier, TierChange
from shared.engine.protocol import BlocksEvicted, BlocksSealed, EngineEvent

# 256 KiB of keys a page, far below a message's bound.
PAGE_KEYS_MAX: Final = 16_384


class BlockLog:
    """One life of one worker. Mutable; owned by the worker's core."""

    def __init__(self, holder_id: str, epoch: int) -> None:
        self._holder_id, self._epoch = holder_id, epoch
        self._keys: set[BlockKey] = set()
        self.seq = 0

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._keys

    def hear(self, events: Iterable[EngineEvent]) -> ResidencyDelta | None:
        """Take a step's events in; what changed by all of them together, None if nothing did."""
        # Key -> whether it was here before these events.
        before: dict[BlockKey, bool] = {}
        for event in events:
            match event:
                case BlocksSealed(_, blocks):
                    for block in blocks:
                        before.setdefault(block.key, block.key in self._keys)
                        self._keys.add(block.key)
                case BlocksEvicted(keys):
                    for key in keys:
                        before.setdefault(key, key in self._keys)
                        self._keys.discard(key)
                case _:
                    continue
        stored = tuple(key for key, was_here in before.items() if not was_here and key in self._keys)
        dropped = tuple(key for key, was_here in before.items() if was_here and key not in self._keys)
        return self._next(stored, dropped) if stored or dropped else None

    def say_again(self) -> ResidencyDelta:
        """A change of nothing: whoever missed one before it sees the gap."""
        return self._next((), ())

    def page(self, request: SnapshotRequest) -> ResidencySnapshot:
        """The keys after `after_key`, sorted. A worker has no other tier than its own memory."""
        keys = sorted(self._keys) if request.tier is Tier.DEVICE else []
        first = bisect_right(keys, request.after_key)
        last = first + PAGE_KEYS_MAX
        return ResidencySnapshot(
            holder_id=self._holder_id,
            epoch=self._epoch,
            seq=self.seq,
            tier=request.tier,
            keys=tuple(keys[first:last]),
            is_last=last >= len(keys),
        )

    def _next(self, stored: tuple[BlockKey, ...], dropped: tuple[BlockKey, ...]) -> ResidencyDelta:
        self.seq += 1
        change = TierChange(tier=Tier.DEVICE, stored=stored, dropped=dropped)
        return ResidencyDelta(holder_id=self._holder_id, epoch=self._epoch, seq=self.seq, changes=(change,))
