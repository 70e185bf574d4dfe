"""The residency index against the holders' truth, over loss, reordering, paging and new lives."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from proto.fleet import ServiceState
from proto.ids import BlockKey
from proto.receipt import Source
from proto.residency import ResidencyDelta, ResidencySnapshot, Tier
from services.router import events as ev
from services.router.holders import WORKER_TIERS, Holders
from services.router.index import BlockIndex, TierRun
from services.router.lease import Holder, Lease, Step
from tests.unit.router.drive import Driver, beat, card, delta, page, pull

KEYS = tuple(BlockKey(number.to_bytes(16, "big")) for number in range(1, 65))


def test_runs_are_leading_runs() -> None:
    """A hole ends a worker's run; tiers go on where it ends, RAM before NVMe, up to the first block nobody has."""
    index = BlockIndex()
    index.store("a", Tier.DEVICE, KEYS[:3])
    index.store("b", Tier.DEVICE, (*KEYS[:1], *KEYS[2:8]))
    index.store("c", Tier.DEVICE, KEYS[1:8])
    index.store("kv", Tier.NVME, KEYS[:6])
    index.store("kv", Tier.RAM, KEYS[2:4])
    assert index.device_runs(KEYS) == {"a": 3, "b": 1}
    assert index.device_runs(KEYS[:3]) == {"a": 3, "b": 1}
    assert index.device_runs(()) == {}
    assert index.tier_runs(KEYS, 1, 8) == (
        TierRun(1, 1, Source.NVME, "kv"),
        TierRun(2, 2, Source.RAM, "kv"),
        TierRun(4, 2, Source.NVME, "kv"),
    )
    index.forget("kv")
    assert index.tier_runs(KEYS, 1, 8) == ()
    index.drop("a", Tier.DEVICE, KEYS)
    index.forget("b")
    index.forget("c")
    assert (index.block_count, index.entry_count) == (0, 0)


def test_an_older_life_counts_nothing_and_silence_forgets() -> None:
    """F-IDX: a restarted worker holds nothing of what it held before."""
    driver = Driver()
    driver.pulls(pull("w1", room=0))
    driver.knows("w1", KEYS[:4])
    driver.tell(ev.DeltaHeard(driver.now, delta("w1", 1, KEYS[4:5])))
    assert driver.core.index.block_count == 5
    driver.tell(ev.DeltaHeard(driver.now, delta("w1", 1, KEYS[:1], epoch=2)))
    assert driver.core.index.block_count == 0
    driver.tell(ev.DeltaHeard(driver.now, delta("w1", 2, KEYS[:9], epoch=1)))
    assert driver.core.index.block_count == 0
    driver.knows("w1", KEYS[:2], epoch=2)
    assert driver.core.index.block_count == 2
    driver.passes(6.0)
    assert driver.core.index.block_count == 0 and driver.core.holders.count == 0
    driver.has_shard("kv", ram=KEYS[:3])
    assert driver.core.index.block_count == 3
    driver.tell(ev.HeartbeatHeard(driver.now, beat("kv", state=ServiceState.STOPPED)))
    assert driver.core.index.block_count == 0


def test_a_failed_page_is_asked_for_again_ever_more_slowly() -> None:
    """A holder that does not answer costs a bounded rate of requests."""
    holders = Holders(BlockIndex())
    asks = [one for one in holders.hear_life("w", 1, WORKER_TIERS, 0.0) if isinstance(one, ev.AskSnapshot)]
    now, times = 0.0, []
    for _ in range(12):
        holders.hear_snapshot("w", asks[-1].ask_number, None, now)
        due = holders.wake_at()
        assert due is not None
        times.append(round(due - now, 6))
        now = due
        holders.hear_life("w", 1, WORKER_TIERS, now)
        asks += [one for one in holders.tick(now) if isinstance(one, ev.AskSnapshot)]
    assert times == sorted(times) and times[0] < 0.2 and times[-1] == 10.0


def test_a_change_that_only_a_page_knows_of_is_waited_for() -> None:
    """The page is newer than the last delta: its number must come, or the holder is read again."""
    driver = Driver()
    driver.tell(ev.DeltaHeard(0.0, delta("w", 1, KEYS[:1])))
    (ask,) = driver.all(ev.AskSnapshot)
    driver.tell(ev.SnapshotArrived(driver.now, "w", ask.ask_number, page("w", 1, KEYS[:1], is_last=False)))
    second = driver.all(ev.AskSnapshot)[-1]
    driver.tell(ev.SnapshotArrived(driver.now, "w", second.ask_number, page("w", 3, KEYS[4:5])))
    driver.tell(ev.HeartbeatHeard(driver.now + 2.0, beat("w")))
    driver.tell(ev.DeltaHeard(driver.now + 2.0, delta("w", 2, KEYS[1:2])))
    driver.tell(ev.Ticked(driver.now + 2.1))
    assert len(driver.all(ev.AskSnapshot)) == 3


def test_a_last_change_that_was_lost_is_noticed_by_the_heartbeat() -> None:
    """No delta follows it, so no gap shows; the holder's own count does, after the time that a late one may take."""
    driver = Driver()
    driver.knows("w", KEYS[:1])
    driver.tell(ev.DeltaHeard(driver.now, delta("w", 1)))
    asks = len(driver.all(ev.AskSnapshot))
    driver.tell(ev.HeartbeatHeard(driver.now, beat("w", model_card=card("w"), residency_seq=2)))
    driver.tell(ev.DeltaHeard(driver.now, delta("w", 2, KEYS[1:2])))
    driver.passes(3.0)
    assert len(driver.all(ev.AskSnapshot)) == asks
    driver.tell(ev.HeartbeatHeard(driver.now, beat("w", model_card=card("w"), residency_seq=3)))
    driver.tell(ev.Ticked(driver.now + 1.9))
    assert len(driver.all(ev.AskSnapshot)) == asks
    driver.tell(ev.Ticked(driver.now + 2.0))
    assert len(driver.all(ev.AskSnapshot)) == asks + 1


class Truth:
    """A holder: its blocks, its deltas, its snapshots in pages."""

    def __init__(self) -> None:
        self.epoch, self.seq = 1, 0
        self.keys: set[BlockKey] = set()

    def change(self, rng: random.Random) -> ResidencyDelta:
        stored = tuple(rng.sample(KEYS, 2))
        self.seq += 1
        self.keys |= set(stored)
        dropped = tuple(key for key in rng.sample(KEYS, 2) if key in self.keys and key not in stored)
        self.keys -= set(dropped)
        return delta("w", self.seq, stored, dropped, epoch=self.epoch)

    def restart(self) -> None:
        self.epoch, self.seq, self.keys = self.epoch + 1, 0, set()

    def page(self, after: bytes) -> ResidencySnapshot:
        rest = sorted(key for key in self.keys if key > after)
        return page("w", self.seq, rest[:5], epoch=self.epoch, is_last=len(rest) <= 5)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_any_interleaving_ends_in_the_truth(seed: int) -> None:
    """Deltas lost, late and repeated, pages lost and late, lives ended: quiet afterwards, the index is what is held."""
    rng = random.Random(seed)
    truth, holders, now = Truth(), Holders(BlockIndex()), 0.0
    air: list[ResidencyDelta] = []
    asks: list[ev.AskSnapshot] = []
    pages: list[tuple[int, ResidencySnapshot]] = []

    def done(instructions: list[ev.Instruction]) -> None:
        asks.extend(one for one in instructions if isinstance(one, ev.AskSnapshot))

    def step(kind: int, *, is_lossy: bool) -> None:
        if kind == 0 and air:
            heard = air.pop(rng.randrange(len(air)) if is_lossy else 0)
            if not (is_lossy and rng.random() < 0.2):
                done(holders.hear_delta(heard, now))
        elif kind == 1 and asks:
            ask = asks.pop(0)
            pages.append((ask.ask_number, truth.page(ask.request.after_key)))
        elif kind == 2 and pages:
            number, answer = pages.pop(0)
            is_lost = is_lossy and rng.random() < 0.2
            done(holders.hear_snapshot("w", number, None if is_lost else answer, now))
        else:
            done(holders.tick(now))

    for _ in range(120):
        now += 0.1
        action = rng.randrange(8)
        if action < 3:
            air.append(truth.change(rng))
        elif action == 3 and rng.random() < 0.1:
            truth.restart()
        else:
            step(rng.randrange(4), is_lossy=True)
    # Then quiet: whatever was lost last, the heartbeats say how many changes there were.
    for round_number in range(400):
        now += 0.1
        done(holders.hear_life("w", truth.epoch, WORKER_TIERS, now, truth.seq))
        step(round_number % 4, is_lossy=False)
    assert holders.is_live("w")
    assert holders.index.keys_of("w", Tier.DEVICE) == truth.keys
    assert holders.index.block_count == len(truth.keys)


def test_one_lease_one_active() -> None:
    """Expiry by our own clock, takeover by a new life of the same instance, CAS for the rest."""
    first, again = Lease(Holder("router-0", 1), 3.0), Lease(Holder("router-0", 2), 3.0)
    other = Lease(Holder("router-1", 5), 3.0)
    assert first.decide(None, 0.0) is Step.CREATE
    first.renewed(0.0)
    assert first.is_active(2.9) and not first.is_active(3.0)
    entry = (first.me.packed(), 1)
    assert first.decide(entry, 1.0) is Step.UPDATE
    assert other.decide(entry, 1.0) is Step.WAIT
    assert again.decide(entry, 1.0) is Step.UPDATE
    assert first.decide((again.me.packed(), 2), 2.0) is Step.WAIT
    assert other.decide(entry, 8.0) is Step.UPDATE  # the bucket should have forgotten it
    assert other.decide((b"\xff", 9), 8.0) is Step.UPDATE
