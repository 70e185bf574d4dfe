"""Drives a worker's core with a fake clock, by hand or over a simulated engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from proto.chat import Sampling
from proto.errors import ErrorCode
from proto.fleet import ModelCard
from proto.generate import Assignment, AssignReply, CancelGenerate, Generate, Plan, Pull, Stage, WorkerPrice
from proto.receipt import Source
from shared.block_hash import Namespace, chain_keys
from shared.engine.protocol import (
    BlocksSealed,
    Claim,
    EngineEvent,
    PrefillProgress,
    RequestFinished,
    SealedBlock,
    TokensEmitted,
)
from shared.worker import events as ev
from shared.worker.core import WorkerConfig, WorkerCore
from shared.worker.work import Phase

BLOCK, EPOCH = 4, 7
SALT = b"salt"
CARD = ModelCard(
    worker_id="w", epoch=EPOCH, model="m", fingerprint="f", tokenizer_digest="t", kv_dtype="float32", layout_version=1,
    block_tokens=BLOCK, context_tokens=512, block_bytes=100,
)  # fmt: skip
NAMESPACE = Namespace.of_card(CARD, SALT).digest()
# Offset between the fake wall clock and the fake monotonic one.
WALL = 1_000.0

I = TypeVar("I", bound=ev.Instruction)  # noqa: E741


def generate(name: str = "g", tokens: int = 10, *, attempt: int = 1, **more: Any) -> Generate:
    ids = tuple(range(tokens))
    fields: dict[str, Any] = {
        "generation_id": name, "attempt": attempt, "session_id": "s", "turn_id": "t", "request_id": "r", "tenant": "x",
        "model": "m", "namespace": NAMESPACE, "salt": SALT, "tokens": ids, "keys": chain_keys(NAMESPACE, ids, BLOCK),
        "sampling": Sampling(max_tokens=8), "deadline_at": WALL + 200.0, "submitted_at": WALL,
        "reply_subject": f"reply.{name}",
    }  # fmt: skip
    return Generate(**{**fields, **more})


def assignment(name: str, wanted: Generate, **more: Any) -> Assignment:
    fields: dict[str, Any] = {
        "assignment_id": name, "worker_epoch": EPOCH, "stage": Stage.DECODE, "generate": wanted, "queued_s": 0.5,
        "plan": Plan(policy="residency", predicted_s=2.0),
    }  # fmt: skip
    return Assignment(**{**fields, **more})


def claim(wanted: Generate, resident: int = 0) -> Claim:
    return Claim(keys=wanted.keys, resident_blocks=resident, usable_blocks=(len(wanted.tokens) - 1) // BLOCK)


def sealed(wanted: Generate, first: int, last: int) -> tuple[SealedBlock, ...]:
    """Blocks of its prompt."""
    parents = (bytes(16), *wanted.keys)
    return tuple(
        SealedBlock(wanted.keys[i], parents[i], wanted.tokens[i * BLOCK : (i + 1) * BLOCK], NAMESPACE)  # type: ignore[arg-type]
        for i in range(first, last)
    )


class Driver:
    """A core, a fake clock, and every instruction it gave."""

    def __init__(self, stage: Stage = Stage.DECODE, **config: Any) -> None:
        self.stage = stage
        fields = {"streams_max": 2, **config}
        self.core = WorkerCore(CARD, WorkerConfig(stage=stage, **fields), WorkerPrice(), blocks_total=100)
        self.now = 10.0
        self.log: list[ev.Instruction] = []
        # Engine requests that have not been told to stop or have not ended.
        self.in_engine: set[str] = set()
        self.answers: dict[str, AssignReply] = {}

    def tell(self, event: ev.Event) -> list[ev.Instruction]:
        new = self.core.handle(event)
        self.log += new
        self._book(new)
        check(self.core)
        return new

    def _book(self, new: Sequence[ev.Instruction]) -> None:
        for instruction in new:
            match instruction:
                case ev.ClaimBlocks(request):
                    assert request.request_id not in self.in_engine
                    self.in_engine.add(request.request_id)
                case ev.CancelEngine(name):
                    self.in_engine.discard(name)
                case ev.StartEngine(name) | ev.FetchBlocks(name):
                    assert name in self.in_engine
                case ev.AnswerAssign(name, reply):
                    assert self.answers.setdefault(name, reply) == reply, "the same answer each time"
                    if not reply.accepted:
                        self.in_engine.discard(name)
                case _:
                    pass

    def all(self, kind: type[I]) -> list[I]:
        return [instruction for instruction in self.log if isinstance(instruction, kind)]

    def assign(self, name: str, wanted: Generate, **more: Any) -> list[ev.Instruction]:
        more.setdefault("stage", self.stage)
        return self.tell(ev.AssignArrived(self.now, self.now - 10.0 + WALL, assignment(name, wanted, **more)))

    def claimed(self, name: str, answer: Any) -> list[ev.Instruction]:
        return self.tell(ev.ClaimAnswered(self.now, name, answer))

    def fetched(self, name: str, fetched: ev.Fetched | None = None) -> list[ev.Instruction]:
        return self.tell(ev.FetchEnded(self.now, name, fetched or ev.Fetched()))

    def engine(self, *events: EngineEvent) -> list[ev.Instruction]:
        for event in events:
            if isinstance(event, RequestFinished):
                self.in_engine.discard(event.request_id)
        return self.tell(ev.EngineTold(self.now, events))

    def tick(self, now: float) -> list[ev.Instruction]:
        self.now = now
        return self.tell(ev.Ticked(now))

    def cancel(self, name: str, through: int = 1) -> list[ev.Instruction]:
        cancel = CancelGenerate(generation_id=name, through_attempt=through, reason="the client left")
        return self.tell(ev.CancelHeard(self.now, cancel))

    def reach(self, phase: Phase, name: str, wanted: Generate, **more: Any) -> None:
        """Assign, and go on to a phase."""
        self.assign(name, wanted, **more)
        if phase is Phase.CLAIMING:
            return
        self.claimed(name, claim(wanted))
        if phase is Phase.LOADING:
            return
        self.fetched(name)
        if phase is Phase.FLUSHING:
            self.prompt_done(name, wanted)
            self.finish(name)

    def prompt_done(self, name: str, wanted: Generate) -> list[ev.Instruction]:
        count = len(wanted.tokens)
        blocks = sealed(wanted, 0, count // BLOCK)
        return self.engine(BlocksSealed(name, blocks), PrefillProgress(name, count, count))

    def finish(self, name: str, generated: int = 0) -> list[ev.Instruction]:
        finished = RequestFinished(name, reason="length", generated=generated, resident_tokens=0, loaded_tokens=0,  # type: ignore[arg-type]
                                   computed_tokens=0, prefill_s=1.0, decode_s=2.0)  # fmt: skip
        return self.engine(*([TokensEmitted(name, 0, tuple(range(generated)))] if generated else []), finished)

    @property
    def pull(self) -> Pull:
        return self.all(ev.SayPull)[-1].pull

    @property
    def said(self) -> list[str]:
        """Kinds or error codes of what loops were told."""
        return [_kind(one.event.body) for one in self.all(ev.Say)]

    @property
    def ends(self) -> list[tuple[str, str, ErrorCode | None]]:
        """(assignment, outcome, error) as the router was told."""
        return [
            (one.done.assignment_id, one.done.outcome.value, one.done.error.code if one.done.error else None)
            for one in self.all(ev.SayDone)
        ]

    def code(self, name: str) -> tuple[ErrorCode, str | None]:
        """Why it was refused."""
        reply = self.answers[name]
        assert not reply.accepted and reply.error is not None
        return reply.error.code, reply.error.field


def _kind(body: Any) -> str:
    return str(body.error.code.value) if hasattr(body, "error") else str(body.kind)


def check(core: WorkerCore) -> None:
    """What holds after every event."""
    assert len(core.works) <= core.config.streams_max
    generations = [work.generate.generation_id for work in core.works.values()]
    assert len(generations) == len(set(generations)), "one attempt of a generation"
    for name, work in core.works.items():
        assert name == work.assignment_id
        assert work.is_answered == (work.phase is not Phase.CLAIMING)
        assert work.tokens_waiting >= 0
    assert all(source in Source for work in core.works.values() for source in work.sources)
