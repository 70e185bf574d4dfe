"""Pure: what lies in one tier, what it weighs, and what goes first. Chains lose their tail before their head.

Only a leaf is evicted: a block that no other block here continues. So a chain is shortened from its end, and what is left
of it is still a prefix. Among the leaves the least recently used one goes. A use of a chain counts for each of its blocks.

    writing --committed--> stored --evicted, or found damaged--> gone
       |                                                           ^
       +--------------------- write failed ------------------------+

Blocks being written are counted in full and never evicted: they are why others are.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from proto.ids import ROOT_KEY, BlockKey

# The heap holds outdated entries beside the valid ones; it is rebuilt when they outnumber the blocks this often.
STALE_RATIO_MAX = 4
STALE_COUNT_MIN = 64


@dataclass(frozen=True, slots=True)
class Reserved:
    """Answer to `reserve`: whether the block may be written, and which blocks go (they do in any case)."""

    fits: bool
    evicted: tuple[BlockKey, ...]


@dataclass(slots=True)
class _Entry:
    parent: BlockKey
    size_bytes: int
    used: int
    is_writing: bool


class TierIndex:
    """Owner of one tier's bookkeeping. Keys only; the bytes are in tier.py."""

    def __init__(self, capacity_bytes: int) -> None:
        assert capacity_bytes >= 0
        self.capacity_bytes = capacity_bytes
        self._entries: dict[BlockKey, _Entry] = {}
        # Blocks here that continue a key, whether or not that key is here itself.
        self._children: Counter[BlockKey] = Counter()
        # (used, key) of leaves; an entry counts only while it says the truth.
        self._leaves: list[tuple[int, BlockKey]] = []
        self._uses = 0
        self._used_bytes = 0

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def used_bytes(self) -> int:
        """What all blocks here weigh, those being written included."""
        return self._used_bytes

    def is_stored(self, key: BlockKey) -> bool:
        """Whether the block is here, and committed."""
        entry = self._entries.get(key)
        return entry is not None and not entry.is_writing

    def stored(self) -> list[BlockKey]:
        """Committed blocks, sorted by key."""
        return sorted(key for key, entry in self._entries.items() if not entry.is_writing)

    def reserve(self, key: BlockKey, parent: BlockKey, size_bytes: int) -> Reserved:
        """Make room for a block that will be written. It does not fit if only blocks being written are left to go for it."""
        assert key not in self._entries
        if size_bytes > self.capacity_bytes:
            return Reserved(False, ())
        self._add(key, parent, size_bytes, is_writing=True)
        victims: list[BlockKey] = []
        while self._used_bytes > self.capacity_bytes:
            victim = self._oldest_leaf()
            if victim is None:
                self.remove(key)
                return Reserved(False, tuple(victims))
            self.remove(victim)
            victims.append(victim)
        return Reserved(True, tuple(victims))

    def restore(self, key: BlockKey, parent: BlockKey, size_bytes: int) -> None:
        """A block that was found in the tier at the start."""
        if key not in self._entries:
            self._add(key, parent, size_bytes, is_writing=False)

    def commit(self, key: BlockKey) -> bool:
        """The write is done. False if the block was taken out meanwhile."""
        entry = self._entries.get(key)
        if entry is None or not entry.is_writing:
            return False
        entry.is_writing = False
        self._note_leaf(key)
        return True

    def remove(self, key: BlockKey) -> bool:
        """Take a block out, wherever it stands in its chain. False if it is not here."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        self._used_bytes -= entry.size_bytes
        self._children[entry.parent] -= 1
        if not self._children[entry.parent]:
            del self._children[entry.parent]
            self._note_leaf(entry.parent)
        return True

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Blocks of a chain were used, in chain order. Unknown ones are passed over."""
        self._uses += 1
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None:
                entry.used = self._uses
                self._note_leaf(key)

    def shrink(self, bytes_wanted: int) -> tuple[BlockKey, ...]:
        """Evict at least so many bytes, or all that can go."""
        victims: list[BlockKey] = []
        goal = self._used_bytes - bytes_wanted
        while self._used_bytes > goal and (victim := self._oldest_leaf()) is not None:
            self.remove(victim)
            victims.append(victim)
        return tuple(victims)

    def check_integrity(self) -> None:
        """Assert every invariant. O(blocks)."""
        assert self._used_bytes == sum(entry.size_bytes for entry in self._entries.values())
        assert self._used_bytes <= self.capacity_bytes, "a tier keeps to its capacity"
        assert self._children == Counter(entry.parent for entry in self._entries.values())
        noted = set(self._leaves)
        for key, entry in self._entries.items():
            if self._is_evictable(key, entry):
                assert (entry.used, key) in noted, "a leaf that nobody would ever evict"

    def _add(self, key: BlockKey, parent: BlockKey, size_bytes: int, *, is_writing: bool) -> None:
        assert size_bytes > 0 and key != ROOT_KEY
        self._uses += 1
        self._entries[key] = _Entry(parent, size_bytes, self._uses, is_writing)
        self._children[parent] += 1
        self._used_bytes += size_bytes
        self._note_leaf(key)

    def _is_evictable(self, key: BlockKey, entry: _Entry) -> bool:
        return not entry.is_writing and not self._children.get(key)

    def _note_leaf(self, key: BlockKey) -> None:
        entry = self._entries.get(key)
        if entry is None or not self._is_evictable(key, entry):
            return
        heapq.heappush(self._leaves, (entry.used, key))
        if len(self._leaves) > STALE_COUNT_MIN + STALE_RATIO_MAX * len(self._entries):
            self._leaves = list(self._true_leaves())
            heapq.heapify(self._leaves)

    def _true_leaves(self) -> Iterable[tuple[int, BlockKey]]:
        return ((entry.used, key) for key, entry in self._entries.items() if self._is_evictable(key, entry))

    def _oldest_leaf(self) -> BlockKey | None:
        while self._leaves:
            used, key = heapq.heappop(self._leaves)
            entry = self._entries.get(key)
            if entry is not None and entry.used == used and self._is_evictable(key, entry):
                return key
        return None
