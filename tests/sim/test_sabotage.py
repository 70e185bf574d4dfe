"""The auditor itself: each of these breaks one rule in the real code, and some seed must be caught breaking it.

A simulation that passes whatever the code does proves nothing. So take one check, one order or one bound away, run
seeds until the auditor objects, and read what it says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from proto.generate import TokensOut
from proto.residency import ResidencyDelta
from proto.turns import Place
from services.gateway.events import TurnReader
from services.kvstore import events as kv_events
from services.kvstore.core import KvStoreCore
from services.loop import turn_events
from services.loop.turn import TurnMachine
from services.router import events as router_events
from services.router.core import RouterCore
from services.router.holders import Holders
from shared.worker import events as worker_events
from shared.worker.core import WorkerCore
from tests.sim.auditor import checked
from tests.sim.bus import Logs
from tests.sim.storms import loops_cut_off, loops_stalled, much_lost
from tests.sim.system import System

SEEDS_MAX = 60


def caught(*complaints: str, prepare: Callable[[System], None] | None = None, passing: str = "\n") -> str:
    """What the auditor or an assert said first, which must be one of these complaints. `passing` ones do not count."""
    for seed in range(SEEDS_MAX):
        try:
            checked(seed, prepare=prepare)
        except AssertionError as objection:
            said = str(objection).splitlines()[0]
            if passing in said:
                continue
            assert any(complaint in said for complaint in complaints), said
            return said
    pytest.fail(f"nobody noticed in {SEEDS_MAX} seeds")


def test_a_reader_that_delivers_what_was_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed turn says its beginning again; without the place, the client reads it twice."""
    monkeypatch.setattr(TurnReader, "_trimmed", lambda self, event: event)
    monkeypatch.setattr(Place, "__le__", lambda self, other: False)
    caught("given [")


def test_a_reader_that_takes_any_event_as_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost live event leaves a hole, and nobody asks the trail."""
    monkeypatch.setattr(TurnReader, "_is_beyond", lambda self, event: False)
    monkeypatch.setattr(TurnReader, "_is_doubtful_end", lambda self, event: False)
    caught("given [", "given only", "a hole is held back")


def test_a_loop_that_takes_any_tokens_as_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost event of the worker must make the loop ask again, not go on behind the hole."""
    hear = TurnMachine._hear

    def blind(self: TurnMachine, event: Any, now: float) -> Any:
        generation = self._generation
        if generation is not None and isinstance(event.body, TokensOut) and event.body.first > len(generation.emitted):
            body = event.body.model_copy(update={"first": len(generation.emitted)})
            event = event.model_copy(update={"body": body})
        return hear(self, event, now)

    monkeypatch.setattr(TurnMachine, "_hear", blind)
    caught("recorded [", "given [", "recorded only", "given only")


def test_a_loop_that_never_looks_whether_it_still_has_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut off while another replica ended the turn, it would ask for old attempts until the deadline."""
    submit = TurnMachine._submit

    def trusting(self: TurnMachine, now: float) -> list[turn_events.Instruction]:
        return [one for one in submit(self, now) if not isinstance(one, turn_events.Confirm)]

    monkeypatch.setattr(TurnMachine, "_submit", trusting)
    caught("runs ['", prepare=loops_cut_off)


def test_a_log_that_two_loops_may_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stalled loop wakes up after another one has its turn: only the expected sequence number stops it."""

    def append(self: Logs, session_id: str, record: Any, *, expected: int) -> int:
        records = self.sessions.setdefault(session_id, [])
        records.append(record)
        return len(records)

    monkeypatch.setattr(Logs, "append", append)
    caught("record of a turn that is not open", prepare=loops_stalled)


def test_a_kvstore_that_announces_before_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers would send work to blocks that a crash takes away."""
    handle = KvStoreCore.handle

    def hasty(self: KvStoreCore, event: kv_events.Event) -> list[kv_events.Instruction]:
        out = handle(self, event)
        batches = [one for one in out if isinstance(one, kv_events.WriteBatch)]
        return [*out, *(self._announce(batch.tier, batch.puts, ()) for batch in batches)]

    monkeypatch.setattr(KvStoreCore, "handle", hasty)
    caught("announced before its commit")


def test_a_router_that_overlooks_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost delta leaves the index wrong for ever, if nobody counts."""
    hear = Holders.hear_delta

    def lenient(self: Holders, delta: ResidencyDelta, now: float) -> list[router_events.Instruction]:
        feed = self._feeds.get(delta.holder_id)
        if feed is not None and feed.epoch == delta.epoch and delta.seq > feed.seq + 1:
            feed.seq = delta.seq - 1
        return hear(self, delta, now)

    monkeypatch.setattr(Holders, "hear_delta", lenient)
    caught("the index is wrong")


def test_a_router_that_trusts_the_last_number_it_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last delta before a silence is lost, and no gap shows it."""
    hear = Holders.hear_life

    def trusting(self: Holders, holder_id: str, epoch: int, tiers: Any, now: float, seq: int | None = None) -> Any:
        return hear(self, holder_id, epoch, tiers, now)

    monkeypatch.setattr(Holders, "hear_life", trusting)
    caught("the index is wrong", prepare=much_lost)


def test_a_router_that_counts_claims_of_a_dead_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restarted worker's pool is empty, whatever its last life has said."""
    hear = Holders.hear_life

    def forgetful(self: Holders, holder_id: str, epoch: int, tiers: Any, now: float, seq: int | None = None) -> Any:
        feed = self._feeds.get(holder_id)
        if feed is not None:
            feed.epoch = max(feed.epoch, epoch)
        return hear(self, holder_id, epoch, tiers, now, seq)

    monkeypatch.setattr(Holders, "hear_life", forgetful)
    caught("the index is wrong", "has jobs")


def test_a_router_that_forgets_what_it_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """An assignment whose end is overlooked takes room for ever."""
    monkeypatch.setattr(RouterCore, "_work_done", lambda self, done, now: [])
    monkeypatch.setattr(RouterCore, "_end_sent", lambda self, sent, why, now: [])
    caught("the router has jobs")


def test_a_worker_that_leaks_what_it_was_told_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled request whose blocks stay claimed."""
    handle = WorkerCore.handle

    def leaking(self: WorkerCore, event: worker_events.Event) -> list[worker_events.Instruction]:
        return [one for one in handle(self, event) if not isinstance(one, worker_events.CancelEngine)]

    monkeypatch.setattr(WorkerCore, "handle", leaking)
    caught("holds EngineStats")


def test_frames_that_nobody_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged frame taken for good gives wrong tokens, which is the one thing that must never happen."""
    damage = System._damage

    def unseen(self: System) -> None:
        damage(self)
        for frames in self.kv.disk.values():
            for key, frame in frames.items():
                if not frame.is_good:
                    frames[key] = replace(frame, body=bytes(len(frame.body)), is_good=True)

    monkeypatch.setattr(System, "_damage", unseen)
    caught("given [", "recorded [", passing="a stored frame is wrong")
