"""Pure: which block of the pool is whose. Free list, reference counts, prefix reuse; no tensors, no bytes.

Each of the pool's blocks is in exactly one of these states:

    free ----claim----> private (one owner, being filled) ----seal----> sealed, held (refs >= 1)
     ^                     |                                               |        ^
     |<-----release--------+                                            release   claim, join
     |                                                                     v        |
     +<------------------------evict------------------------------- sealed, cached (refs == 0)

Sealed blocks form a tree by their keys (parent key -> child keys). Two invariants carry everything else:

* Who holds a block holds all its ancestors. So a parent is never cached while a child is held, and never evicted before
  its children.
* `_cached` is in order of eviction. `release` appends a chain tail first, so children stand before their parents, and
  the first entry is always a leaf: the least recently used one.

When a sequence seals a block that another sequence has sealed meanwhile, it joins: it takes a reference on the block
that is there and its own copy is free at once. A half-filled block is never shared (failure catalogue F-HSH-03), and
looking up is the same step as taking the reference (F-HSH-04).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from proto.ids import ROOT_KEY, BlockKey
from shared.engine.protocol import PoolFull, SealedBlock


@dataclass(slots=True)
class _Entry:
    """A sealed block: where it is, what it is, how many sequences hold it, how many sealed blocks continue it."""

    block: int
    sealed: SealedBlock
    refs: int = 0
    children: int = 0


@dataclass(slots=True)
class _Holding:
    """What one request holds: blocks in chain order; the first `len(keys)` of them are sealed under these keys."""

    blocks: list[int]
    keys: list[BlockKey] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Claimed:
    """Answer to `claim`: how many leading blocks were here, and which cached blocks had to go for the others."""

    resident_count: int
    evicted: tuple[BlockKey, ...]


class BlockTable:
    """Owner of all block states. Deterministic: the same calls give the same blocks."""

    def __init__(self, *, blocks_total: int) -> None:
        assert blocks_total >= 1
        self.blocks_total = blocks_total
        # A stack; the lowest block is on top at first.
        self._free: list[int] = list(range(blocks_total))[::-1]
        # Parents stand before their children: a child can only be sealed while its parent is, and leaves go first.
        self._sealed: dict[BlockKey, _Entry] = {}
        self._cached: OrderedDict[BlockKey, None] = OrderedDict()
        self._held: dict[str, _Holding] = {}

    @property
    def free_count(self) -> int:
        """Blocks with nothing in them."""
        return len(self._free)

    @property
    def cached_count(self) -> int:
        """Sealed blocks that nobody holds."""
        return len(self._cached)

    @property
    def held_count(self) -> int:
        """Blocks that some request holds, each counted once."""
        private = sum(len(holding.blocks) - len(holding.keys) for holding in self._held.values())
        return len(self._sealed) - len(self._cached) + private

    def claim(self, request_id: str, keys: Sequence[BlockKey], *, blocks_needed: int) -> Claimed:
        """Take references on the longest resident run of `keys` and reserve the rest of `blocks_needed`, all or nothing.

        Raises PoolFull, then nothing has changed.
        """
        assert request_id not in self._held
        assert len(keys) <= blocks_needed
        hits = []
        for key in keys:
            entry = self._sealed.get(key)
            if entry is None:
                break
            hits.append(entry)
        new_count = blocks_needed - len(hits)
        available = len(self._free) + len(self._cached) - sum(entry.refs == 0 for entry in hits)
        if new_count > available:
            raise PoolFull(needed=new_count, available=available)
        holding = self._held[request_id] = _Holding(blocks=[])
        for entry in hits:
            self._reference(entry)
            holding.blocks.append(entry.block)
            holding.keys.append(entry.sealed.key)
        evicted = tuple(self._evict_leaf() for _ in range(new_count - len(self._free)))
        holding.blocks.extend(self._free.pop() for _ in range(new_count))
        assert len(holding.blocks) == blocks_needed
        return Claimed(resident_count=len(hits), evicted=evicted)

    def blocks(self, request_id: str) -> list[int]:
        """The request's blocks in chain order. The list is the table's own: read it, do not change or keep it."""
        return self._held[request_id].blocks

    def sealed_count(self, request_id: str) -> int:
        """How many leading blocks of the request are sealed."""
        return len(self._held[request_id].keys)

    def seal(self, request_id: str, sealed: SealedBlock) -> bool:
        """The request's first private block is full. True if it is new, False if it was here and the request joined it."""
        holding = self._held[request_id]
        assert sealed.parent == (holding.keys[-1] if holding.keys else ROOT_KEY), "blocks are sealed in chain order"
        if self.join(request_id, sealed.key):
            return False
        entry = _Entry(block=holding.blocks[len(holding.keys)], sealed=sealed, refs=1)
        self._sealed[sealed.key] = entry
        if sealed.parent != ROOT_KEY:
            self._sealed[sealed.parent].children += 1
        holding.keys.append(sealed.key)
        return True

    def join(self, request_id: str, key: BlockKey) -> bool:
        """If `key`, the request's next one, is sealed by now, use that block and free the private one in its place."""
        holding = self._held[request_id]
        entry = self._sealed.get(key)
        if entry is None:
            return False
        index = len(holding.keys)
        self._reference(entry)
        self._free.append(holding.blocks[index])
        holding.blocks[index] = entry.block
        holding.keys.append(key)
        return True

    def release(self, request_id: str) -> None:
        """Give everything back. Sealed blocks stay as cache until they are evicted."""
        holding = self._held.pop(request_id)
        for key in reversed(holding.keys):  # tail first: see the module's docstring
            entry = self._sealed[key]
            entry.refs -= 1
            assert entry.refs >= 0
            if entry.refs == 0:
                self._cached[key] = None
        self._free.extend(reversed(holding.blocks[len(holding.keys) :]))

    def discard(self, request_id: str, *, first_index: int) -> tuple[BlockKey, ...]:
        """Release, and drop the sealed blocks from `first_index` on that nobody else relies on; their keys are returned."""
        holding = self._held[request_id]
        suspects = holding.keys[first_index:]
        self.release(request_id)
        dropped = []
        for key in reversed(suspects):
            entry = self._sealed[key]
            if entry.refs or entry.children:
                break
            del self._cached[key]
            dropped.append(self._forget(key))
        return tuple(dropped)

    def find(self, key: BlockKey) -> int | None:
        """The block that is sealed under `key`. Takes no reference: use it before the next call that may evict."""
        entry = self._sealed.get(key)
        return None if entry is None else entry.block

    def resident(self) -> list[SealedBlock]:
        """All sealed blocks, parents before children."""
        return [entry.sealed for entry in self._sealed.values()]

    def check_integrity(self) -> None:
        """Assert every invariant of the module's docstring. O(blocks)."""
        private = [block for holding in self._held.values() for block in holding.blocks[len(holding.keys) :]]
        sealed = [entry.block for entry in self._sealed.values()]
        assert sorted([*self._free, *private, *sealed]) == list(range(self.blocks_total)), "each block in one state"
        assert self.free_count + self.cached_count + self.held_count == self.blocks_total
        refs = Counter(key for holding in self._held.values() for key in holding.keys)
        children = Counter(entry.sealed.parent for entry in self._sealed.values())
        seen: set[BlockKey] = {ROOT_KEY}
        for key, entry in self._sealed.items():
            assert entry.sealed.key == key and entry.sealed.parent in seen, "a parent is sealed before its children"
            seen.add(key)
            assert entry.refs == refs[key] and entry.children == children[key]
            assert (key in self._cached) == (entry.refs == 0)
        for holding in self._held.values():
            assert len(holding.keys) <= len(holding.blocks)
            for block, key, parent in zip(holding.blocks, holding.keys, [ROOT_KEY, *holding.keys], strict=False):
                assert self._sealed[key].block == block and self._sealed[key].sealed.parent == parent
        gone: Counter[BlockKey] = Counter()
        for key in self._cached:
            assert gone[key] == self._sealed[key].children, "children are evicted before their parent"
            gone[self._sealed[key].sealed.parent] += 1

    def _reference(self, entry: _Entry) -> None:
        if entry.refs == 0:
            del self._cached[entry.sealed.key]
        entry.refs += 1

    def _evict_leaf(self) -> BlockKey:
        key, _ = self._cached.popitem(last=False)
        assert self._sealed[key].children == 0, "only leaves are evicted"
        return self._forget(key)

    def _forget(self, key: BlockKey) -> BlockKey:
        entry = self._sealed.pop(key)
        assert entry.refs == 0 and entry.children == 0
        if entry.sealed.parent != ROOT_KEY:
            self._sealed[entry.sealed.parent].children -= 1
        self._free.append(entry.block)
        return key
