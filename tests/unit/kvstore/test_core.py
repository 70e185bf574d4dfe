"""The kvstore's core: what is written where, what is announced, what a failing or full tier costs."""

from __future__ import annotations

import random

import pytest

from proto.ids import BlockKey
from proto.residency import SnapshotRequest, Tier
from services.kvstore import events as ev
from services.kvstore.core import PAUSE_S_MAX, KvStoreCore
from services.kvstore.events import Announce, Instruction, LetGo, Settled, WriteBatch
from tests.unit.kvstore.frames import chain, info

BOTH = {Tier.RAM: 1_000, Tier.NVME: 2_000}


def made(capacities: dict[Tier, int] | None = None, waiting_bytes_max: int = 100_000) -> KvStoreCore:
    return KvStoreCore("shard-0", 1, BOTH if capacities is None else capacities, waiting_bytes_max=waiting_bytes_max)


def only(kind: type, instructions: list[Instruction]) -> list[Instruction]:
    return [instruction for instruction in instructions if isinstance(instruction, kind)]


def put(core: KvStoreCore, count: int, *, seed: int = 0, now: float = 0.0) -> list[Instruction]:
    said: list[Instruction] = []
    for block in chain(count, seed=seed):
        said += core.handle(ev.PutArrived(info(block), now))
    core.check_integrity()
    return said


def commit_all(core: KvStoreCore) -> list[Instruction]:
    """Every batch succeeds, until nothing waits."""
    said: list[Instruction] = []
    while not core.is_idle:
        for tier, state in core._tiers.items():
            if state.in_flight is not None:
                said += core.handle(ev.BatchCommitted(tier))
                core.check_integrity()
    return said


def test_a_put_goes_to_both_tiers_and_is_announced_after_each_commit() -> None:
    core = made()
    (block,) = chain(1)
    batches = core.handle(ev.PutArrived(info(block), 0.0))
    assert [(b.tier, b.puts) for b in batches if isinstance(b, WriteBatch)] == [
        (Tier.RAM, (block.key,)), (Tier.NVME, (block.key,)),
    ]  # fmt: skip
    assert not only(Announce, batches) and core.tier_of(block.key) is None
    said = core.handle(ev.BatchCommitted(Tier.RAM))
    assert [change.stored for a in only(Announce, said) for change in a.delta.changes] == [(block.key,)]  # type: ignore[union-attr]
    assert only(Settled, said) == [Settled((block.key,))] and not only(LetGo, said)
    assert core.tier_of(block.key) is Tier.RAM
    said = core.handle(ev.BatchCommitted(Tier.NVME))
    assert only(LetGo, said) == [LetGo((block.key,))], "the bytes are kept until the last tier has them"
    assert core.seq == 2 and core.is_idle and core.pending_bytes == 0


def test_a_second_put_of_the_same_block_is_settled_at_once() -> None:
    core = made()
    put(core, 1)
    commit_all(core)
    (block,) = chain(1)
    assert core.handle(ev.PutArrived(info(block), 0.0)) == [Settled((block.key,)), LetGo((block.key,))]


def test_puts_that_come_while_a_batch_is_written_share_the_next_one() -> None:
    core = made()
    put(core, 4)
    said = core.handle(ev.BatchCommitted(Tier.RAM))
    (batch,) = only(WriteBatch, said)
    assert isinstance(batch, WriteBatch) and len(batch.puts) == 3


def test_a_full_tier_evicts_with_the_next_batch_and_says_so_after_it() -> None:
    core = made({Tier.RAM: 500})
    put(core, 5)
    commit_all(core)
    old = chain(5)
    said = put(core, 2, seed=1)
    assert core.tier_of(old[4].key) is None, "what is evicted is not served any more"
    dropped = [
        key for a in only(Announce, [*said, *commit_all(core)]) for change in a.delta.changes  # type: ignore[union-attr]
        for key in change.dropped
    ]  # fmt: skip
    assert dropped == [old[4].key, old[3].key]
    assert core.counts(Tier.RAM) == (2, 0)


def test_a_failed_batch_pauses_the_tier_longer_each_time_and_settles_its_puts() -> None:
    core = made({Tier.NVME: 10_000})
    now, pauses = 0.0, []
    for seed in range(9):
        said = put(core, 2, seed=seed, now=now)
        assert only(WriteBatch, said)
        said = core.handle(ev.BatchFailed(Tier.NVME, "I/O error", False, now))
        core.check_integrity()
        assert {key for s in only(Settled, said) for key in s.keys} == {b.key for b in chain(2, seed=seed)}  # type: ignore[union-attr]
        assert not only(Announce, said) and core.pending_bytes == 0
        assert core.troubles() == ("nvme tier: I/O error",)
        pause = core._tiers[Tier.NVME].paused_until - now
        pauses.append(pause)
        # Within the pause nothing is written, and whoever puts is not kept waiting.
        during = put(core, 1, seed=100 + seed, now=now + pause / 2)
        assert only(Settled, during) and not only(WriteBatch, during)
        now += pause + 0.001
    assert pauses[:3] == pytest.approx([1.0, 2.0, 4.0]) and max(pauses) == pytest.approx(PAUSE_S_MAX)
    put(core, 1, seed=50, now=now)
    commit_all(core)
    assert core.troubles() == ()


def test_the_other_tier_carries_on() -> None:
    core = made()
    put(core, 3)
    said = core.handle(ev.BatchFailed(Tier.NVME, "no space", True, 0.0))
    assert not only(Settled, said), "RAM may still have them"
    commit_all(core)
    assert all(core.tier_of(block.key) is Tier.RAM for block in chain(3))


def test_a_tier_that_says_it_is_full_gives_room_back() -> None:
    core = made({Tier.NVME: 800})
    put(core, 8)
    commit_all(core)
    put(core, 1, seed=1)
    core.handle(ev.BatchFailed(Tier.NVME, "map full", True, 0.0))
    core.check_integrity()
    index = core.index_of(Tier.NVME)
    assert index is not None and index.used_bytes <= 700


def test_what_a_failed_batch_was_to_delete_goes_after_the_pause_without_a_put() -> None:
    """Else routers would believe for ever in blocks that are not served."""
    core = made({Tier.RAM: 300})
    put(core, 3)
    commit_all(core)
    evicting = put(core, 1, seed=1)
    assert only(WriteBatch, evicting)
    core.handle(ev.BatchFailed(Tier.RAM, "x", False, 10.0))
    assert core.handle(ev.Ticked(10.5)) == []
    (batch,) = core.handle(ev.Ticked(11.0))
    assert isinstance(batch, WriteBatch) and chain(3)[2].key in batch.deletes and not batch.puts
    said = core.handle(ev.BatchCommitted(Tier.RAM))
    assert [change.dropped for a in only(Announce, said) for change in a.delta.changes] == [batch.deletes]  # type: ignore[union-attr]
    assert core.troubles() == ()


def test_a_damaged_block_is_deleted_and_announced_and_may_come_back() -> None:
    core = made({Tier.RAM: 1_000})
    put(core, 3)
    commit_all(core)
    middle = chain(3)[1]
    said = [*core.handle(ev.Damaged(Tier.RAM, middle.key)), *commit_all(core)]
    assert core.tier_of(middle.key) is None
    assert [change.dropped for a in only(Announce, said) for change in a.delta.changes] == [(middle.key,)]  # type: ignore[union-attr]
    core.handle(ev.PutArrived(info(middle), 0.0))
    commit_all(core)
    assert core.tier_of(middle.key) is Tier.RAM


def test_damaged_while_written_anew_is_not_served() -> None:
    """Reported twice, put in between: the second report is of the old copy, and costs one more recompute at most."""
    core = made({Tier.RAM: 1_000})
    put(core, 1)
    (block,) = chain(1)
    assert core.handle(ev.Damaged(Tier.RAM, block.key)) == [], "a put that is not stored cannot be damaged"
    commit_all(core)
    assert core.tier_of(block.key) is Tier.RAM


def test_what_was_found_at_the_start_is_in_the_snapshot_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.kvstore.core.PAGE_KEYS_MAX", 3)
    core = made()
    blocks = chain(8)
    assert core.handle(ev.Found(Tier.NVME, tuple(info(block) for block in blocks))) == []
    keys: list[BlockKey] = []
    while True:
        page = core.snapshot(SnapshotRequest(after_key=keys[-1] if keys else b"", tier=Tier.NVME))
        keys += page.keys
        if page.is_last:
            break
    assert keys == sorted(block.key for block in blocks)
    assert core.snapshot(SnapshotRequest(tier=Tier.RAM)).keys == ()


def test_a_capacity_that_was_lowered_is_kept_at_the_start() -> None:
    core = made({Tier.NVME: 500})
    blocks = chain(8)
    (batch,) = core.handle(ev.Found(Tier.NVME, tuple(info(block) for block in blocks)))
    assert isinstance(batch, WriteBatch) and set(batch.deletes) == {block.key for block in blocks[5:]}
    core.check_integrity()


def test_a_slow_nvme_tier_is_passed_over_and_ram_is_not() -> None:
    core = made({Tier.RAM: 10_000, Tier.NVME: 10_000}, waiting_bytes_max=300)
    put(core, 8)
    assert len(core._tiers[Tier.RAM].waiting) == 7
    assert len(core._tiers[Tier.NVME].waiting) == 3
    assert core.counts(Tier.NVME) == (0, 4)
    commit_all(core)


def test_what_goes_below_the_capacity_of_both_is_dropped_and_settled() -> None:
    core = made({Tier.RAM: 50, Tier.NVME: 50})
    said = put(core, 1)
    assert only(Settled, said) and not only(WriteBatch, said) and core.pending_bytes == 0


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_events_keeps_the_invariants(seed: int) -> None:
    """Puts, commits, failures, reports and touches as they come; what is announced is what is stored."""
    draw = random.Random(seed)
    core = made(
        {Tier.RAM: draw.choice([300, 700, 5_000]), Tier.NVME: draw.choice([500, 2_000])}, draw.choice([200, 9_000])
    )
    pool = [block for number in range(4) for block in chain(6, seed=number)]
    said_stored: dict[Tier, set[BlockKey]] = {tier: set() for tier in BOTH}
    held: set[BlockKey] = set()
    asked: set[BlockKey] = set()
    now, seq = 0.0, 0

    def perform(instructions: list[Instruction]) -> None:
        nonlocal seq
        for instruction in instructions:
            match instruction:
                case Announce(delta):
                    seq += 1
                    assert delta.seq == seq
                    for change in delta.changes:
                        said_stored[change.tier] |= set(change.stored)
                        said_stored[change.tier] -= set(change.dropped)
                case LetGo(keys):
                    held.difference_update(keys)
                case Settled(keys):
                    asked.difference_update(keys)
                case WriteBatch(_, _, puts):
                    assert set(puts) <= held, "the shell has the bytes of what it is to write"

    for _ in range(600):
        now += draw.random()
        in_flight = [tier for tier, state in core._tiers.items() if state.in_flight is not None]
        kind = draw.choice(["put", "put", "put", "end", "end", "touch", "damage"])
        if kind == "put":
            block = draw.choice(pool)
            held.add(block.key)
            asked.add(block.key)
            perform(core.handle(ev.PutArrived(info(block, draw.choice([60, 100])), now)))
        elif kind == "end" and in_flight:
            tier = draw.choice(in_flight)
            if draw.random() < 0.2:
                perform(core.handle(ev.BatchFailed(tier, "x", draw.random() < 0.5, now)))
            else:
                perform(core.handle(ev.BatchCommitted(tier)))
        elif kind == "touch":
            perform(core.handle(ev.Touched(tuple(block.key for block in chain(6, seed=draw.randrange(4))))))
        elif kind == "damage":
            perform(core.handle(ev.Damaged(draw.choice(list(BOTH)), draw.choice(pool).key)))
        core.check_integrity()
    perform(commit_all(core))
    perform(core.handle(ev.Touched(())))
    assert not asked, "nobody waits for ever"
    assert not held, "no bytes are kept for ever"
    for tier, state in core._tiers.items():
        # A failing tier keeps its deletes for later, so it may still be said to hold what it does not serve.
        assert set(state.index.stored()) <= said_stored[tier]
        if not state.failures and not state.deleting:
            assert set(state.index.stored()) == said_stored[tier]
