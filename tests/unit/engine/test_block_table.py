"""The block table: prefix reuse, eviction order, and that nothing is ever lost or owned twice."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proto.ids import ROOT_KEY, BlockKey
from shared.block_hash import chain_keys
from shared.engine.block_table import BlockTable
from shared.engine.protocol import PoolFull, SealedBlock
from tests.tiny_model import NAMESPACE


def blocks_of(*tokens: int) -> list[SealedBlock]:
    """A chain of blocks of one token each."""
    keys = chain_keys(NAMESPACE, tokens, 1)  # type: ignore[arg-type]
    parents = [ROOT_KEY, *keys]
    return [
        SealedBlock(key, parent, (token,), NAMESPACE) for key, parent, token in zip(keys, parents, tokens, strict=False)
    ]


def fill(table: BlockTable, request_id: str, chain: list[SealedBlock], *, room: int = 0) -> tuple[BlockKey, ...]:
    """Claim a chain (and `room` more blocks) and seal all of it; the keys that had to go."""
    claimed = table.claim(request_id, [block.key for block in chain], blocks_needed=len(chain) + room)
    for block in chain[claimed.resident_count :]:
        table.seal(request_id, block)
    table.check_integrity()
    return claimed.evicted


def test_a_second_request_finds_the_prefix() -> None:
    """An agent's next turn begins with the tokens of the last: those blocks are shared, not copied."""
    table = BlockTable(blocks_total=8)
    chain = blocks_of(1, 2, 3)
    fill(table, "a", chain, room=1)
    claimed = table.claim("b", [block.key for block in blocks_of(1, 2, 9)], blocks_needed=4)
    assert claimed.resident_count == 2
    assert table.blocks("a")[:2] == table.blocks("b")[:2]
    assert set(table.blocks("a")[2:]).isdisjoint(table.blocks("b")[2:])
    table.check_integrity()


def test_released_blocks_are_evicted_leaves_first_and_least_recent_first() -> None:
    """A long prefix is used again after its tail: the tail of the older use goes first, the shared root last."""
    table = BlockTable(blocks_total=6)
    old, new = blocks_of(1, 2, 3), blocks_of(1, 2, 4)
    fill(table, "old", old)
    table.release("old")
    fill(table, "new", new)
    table.release("new")
    evicted = fill(table, "big", blocks_of(10, 11, 12, 13, 14, 15))
    assert evicted == (old[2].key, new[2].key, new[1].key, new[0].key)


def test_a_full_pool_refuses_and_changes_nothing() -> None:
    """Overload: the claim that does not fit must not have taken a part of the room (all or nothing)."""
    table = BlockTable(blocks_total=4)
    chain = blocks_of(1, 2)
    fill(table, "a", chain)
    table.release("a")
    fill(table, "b", blocks_of(7, 8))
    # Two are cached, but they are the very blocks the request wants to keep: there is no room for two more.
    with pytest.raises(PoolFull) as full:
        table.claim("c", [block.key for block in chain], blocks_needed=4)
    assert (full.value.needed, full.value.available) == (2, 0)
    table.check_integrity()
    assert table.cached_count == 2
    assert table.claim("d", [block.key for block in chain], blocks_needed=2).resident_count == 2


def test_two_requests_compute_the_same_prefix_at_once() -> None:
    """Two agents start with one system prompt in one batch: one copy stays, the other one's room is free at once."""
    table = BlockTable(blocks_total=6)
    chain = blocks_of(1, 2)
    table.claim("a", [], blocks_needed=3)
    table.claim("b", [], blocks_needed=3)
    assert table.seal("a", chain[0])
    assert not table.seal("b", chain[0])
    assert table.free_count == 1
    assert table.blocks("a")[0] == table.blocks("b")[0]
    # Now the other one is ahead.
    assert table.seal("b", chain[1])
    assert table.join("a", chain[1].key)
    table.check_integrity()
    table.release("a")
    table.release("b")
    assert (table.free_count, table.cached_count, table.held_count) == (4, 2, 0)
    table.check_integrity()


def test_discard_drops_only_what_nobody_relies_on() -> None:
    """A request whose KV is suspect fails while another one already shares its first block: that one stays."""
    table = BlockTable(blocks_total=8)
    chain = blocks_of(1, 2, 3, 4)
    fill(table, "bad", chain)
    table.claim("other", [chain[0].key, chain[1].key], blocks_needed=2)
    assert table.discard("bad", first_index=1) == (chain[3].key, chain[2].key)
    table.check_integrity()
    assert [block.key for block in table.resident()] == [chain[0].key, chain[1].key]


def test_half_filled_blocks_are_never_shared() -> None:
    """F-HSH-03: two sequences with a common prefix that ends inside a block write into different blocks."""
    table = BlockTable(blocks_total=6)
    chain = blocks_of(1)
    fill(table, "a", chain, room=2)
    table.claim("b", [chain[0].key], blocks_needed=3)
    assert table.blocks("a")[0] == table.blocks("b")[0]
    assert set(table.blocks("a")[1:]).isdisjoint(table.blocks("b")[1:])


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_random_life_never_leaks(seed: int) -> None:
    """F-CAN-03: 10,000 random admissions, seals, joins, cancels and failures on a tiny pool; the sum is right each time."""
    print("seed", seed)
    rng = random.Random(seed)
    table = BlockTable(blocks_total=24)
    live: dict[str, list[SealedBlock]] = {}
    known: set[BlockKey] = set()
    for step in range(2_000):
        action = rng.random()
        if action < 0.4:
            chain = blocks_of(*[rng.randrange(2) for _ in range(rng.randrange(1, 9))])
            request_id = f"r{step}"
            try:
                needed = len(chain) + rng.randrange(3)
                claimed = table.claim(request_id, [b.key for b in chain], blocks_needed=needed)
            except PoolFull as full:
                assert full.needed > full.available
            else:
                live[request_id] = chain
                known -= set(claimed.evicted)
                assert {b.key for b in chain[: claimed.resident_count]} <= known
        elif live and action < 0.8:
            request_id = rng.choice(sorted(live))
            index = table.sealed_count(request_id)
            if index < len(live[request_id]):
                block = live[request_id][index]
                assert table.seal(request_id, block) == (block.key not in known)
                known.add(block.key)
        elif live:
            request_id = rng.choice(sorted(live))
            del live[request_id]
            if rng.random() < 0.2:
                known -= set(table.discard(request_id, first_index=rng.randrange(4)))
            else:
                table.release(request_id)
        assert table.free_count + table.cached_count + table.held_count == table.blocks_total
        table.check_integrity()
        assert {block.key for block in table.resident()} == known
    for request_id in list(live):
        table.release(request_id)
    table.check_integrity()
    assert table.free_count + table.cached_count == table.blocks_total
