"""The bookkeeping of one tier: capacity, recency, chains that lose their tail first."""

from __future__ import annotations

from services.kvstore.tier_index import TierIndex
from tests.unit.kvstore.frames import chain


def filled(capacity: int, *chains: int) -> tuple[TierIndex, list[list[bytes]]]:
    """Stored chains of blocks of 1 byte."""
    index, keys = TierIndex(capacity), []
    for seed, count in enumerate(chains):
        blocks = chain(count, seed=seed)
        for block in blocks:
            assert index.reserve(block.key, block.parent, 1).fits
            assert index.commit(block.key)
        keys.append([block.key for block in blocks])
    index.check_integrity()
    return index, keys  # type: ignore[return-value]


def test_the_tail_goes_before_the_head() -> None:
    index, (keys,) = filled(4, 4)
    assert index.shrink(2) == (keys[3], keys[2])
    assert index.stored() == sorted(keys[:2])
    index.check_integrity()


def test_the_chain_that_was_not_used_longest_is_shortened_first() -> None:
    index, (old, new) = filled(8, 4, 4)
    index.touch(old)  # type: ignore[arg-type]
    newcomer = chain(3, seed=7)
    evicted = [key for block in newcomer for key in index.reserve(block.key, block.parent, 1).evicted]
    assert evicted == new[:0:-1]
    index.check_integrity()


def test_what_is_being_written_is_not_evicted() -> None:
    index = TierIndex(2)
    first, second, third = chain(3)
    for block in (first, second):
        assert index.reserve(block.key, block.parent, 1).fits
    assert index.reserve(third.key, third.parent, 1) == index.reserve(third.key, third.parent, 1)
    assert not index.reserve(third.key, third.parent, 1).fits
    assert third.key not in index and index.used_bytes == 2
    index.check_integrity()


def test_a_block_larger_than_the_tier_evicts_nothing() -> None:
    index, (keys,) = filled(3, 3)
    big = chain(1, seed=5)[0]
    reserved = index.reserve(big.key, big.parent, 4)
    assert not reserved.fits and not reserved.evicted
    assert index.stored() == sorted(keys)


def test_a_block_taken_out_of_the_middle_leaves_both_parts_evictable() -> None:
    """A damaged frame: its children are unreachable and go like any leaf, the head stays a prefix."""
    index, (keys,) = filled(4, 4)
    assert index.remove(keys[1])  # type: ignore[arg-type]
    index.check_integrity()
    assert set(index.shrink(3)) == {keys[0], keys[2], keys[3]}
    assert len(index) == 0


def test_many_touches_do_not_grow_the_heap_without_bound() -> None:
    index, (keys,) = filled(4, 4)
    for _ in range(10_000):
        index.touch(keys)  # type: ignore[arg-type]
    assert len(index._leaves) < 200
    index.check_integrity()
