"""Messages and a driver for tests of the router's core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from proto.chat import Sampling
from proto.fleet import Heartbeat, KvStoreCard, ModelCard, ServiceState
from proto.generate import Generate, Pull, RunningWork, Stage, WorkDone, WorkerPrice, WorkOutcome
from proto.ids import BlockKey
from proto.residency import ResidencyDelta, ResidencySnapshot, Tier, TierChange
from services.router import events as ev
from services.router.core import RouterConfig, RouterCore
from shared.block_hash import Namespace, chain_keys

BLOCK = 16
MODEL = "m"
I = TypeVar("I")  # noqa: E741

PRICE = WorkerPrice(prefill_token_s=0.002)


def card(worker: str = "w1", epoch: int = 1, model: str = MODEL, fingerprint: str = "f") -> ModelCard:
    return ModelCard(
        worker_id=worker, epoch=epoch, model=model, fingerprint=fingerprint, tokenizer_digest="t", kv_dtype="f32",
        layout_version=1, block_tokens=BLOCK, context_tokens=8192, block_bytes=1000,
    )  # fmt: skip


NAMESPACE = Namespace.of_card(card()).digest()


def generate(name: str, tokens: int = 64, *, attempt: int = 1, seed: int = 0, **more: Any) -> Generate:
    """A generation whose prompt is `seed, seed + 1, ...`: equal seeds share their prefix."""
    ids = tuple(range(seed, seed + tokens))
    fields: dict[str, Any] = {
        "generation_id": name, "attempt": attempt, "session_id": "s", "turn_id": "t", "request_id": "r", "tenant": "x",
        "model": MODEL, "namespace": NAMESPACE, "tokens": ids, "keys": chain_keys(NAMESPACE, ids, BLOCK),
        "sampling": Sampling(max_tokens=8), "deadline_at": 1_000_000.0, "submitted_at": 0.0,
        "reply_subject": f"reply.{name}",
    }  # fmt: skip
    return Generate(**{**fields, **more})


def pull(worker: str = "w1", room: int = 1, seen: int = 0, **more: Any) -> Pull:
    fields: dict[str, Any] = {
        "worker_id": worker, "epoch": 1, "stage": Stage.DECODE, "base_namespace": NAMESPACE, "model": MODEL, "room": room,
        "assigned_count": seen, "blocks_total": 10_000, "blocks_free": 10_000, "block_bytes": 1000, "price": PRICE,
    }  # fmt: skip
    return Pull(**{**fields, **more})


def beat(instance: str, *, epoch: int = 1, state: ServiceState = ServiceState.READY, **cards: Any) -> Heartbeat:
    return Heartbeat(
        service="decode", instance_id=instance, epoch=epoch, state=state, host="h", pid=1, metrics_port=1,
        started_at=0.0, sent_at=0.0, **cards,
    )  # fmt: skip


def shard_card(shard: str, epoch: int = 1) -> KvStoreCard:
    return KvStoreCard(
        shard_id=shard, epoch=epoch, host="h", data_port=1, ram_path="/r", nvme_path="/n", host_token="x"
    )


def delta(
    holder: str, seq: int, stored: Sequence[BlockKey] = (), dropped: Sequence[BlockKey] = (),
    *, epoch: int = 1, tier: Tier = Tier.DEVICE,
) -> ResidencyDelta:  # fmt: skip
    change = TierChange(tier=tier, stored=tuple(stored), dropped=tuple(dropped))
    return ResidencyDelta(holder_id=holder, epoch=epoch, seq=seq, changes=(change,))


def page(
    holder: str, seq: int, keys: Sequence[BlockKey], *, epoch: int = 1, tier: Tier = Tier.DEVICE, is_last: bool = True
) -> ResidencySnapshot:
    return ResidencySnapshot(holder_id=holder, epoch=epoch, seq=seq, tier=tier, keys=tuple(keys), is_last=is_last)


class Driver:
    """A core, a fake clock, and every instruction it gave."""

    def __init__(self, *, active: bool = True, **config: Any) -> None:
        self.core = RouterCore(RouterConfig(**config), "router-0", 7)
        self.now = 100.0
        self.log: list[ev.Instruction] = []
        if active:
            self.tell(ev.BecameActive(self.now))

    def tell(self, event: ev.Event) -> list[ev.Instruction]:
        new = self.core.handle(event)
        self.log += new
        check(self.core)
        return new

    def all(self, kind: type[I]) -> list[I]:
        return [instruction for instruction in self.log if isinstance(instruction, kind)]

    # -- short for the events

    def submit(self, wanted: Generate) -> Any:
        """The answer."""
        new = self.tell(ev.GenerateArrived(self.now, self.now, wanted))
        (answer,) = [instruction.reply for instruction in new if isinstance(instruction, ev.Answer)]
        return answer

    def pulls(self, *pulls: Pull) -> None:
        for one in pulls:
            self.tell(ev.PullHeard(self.now, one))

    def knows(self, worker: str, keys: Sequence[BlockKey] = (), epoch: int = 1) -> None:
        """The worker's heartbeat came, and all pages of its snapshot."""
        self.tell(ev.HeartbeatHeard(self.now, beat(worker, epoch=epoch, model_card=card(worker, epoch))))
        self.answer_snapshots({(worker, Tier.DEVICE): keys}, epoch)

    def has_shard(self, shard: str, ram: Sequence[BlockKey] = (), nvme: Sequence[BlockKey] = ()) -> None:
        self.tell(ev.HeartbeatHeard(self.now, beat(shard, kv_card=shard_card(shard))))
        self.answer_snapshots({(shard, Tier.RAM): ram, (shard, Tier.NVME): nvme})

    def answer_snapshots(self, held: dict[tuple[str, Tier], Sequence[BlockKey]], epoch: int = 1) -> None:
        answered = 0
        while answered < len(self.log):
            ask = self.log[answered]
            answered += 1
            if isinstance(ask, ev.AskSnapshot) and (ask.holder_id, ask.request.tier) in held:
                keys = held[ask.holder_id, ask.request.tier]
                snapshot = page(ask.holder_id, 0, keys, tier=ask.request.tier, epoch=epoch)
                self.tell(ev.SnapshotArrived(self.now, ask.holder_id, ask.ask_number, snapshot))

    def answered(
        self, sent: ev.SendAssign, outcome: ev.AssignOutcome = ev.AssignOutcome.ACCEPTED, error: Any = None
    ) -> list[ev.Instruction]:
        return self.tell(ev.AssignAnswered(self.now, sent.assignment.assignment_id, outcome, error))

    def done(self, sent: ev.SendAssign, outcome: WorkOutcome = WorkOutcome.DONE) -> list[ev.Instruction]:
        work = sent.assignment
        message = WorkDone(
            worker_id=sent.worker_id, epoch=work.worker_epoch, assignment_id=work.assignment_id,
            generation_id=work.generate.generation_id, attempt=work.generate.attempt, outcome=outcome,
        )  # fmt: skip
        return self.tell(ev.WorkDoneHeard(self.now, message))

    def passes(self, seconds: float, *, step: float = 0.25, alive: Sequence[Pull] = ()) -> None:
        """Time passes; those who are alive pull."""
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now = min(end, self.now + step)
            self.pulls(*alive)
            self.tell(ev.Ticked(self.now))

    @property
    def sends(self) -> list[ev.SendAssign]:
        return self.all(ev.SendAssign)

    @property
    def said(self) -> list[tuple[str, str]]:
        """(generation, kind or error code) of all events said to loops."""
        return [
            (one.event.generation_id, str(getattr(getattr(one.event.body, "error", None), "code", one.event.body.kind)))
            for one in self.all(ev.Say)
        ]


def running(sent: ev.SendAssign) -> RunningWork:
    work = sent.assignment
    return RunningWork(
        generation_id=work.generate.generation_id, attempt=work.generate.attempt, assignment_id=work.assignment_id
    )


def check(core: RouterCore) -> None:
    """What holds after every event."""
    waiting = list(core.jobs.waiting())
    assert [job.order for job in waiting] == sorted(job.order for job in waiting), "the line is in order"
    assert all(job.sent is None for job in waiting)
    in_lives = {name for life in core.lives.values() for name in life.sent}
    assert in_lives == set(core._sent), "an assignment is in its worker's life, or nowhere"
    at_workers = {sent.generation_id for sent in core._sent.values()}
    assert len(at_workers) == len(core._sent), "a generation is at one worker"
    assert core.jobs.count == len(waiting) + len(at_workers), "every job waits or is at a worker"
    for life in core.lives.values():
        assert life.room >= 0 and life.sent_count >= life.pull.assigned_count
