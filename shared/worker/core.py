"""Pure: THE CORE of a worker, of either stage. Events in (events.py), a list of instructions out; no clock, no bus, no engine.

    core = WorkerCore(card, WorkerConfig(...), price, blocks_total=...)
    for instruction in core.handle(Ticked(now)): ...     # perform it in order; feed back what it asks for
    core.wake_at                                         # when Ticked is due

An assignment's way through it is drawn in work.py. Whatever ends one early goes through `_drop`, which lets go of the engine,
and tells whoever must know: the router always, the loop only of a failure it has to act on, and of a prefill stage never.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar, assert_never

from proto.errors import ErrorCode, ErrorReply
from proto.fleet import ModelCard
from proto.generate import AssignReply, CancelGenerate, GenerateFailed, Pull, Stage, TokensOut, WorkerPrice, WorkOutcome
from proto.residency import ResidencySnapshot, SnapshotRequest
from shared.block_hash import Namespace
from shared.engine.protocol import (
    BlocksEvicted,
    BlocksSealed,
    EngineEvent,
    EngineStats,
    PrefillProgress,
    RequestFailed,
    RequestFinished,
    TokensEmitted,
)
from shared.limits import PULL_EVERY_S
from shared.worker import events as ev
from shared.worker.admission import FULL_RETRY_S, Admission, Moment
from shared.worker.events import CountTokens, Event, Fetched, Instruction
from shared.worker.price import PriceKeeper
from shared.worker.residency import BlockLog
from shared.worker.work import Phase, Work

# Answers kept for routers that ask twice; far more than can be on their way.
ANSWERS_MAX: Final = 4_096
# Loading may take at least this, however little computing would take: the first read opens the shard's files.
FETCH_S_MIN: Final = 0.25

E = TypeVar("E", bound=Event)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What the settings say."""

    stage: Stage
    streams_max: int = 8
    fetch_stall_s: float = 2.0
    flush_s: float = 5.0


class WorkerCore:
    """One life of one worker."""

    def __init__(self, card: ModelCard, config: WorkerConfig, price: WorkerPrice, *, blocks_total: int) -> None:
        self.card, self.config = card, config
        self.is_draining = False
        # In hand, by assignment id.
        self.works: dict[str, Work] = {}
        self.price = PriceKeeper(price)
        self.blocks = BlockLog(card.worker_id, card.epoch)
        self._admission = Admission(card, config.stage, streams_max=config.streams_max)
        self._base_namespace = Namespace.of_card(card).digest()
        self._answers: OrderedDict[str, AssignReply] = OrderedDict()
        self._assigned_count = 0
        self._blocks_total = self._blocks_free = blocks_total
        # The engine had no blocks for a prompt: no room is said until something ends, or until this.
        self._full_until = 0.0
        self._pull_at = 0.0
        self._pulled: tuple[object, ...] = ()

    def handle(self, event: Event) -> list[Instruction]:
        """What to do about it. Instructions are in the order in which they must be begun."""
        return [*self._react(event), *self._pull(event.now)]

    def page(self, request: SnapshotRequest) -> ResidencySnapshot:
        """Blocks that are here, as a router asks for them."""
        return self.blocks.page(request)

    @property
    def wake_at(self) -> float:
        """When something is due."""
        times = [self._pull_at, *(work.deadline for work in self.works.values())]
        times += [work.sign_at for work in self.works.values() if work.is_answered]
        return min([*times, self._full_until] if self._full_until else times)

    def room(self, now: float) -> int:
        """Assignments that could be taken now."""
        if self.is_draining or now < self._full_until:
            return 0
        return max(self.config.streams_max - len(self.works), 0)

    def _react(self, event: Event) -> Sequence[Instruction]:
        match event:
            case ev.AssignArrived():
                return self._assign(event)
            case ev.ClaimAnswered():
                return self._claimed(event)
            case ev.FetchEnded():
                work = self.works.get(event.assignment_id)
                return [] if work is None else self._start(work, event.fetched, event.now)
            case ev.FlushEnded():
                return self._flushed(event)
            case ev.EngineTold():
                return self._engine_told(event.events, event.now)
            case ev.StatsArrived():
                self._hear_stats(event.stats)
                return []
            case ev.CancelHeard():
                return self._cancel(event.cancel, event.now)
            case ev.RouterHeard():
                # It asks for the blocks when it hears of us.
                self._pull_at = event.now
                return []
            case ev.BusRestored():
                self._pull_at = event.now
                return [ev.SayDelta(self.blocks.say_again())]
            case ev.DrainBegan():
                self.is_draining = True
                return []
            case ev.DrainCut():
                return self._cut(event.now)
            case ev.Ticked():
                return self._tick(event.now)
            case _:
                assert_never(event)

    # -- from assignment to compute

    def _assign(self, event: ev.AssignArrived) -> list[Instruction]:
        assignment, generate = event.assignment, event.assignment.generate
        name = assignment.assignment_id
        if name in self._answers:
            return [ev.AnswerAssign(name, self._answers[name])]
        if name in self.works:
            return []  # its first copy is answered when the engine has
        self._assigned_count += assignment.worker_epoch == self.card.epoch
        # The router's last word counts, so a second assignment of one attempt replaces the first like an older attempt.
        replaced = [
            work
            for work in self.works.values()
            if work.generate.generation_id == generate.generation_id and work.generate.attempt <= generate.attempt
        ]
        moment = Moment(wall=event.wall, is_draining=self.is_draining, works=len(self.works) - len(replaced))
        if (refusal := self._admission.refusal(assignment, moment)) is not None:
            return [self._refuse(name, refusal)]
        instructions: list[Instruction] = []
        for work in replaced:
            newer = ErrorReply(code=ErrorCode.CANCELLED, message="a newer attempt came")
            instructions += self._drop(work, WorkOutcome.CANCELLED, newer, event.now)
        if generate.attempt > 1:
            self._admission.stop(
                CancelGenerate(
                    generation_id=generate.generation_id,
                    through_attempt=generate.attempt - 1,
                    reason="a newer one came",
                )
            )
        deadline = event.now + generate.deadline_at - event.wall
        work = self.works[name] = Work(assignment, self.card, now=event.now, deadline=deadline)
        return [*instructions, ev.ClaimBlocks(work.request())]

    def _claimed(self, event: ev.ClaimAnswered) -> list[Instruction]:
        work = self.works.get(event.assignment_id)
        if work is None:
            return []  # dropped meanwhile, and the claim with it
        if isinstance(event.answer, ErrorReply):
            self._remove(work)
            if event.answer.code is ErrorCode.OVERLOADED:
                self._full_until = event.now + FULL_RETRY_S
            return [self._refuse(work.assignment_id, event.answer)]
        work.claimed(event.answer, event.now)
        work.is_answered = True
        taken: list[Instruction] = [
            self._answer(work.assignment_id, AssignReply(accepted=True)),
            work.say(work.working(), event.now),
        ]
        missing = work.missing_tokens()
        if not missing:
            return [*taken, *self._start(work, Fetched(), event.now)]
        # Loading for longer than computing takes is not worth it.
        within_s = max(self.price.compute_s(missing), FETCH_S_MIN)
        return [*taken, work.fetch(within_s=within_s, stall_s=self.config.fetch_stall_s)]

    def _start(self, work: Work, fetched: Fetched, now: float) -> list[Instruction]:
        seconds = work.started(fetched, now)
        self.price.hear_load(fetched.bytes_moved, seconds)
        return [ev.StartEngine(work.assignment_id), work.say(work.working(), now)]

    def _refuse(self, assignment_id: str, error: ErrorReply) -> ev.AnswerAssign:
        return self._answer(assignment_id, AssignReply(accepted=False, error=error))

    def _answer(self, assignment_id: str, reply: AssignReply) -> ev.AnswerAssign:
        assert assignment_id not in self._answers, "one answer an assignment"
        self._answers[assignment_id] = reply
        while len(self._answers) > ANSWERS_MAX:
            self._answers.popitem(last=False)
        return ev.AnswerAssign(assignment_id, reply)

    # -- compute

    def _engine_told(self, events: Sequence[EngineEvent], now: float) -> list[Instruction]:
        delta = self.blocks.hear(events)
        instructions: list[Instruction] = [] if delta is None else [ev.SayDelta(delta)]
        for event in events:
            if isinstance(event, BlocksEvicted):
                continue
            # Steps that ran before a cancel came to the engine speak of what is no longer here.
            work = self.works.get(event.request_id)
            if work is not None:
                instructions += self._step_said(work, event, now)
        return instructions

    def _step_said(
        self,
        work: Work,
        event: TokensEmitted | PrefillProgress | BlocksSealed | RequestFinished | RequestFailed,
        now: float,
    ) -> list[Instruction]:
        assert work.phase is Phase.RUNNING
        match event:
            case TokensEmitted():
                out = TokensOut(first=event.first, token_ids=event.token_ids, logprobs=event.logprobs)
                return [work.say(out, now), CountTokens("generated", len(event.token_ids))]
            case PrefillProgress():
                if not work.progressed(event, now):
                    return []
                counts = [CountTokens(source.value, count) for source, count in work.sources.items()]
                return [work.say(work.working(), now), *counts]
            case BlocksSealed():
                put = work.to_put(event.blocks)
                return [] if put is None else [put]
            case RequestFinished() if work.is_prefill:
                work.flushes()
                return [ev.FlushPuts(work.assignment_id, self.config.flush_s)]
            case RequestFinished():
                self._remove(work)
                return [work.say(work.generated(event), now), ev.SayDone(work.done(WorkOutcome.DONE, now))]
            case RequestFailed():
                # Its first attempt may have met a block that went bad here; what fails twice would fail for ever.
                code = ErrorCode.LOST if work.generate.attempt == 1 else ErrorCode.INTERNAL
                error = ErrorReply(code=code, message=f"{self.card.worker_id}: {event.message}")
                return self._drop(work, WorkOutcome.FAILED, error, now)
            case _:
                assert_never(event)

    def _flushed(self, event: ev.FlushEnded) -> list[Instruction]:
        work = self.works.get(event.assignment_id)
        if work is None:
            return []
        assert work.phase is Phase.FLUSHING
        self._remove(work)
        if event.is_stored:
            return [ev.SayDone(work.done(WorkOutcome.PREFILLED, event.now))]
        error = ErrorReply(code=ErrorCode.UNAVAILABLE, message="the kvstore did not take the prompt's blocks in time")
        return [ev.SayDone(work.done(WorkOutcome.FAILED, event.now, error))]

    def _hear_stats(self, stats: EngineStats) -> None:
        # Cached blocks go when room is needed, so they are room.
        self._blocks_free = stats.blocks_free + stats.blocks_cached
        self.price.hear_steps(stats.recent_steps)

    # -- the end of it

    def _drop(self, work: Work, outcome: WorkOutcome, error: ErrorReply, now: float) -> list[Instruction]:
        """Stop it in whatever phase it is."""
        self._remove(work)
        instructions: list[Instruction] = [ev.CancelEngine(work.assignment_id)]
        if not work.is_answered:
            # A refusal: the router places it elsewhere, or tells the loop.
            return [*instructions, self._refuse(work.assignment_id, error)]
        if outcome is WorkOutcome.FAILED and not work.is_prefill:
            instructions.append(work.say(GenerateFailed(error=error), now))
        return [*instructions, ev.SayDone(work.done(outcome, now, error))]

    def _remove(self, work: Work) -> None:
        del self.works[work.assignment_id]
        self._full_until = 0.0

    def _cancel(self, cancel: CancelGenerate, now: float) -> list[Instruction]:
        self._admission.stop(cancel)
        error = ErrorReply(code=ErrorCode.CANCELLED, message=cancel.reason)
        instructions: list[Instruction] = []
        for work in list(self.works.values()):
            generate = work.generate
            if generate.generation_id == cancel.generation_id and generate.attempt <= cancel.through_attempt:
                instructions += self._drop(work, WorkOutcome.CANCELLED, error, now)
        return instructions

    def _cut(self, now: float) -> list[Instruction]:
        self.is_draining = True
        error = ErrorReply(code=ErrorCode.DRAINING, message=f"{self.card.worker_id} is leaving")
        instructions: list[Instruction] = []
        for work in list(self.works.values()):
            instructions += self._drop(work, WorkOutcome.FAILED, error, now)
        return instructions

    # -- time

    def _tick(self, now: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        if now >= self._full_until:
            self._full_until = 0.0
        for work in list(self.works.values()):
            if now >= work.deadline:
                late = ErrorReply(code=ErrorCode.DEADLINE, message=f"the deadline passed at {self.card.worker_id}")
                instructions += self._drop(work, WorkOutcome.FAILED, late, now)
            elif work.is_answered and now >= work.sign_at:
                instructions.append(work.say(work.working(), now))
        return instructions

    def _pull(self, now: float) -> list[Instruction]:
        """Say what room there is if that changed, or if it was not said for a while."""
        pulled = (self.room(now), self._assigned_count, self._blocks_free, *self.works)
        if pulled == self._pulled and now < self._pull_at:
            return []
        self._pulled, self._pull_at = pulled, now + PULL_EVERY_S
        pull = Pull(
            worker_id=self.card.worker_id,
            epoch=self.card.epoch,
            stage=self.config.stage,
            base_namespace=self._base_namespace,
            model=self.card.model,
            room=self.room(now),
            assigned_count=self._assigned_count,
            running=tuple(work.running() for work in self.works.values()),
            blocks_total=self._blocks_total,
            blocks_free=self._blocks_free,
            block_bytes=self.card.block_bytes,
            prefill_tokens_waiting=sum(work.tokens_waiting for work in self.works.values()),
            price=self.price.price,
        )
        return [ev.SayPull(pull)]
