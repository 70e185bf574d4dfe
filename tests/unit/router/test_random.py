"""Random events, messages lost and late: never two workers for one attempt, nothing lost, everything bounded."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proto.errors import ErrorReply
from proto.generate import CancelGenerate, GenerateAccepted, RunningWork, WorkDone, WorkOutcome
from services.router import events as ev
from services.router.events import AssignOutcome
from tests.unit.router.drive import Driver, generate, pull, running

GENERATIONS, QUEUE_MAX = 12, 6


@dataclass
class Worker:
    """What a worker would do, as far as the router can tell."""

    name: str
    epoch: int = 1
    room: int = 2
    seen: int = 0
    has: dict[str, ev.SendAssign] = field(default_factory=dict)
    alive: bool = True

    def running(self) -> tuple[RunningWork, ...]:
        return tuple(running(sent) for sent in self.has.values())


class World:
    """Workers, loops and a bus that loses things, around a real core."""

    def __init__(self, seed: int, policy: str) -> None:
        self.rng = random.Random(seed)
        self.driver = Driver(queue_count_max=QUEUE_MAX, policy=policy)
        self.workers = {name: Worker(name) for name in ("w1", "w2", "w3")}
        # Generation -> (attempt, when a sign of it was last heard); absent when it ended.
        self.open: dict[str, tuple[int, float]] = {}
        self.ended: set[str] = set()
        self.started: dict[tuple[str, int], str] = {}
        self.done = 0

    def tell(self, event: ev.Event, *, loss: float) -> None:
        for one in self.driver.tell(event):
            if isinstance(one, ev.SendAssign):
                self.assign(one, loss)
            elif isinstance(one, ev.Say):
                name, attempt = one.event.generation_id, one.event.attempt
                if name in self.open and self.open[name][0] == attempt and self.rng.random() >= loss:
                    # A failure is retried: its silence begins long ago.
                    is_sign = one.event.body.kind == "queued"
                    self.open[name] = (attempt, self.driver.now if is_sign else -100.0)
            elif isinstance(one, ev.SayCancel):
                for worker in self.workers.values():
                    for key, sent in list(worker.has.items()):
                        work = sent.assignment.generate
                        if (
                            work.generation_id == one.cancel.generation_id
                            and work.attempt <= one.cancel.through_attempt
                        ):
                            del worker.has[key]

    def assign(self, sent: ev.SendAssign, loss: float) -> None:
        worker, work = self.workers[sent.worker_id], sent.assignment
        name, chance = work.assignment_id, self.rng.random()
        if not worker.alive:
            outcome = AssignOutcome.UNDELIVERED
        elif chance < loss:
            outcome = AssignOutcome.UNANSWERED
        else:
            worker.seen += 1
            is_taken = work.worker_epoch == worker.epoch and len(worker.has) < worker.room
            outcome = AssignOutcome.ACCEPTED if is_taken else AssignOutcome.REFUSED
            if is_taken:
                key = (work.generate.generation_id, work.generate.attempt)
                assert key not in self.started, f"{key} at {worker.name} after {self.started[key]}"
                self.started[key] = worker.name
                worker.has[name] = sent
                if loss and chance < 2 * loss:
                    outcome = AssignOutcome.UNANSWERED
        error = ErrorReply(code="overloaded", message="x") if outcome is AssignOutcome.REFUSED else None  # type: ignore[arg-type]
        self.tell(ev.AssignAnswered(self.driver.now, name, outcome, error), loss=loss)

    def submit(self, name: str) -> None:
        attempt = self.open.get(name, (0, 0.0))[0] + 1
        tokens = 16 * (1 + int(name[1:]))
        self.open[name] = (attempt, self.driver.now)
        event = ev.GenerateArrived(self.driver.now, self.driver.now, generate(name, tokens, attempt=attempt))
        accepted = self.driver.core.handle(event)
        for one in accepted:
            if isinstance(one, ev.Answer) and not isinstance(one.reply, GenerateAccepted):
                self.open[name] = (attempt, -100.0)
            elif isinstance(one, ev.SendAssign):
                self.assign(one, 0.0)
        room = sum(worker.room for worker in self.workers.values())
        assert self.driver.core.jobs.count <= QUEUE_MAX + 2 * room + GENERATIONS

    def beat(self, loss: float) -> None:
        """Workers pull and sign; loops watch."""
        for worker in self.workers.values():
            if not worker.alive or self.rng.random() < loss:
                continue
            room = worker.room - len(worker.has)
            said = pull(worker.name, room=room, seen=worker.seen, epoch=worker.epoch, running=worker.running())
            self.tell(ev.PullHeard(self.driver.now, said), loss=loss)
            for sent in worker.has.values():
                work = sent.assignment.generate
                if self.open.get(work.generation_id, (0, 0))[0] == work.attempt:
                    self.open[work.generation_id] = (work.attempt, self.driver.now)
        for name, (_, heard_at) in list(self.open.items()):
            if self.driver.now - heard_at > 3.5:
                self.submit(name)

    def finish(self, worker: Worker, loss: float) -> None:
        if not worker.alive or not worker.has:
            return
        name, sent = worker.has.popitem()
        work = sent.assignment.generate
        if self.open.get(work.generation_id, (0, 0))[0] == work.attempt:
            del self.open[work.generation_id]
            self.ended.add(work.generation_id)
        if self.rng.random() >= loss:
            done = WorkDone(
                worker_id=worker.name, epoch=worker.epoch, assignment_id=name, generation_id=work.generation_id,
                attempt=work.attempt, outcome=WorkOutcome.DONE,
            )  # fmt: skip
            self.tell(ev.WorkDoneHeard(self.driver.now, done), loss=loss)

    def step(self, number: int) -> None:
        worker = self.rng.choice(list(self.workers.values()))
        action = self.rng.randrange(10)
        if action < 3 and number < GENERATIONS * 6:
            name = f"g{self.rng.randrange(GENERATIONS)}"
            if name not in self.open and name not in self.ended:
                self.submit(name)
        elif action < 6:
            self.finish(worker, 0.1)
        elif action == 6:
            worker.has.clear()
            worker.alive = not worker.alive
            if worker.alive:
                worker.epoch, worker.seen = worker.epoch + 1, 0
        elif action == 7 and self.open and self.rng.random() < 0.2:
            name = self.rng.choice(list(self.open))
            attempt, _ = self.open.pop(name)
            self.ended.add(name)
            cancel = CancelGenerate(generation_id=name, through_attempt=attempt, reason="r")
            for one in self.workers.values():
                one.has = {k: s for k, s in one.has.items() if s.assignment.generate.generation_id != name}
            self.tell(ev.CancelHeard(self.driver.now, cancel), loss=0.0)
        self.driver.now += 0.25
        self.beat(0.1)
        self.tell(ev.Ticked(self.driver.now), loss=0.1)


@pytest.mark.parametrize("policy", ["residency", "round_robin"])
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_no_attempt_runs_twice_and_all_end(policy: str, seed: int) -> None:
    """After the faults stop, every generation that a loop still wants is finished, and the router is empty."""
    world = World(seed, policy)
    for number in range(100):
        world.step(number)
    for worker in world.workers.values():
        if not worker.alive:
            worker.alive, worker.epoch, worker.seen = True, worker.epoch + 1, 0
    for _ in range(200):
        world.driver.now += 0.25
        world.beat(0.0)
        world.tell(ev.Ticked(world.driver.now), loss=0.0)
        for worker in world.workers.values():
            world.finish(worker, 0.0)
    assert world.open == {}
    assert world.driver.core.jobs.count == 0 and not world.driver.core._sent
    assert all(life.room == 2 for life in world.driver.core.lives.values())
