"""Pure: THE CORE of the router. Events in (events.py), a list of instructions out; no clock, no bus, no randomness.

    core = RouterCore(RouterConfig(...), "router-0", epoch)
    for instruction in core.handle(Ticked(now)): ...     # perform it; feed back AssignAnswered and SnapshotArrived
    core.wake_at                                         # when Ticked is due, None if nothing is pending

A generation's way through it:

    GenerateArrived -> waits -> SendAssign -> at a worker -> WorkDone, or lost, or cancelled: off our hands
                         ^         |              |
                         +---------+--------------+   refused, undelivered, prefill stage over: waits again

For one attempt there is at most one worker that may work on a stage of it: after an ASSIGN that was not answered, or a
worker that fell silent, the attempt is given up as LOST, and only the loop makes the next one.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from proto.errors import ErrorCode, ErrorReply
from proto.fleet import Heartbeat, ServiceState
from proto.generate import (
    Assignment,
    CancelGenerate,
    Generate,
    GenerateAccepted,
    GenerateEvent,
    GenerateFailed,
    Pull,
    Queued,
    RouterHello,
    Stage,
    WorkDone,
    WorkOutcome,
)
from services.router import events as ev
from services.router.admission import FINAL_REFUSALS, Models, RouterConfig, counts_of, overloaded, refusal_of
from services.router.events import Answer, Count, Counted, Event, Instruction, Say, SayCancel, SayHello, SendAssign
from services.router.holders import SHARD_TIERS, WORKER_TIERS, Holders
from services.router.index import BlockIndex
from services.router.matching import Matcher, Placement
from services.router.policies import POLICIES
from services.router.queue import Job, JobQueue
from services.router.workers import Sent, WorkerLife
from shared.cards import CardBook
from shared.limits import GENERATE_SIGN_EVERY_S, PULL_SILENT_AFTER_S, SILENT_AFTER_S

# A worker that refused a generation is not asked for it again before this.
REFUSED_PAUSE_S: Final = 1.0
# Lost attempts that a worker which was only silent is told to stop, when it is heard again.
LOST_REMEMBERED_MAX: Final = 16_384


class RouterCore:
    """One life of one router replica. Starts as a standby: it learns who holds what, and decides nothing."""

    def __init__(self, config: RouterConfig, router_id: str, epoch: int) -> None:
        self.config, self.router_id, self.epoch = config, router_id, epoch
        self.is_active = False
        self.index = BlockIndex()
        self.holders = Holders(self.index)
        self.jobs = JobQueue()
        self.lives: dict[str, WorkerLife] = {}
        self._cards = CardBook()
        self._models = Models()
        # By assignment id; each is also in its worker's life.
        self._sent: dict[str, Sent] = {}
        self._lost: OrderedDict[str, int] = OrderedDict()
        self._assignments = 0
        self._matcher = Matcher(
            self.holders,
            config.policy,
            POLICIES[config.policy],
            patience_s_max=config.patience_s_max,
            prefill_tokens_min=config.prefill_tokens_min,
        )

    def handle(self, event: Event) -> list[Instruction]:
        """What to do about it. Instructions are in the order in which they must be begun."""
        match event:
            case ev.GenerateArrived():
                instructions = self._generate(event.generate, event.now, event.wall)
            case ev.PullHeard():
                instructions = self._pull(event.pull, event.now)
            case ev.WorkDoneHeard():
                instructions = self._work_done(event.done, event.now)
            case ev.AssignAnswered():
                instructions = self._assign_answered(event)
            case ev.CancelHeard():
                instructions = self._cancel(event.cancel)
            case ev.DeltaHeard():
                return self.holders.hear_delta(event.delta, event.now)
            case ev.SnapshotArrived():
                return self.holders.hear_snapshot(event.holder_id, event.ask_number, event.snapshot, event.now)
            case ev.HeartbeatHeard():
                instructions = self._heartbeat(event.heartbeat, event.now)
            case ev.BecameActive():
                self.is_active = True
                instructions = [SayHello(RouterHello(router_id=self.router_id, epoch=self.epoch))]
            case ev.BecameStandby():
                return self._step_down()
            case ev.Ticked():
                instructions = self._tick(event.now)
        return [*instructions, *self._match(event.now)]

    @property
    def wake_at(self) -> float | None:
        """When something is due. Costs a walk over the line, so ask after a tick, or when a timer is set."""
        times = [min(job.sign_at, job.deadline) for job in self.jobs.waiting()]
        times += [job.held_until for job in self.jobs.waiting() if job.held_for is not None]
        times += [until for job in self.jobs.waiting() for until in job.refused.values()]
        times += [life.heard_at + PULL_SILENT_AFTER_S for life in self.lives.values() if life.sent]
        if (feeds := self.holders.wake_at()) is not None:
            times.append(feeds)
        return min(times, default=None)

    # -- generations

    def _generate(self, generate: Generate, now: float, wall: float) -> list[Instruction]:
        if (refusal := self._refusal(generate)) is not None:
            return [Answer(refusal), *counts_of(refusal)]
        if generate.attempt <= self.jobs.latest_attempt(generate.generation_id):
            return [Answer(GenerateAccepted(depth=self.jobs.waiting_count))]
        deadline = now + generate.deadline_at - wall
        if deadline <= now:
            return [Answer(ErrorReply(code=ErrorCode.DEADLINE, message="the deadline has passed"))]
        instructions: list[Instruction] = []
        older = self.jobs.get(generate.generation_id)
        if older is not None and older.sent is not None:
            instructions.append(self._revoke(generate.generation_id, older.generate.attempt, "a newer attempt came"))
            self._take_back(older.sent)
            self.jobs.remove(older)
        depth = self.jobs.waiting_count
        self.jobs.add(generate, now=now, deadline=deadline, sign_at=now + GENERATE_SIGN_EVERY_S)
        return [Answer(GenerateAccepted(depth=depth)), *instructions]

    def _refusal(self, generate: Generate) -> ErrorReply | None:
        if not self.is_active:
            return ErrorReply(code=ErrorCode.UNAVAILABLE, message="this router is a standby", retry_after_s=0.25)
        if (refusal := refusal_of(generate, self._models, self.lives)) is not None:
            return refusal
        is_known = self.jobs.get(generate.generation_id) is not None
        if not is_known and self.jobs.waiting_count >= self.config.queue_count_max:
            return overloaded(self.jobs.waiting_count)
        return None

    def _cancel(self, cancel: CancelGenerate) -> list[Instruction]:
        self.jobs.remember(cancel.generation_id, cancel.through_attempt)
        job = self.jobs.get(cancel.generation_id)
        if job is not None and job.generate.attempt <= cancel.through_attempt:
            # The worker, if one has it, hears the cancel itself.
            if job.sent is not None:
                self._take_back(job.sent)
            self.jobs.remove(job)
        return []

    def _revoke(self, generation_id: str, through_attempt: int, reason: str) -> SayCancel:
        return SayCancel(CancelGenerate(generation_id=generation_id, through_attempt=through_attempt, reason=reason))

    def _fail(self, job: Job, error: ErrorReply) -> list[Instruction]:
        """Give the attempt up and tell the loop."""
        if job.sent is not None:
            self._take_back(job.sent)
        self.jobs.remove(job)
        return [self._say(job.generate, GenerateFailed(error=error))]

    def _say(self, generate: Generate, body: GenerateFailed | Queued) -> Say:
        event = GenerateEvent(generation_id=generate.generation_id, attempt=generate.attempt, body=body)
        return Say(generate.reply_subject, event)

    # -- workers

    def _pull(self, pull: Pull, now: float) -> list[Instruction]:
        life = self.lives.get(pull.worker_id)
        instructions: list[Instruction] = []
        if life is not None and pull.epoch < life.pull.epoch:
            return []
        if life is None or pull.epoch > life.pull.epoch:
            if life is not None:
                instructions += self._end_life(life, "its worker began a new life", now)
            life = self.lives[pull.worker_id] = WorkerLife(pull, now, pull.assigned_count)
            self._models.know(pull.model)
            for card in self._cards.model_cards(pull.model):
                if card.worker_id == pull.worker_id:
                    life.set_card(card)
        else:
            life.take(pull, now)
        instructions += self.holders.hear_life(pull.worker_id, pull.epoch, WORKER_TIERS, now)
        for work in pull.running:
            through = self._outdated(work.generation_id)
            if work.attempt <= through and self.is_active:
                instructions.append(self._revoke(work.generation_id, through, "given up before"))
        for sent in life.missing(now):
            instructions += self._end_sent(sent, f"{pull.worker_id} has it no more", now)
        return instructions

    def _outdated(self, generation_id: str) -> int:
        """Attempts up to this one must not run any more."""
        job = self.jobs.get(generation_id)
        newest = job.generate.attempt - 1 if job is not None else 0
        return max(newest, self._lost.get(generation_id, 0))

    def _heartbeat(self, heartbeat: Heartbeat, now: float) -> list[Instruction]:
        self._cards.hear(heartbeat, now)
        worker, shard = heartbeat.model_card, heartbeat.kv_card
        if heartbeat.state is ServiceState.STOPPED:
            self.holders.forget(heartbeat.instance_id, heartbeat.epoch)
            life = self.lives.get(heartbeat.instance_id)
            if life is not None and life.pull.epoch <= heartbeat.epoch:
                return self._end_life(life, "its worker stopped", now)
            return []
        if worker is not None:
            self._models.know(worker.model)
            if (life := self.lives.get(worker.worker_id)) is not None:
                life.set_card(worker)
            return self.holders.hear_life(worker.worker_id, worker.epoch, WORKER_TIERS, now, heartbeat.residency_seq)
        if shard is not None:
            return self.holders.hear_life(shard.shard_id, shard.epoch, SHARD_TIERS, now, heartbeat.residency_seq)
        return []

    def _end_life(self, life: WorkerLife, why: str, now: float) -> list[Instruction]:
        self.lives.pop(life.worker_id, None)
        instructions: list[Instruction] = []
        for sent in list(life.sent.values()):
            instructions += self._end_sent(sent, why, now)
        return instructions

    def _end_sent(self, sent: Sent, why: str, now: float) -> list[Instruction]:
        """Its worker has it no more, as far as we know. A prefill stage is left out; an attempt is lost."""
        job = self.jobs.get(sent.generation_id)
        assert job is not None and job.sent is sent
        if sent.stage is Stage.PREFILL:
            # It says no tokens, so a decode worker may go on even if it still lives.
            self._requeue(job, now, prefill_over=True)
            return []
        self._lost[sent.generation_id] = max(sent.attempt, self._lost.get(sent.generation_id, 0))
        self._lost.move_to_end(sent.generation_id)
        while len(self._lost) > LOST_REMEMBERED_MAX:
            self._lost.popitem(last=False)
        error = ErrorReply(code=ErrorCode.LOST, message=f"the generation was at {sent.worker_id}, but {why}")
        return [*self._fail(job, error), Counted(Count.LOST)]

    def _take_back(self, sent: Sent) -> None:
        """Nothing is expected of this assignment any more."""
        del self._sent[sent.assignment_id]
        life = self.lives.get(sent.worker_id)
        if life is not None:
            life.sent.pop(sent.assignment_id, None)

    def _requeue(self, job: Job, now: float, *, prefill_over: bool) -> None:
        assert job.sent is not None
        self._take_back(job.sent)
        job.is_prefill_over = job.is_prefill_over or prefill_over
        # Said soon: the assignment may have used up most of the loop's patience.
        self.jobs.requeue(job, now, sign_at=now)

    def _work_done(self, done: WorkDone, now: float) -> list[Instruction]:
        counts: list[Instruction] = []
        if self.is_active and done.outcome in (WorkOutcome.DONE, WorkOutcome.PREFILLED):
            counts = [
                Counted(Count.PROMISED_TOKENS, done.promised_cached_tokens),
                Counted(Count.FOUND_TOKENS, done.found_cached_tokens),
            ]
        sent = self._sent.get(done.assignment_id)
        if sent is None:
            return counts
        job = self.jobs.get(sent.generation_id)
        assert job is not None and job.sent is sent
        if sent.stage is Stage.PREFILL and done.outcome is not WorkOutcome.CANCELLED:
            if done.outcome is WorkOutcome.PREFILLED:
                job.prefill_worker_id = sent.worker_id
            self._requeue(job, now, prefill_over=True)
            return counts
        # The worker has told the loop how it ended.
        self._take_back(sent)
        self.jobs.remove(job)
        return counts

    def _assign_answered(self, event: ev.AssignAnswered) -> list[Instruction]:
        sent = self._sent.get(event.assignment_id)
        if sent is None:
            return []
        job, life = self.jobs.get(sent.generation_id), self.lives.get(sent.worker_id)
        assert job is not None and job.sent is sent
        sent.is_answered = True
        if event.outcome is ev.AssignOutcome.ACCEPTED:
            return []
        if event.outcome is ev.AssignOutcome.UNANSWERED:
            revoke = self._revoke(sent.generation_id, sent.attempt, "the worker did not answer")
            return [
                *self._end_sent(sent, "it did not answer", event.now),
                *([revoke] if sent.stage is Stage.DECODE else []),
            ]
        if life is not None:
            # What it said of its room was wrong; its next pull counts.
            life.is_room_void = True
            if event.outcome is ev.AssignOutcome.UNDELIVERED:
                life.never_came(sent)
        if event.error is not None and event.error.code in FINAL_REFUSALS:
            return self._fail(job, event.error)
        job.refused[sent.worker_id] = event.now + REFUSED_PAUSE_S
        self._requeue(job, event.now, prefill_over=sent.stage is Stage.PREFILL)
        return [Counted(Count.REFUSED)]

    # -- time

    def _tick(self, now: float) -> list[Instruction]:
        instructions = self.holders.tick(now)
        self._cards.forget_silent(now)
        for life in [life for life in self.lives.values() if life.is_silent(now)]:
            instructions += self._end_life(life, f"it was silent for {PULL_SILENT_AFTER_S:g} s", now)
        for depth, job in enumerate(list(self.jobs.waiting())):
            if job.held_for is not None and now >= job.held_until:
                job.held_for = None
            job.refused = {worker: until for worker, until in job.refused.items() if until > now}
            if now >= job.deadline:
                late = ErrorReply(code=ErrorCode.DEADLINE, message="the deadline passed in the router's queue")
                instructions += [*self._fail(job, late), Counted(Count.DEADLINE)]
            elif now >= job.sign_at:
                job.sign_at = now + GENERATE_SIGN_EVERY_S
                instructions.append(self._say(job.generate, Queued(depth=depth)))
        return instructions

    def _step_down(self) -> list[Instruction]:
        """Another router decides now. Loops place again what we had waiting; what workers have goes on without us."""
        over = ErrorReply(code=ErrorCode.DRAINING, message="this router is not the active one any more")
        said: list[Instruction] = [self._say(job.generate, GenerateFailed(error=over)) for job in self.jobs.waiting()]
        self.is_active = False
        for life in self.lives.values():
            life.sent.clear()
            life.sent_count = life.pull.assigned_count
        self._sent.clear()
        self.jobs.clear()
        return said

    # -- placing

    def _match(self, now: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        if not self.is_active or not self.jobs.waiting_count:
            return instructions
        while (placed := self._matcher.next(self.jobs.waiting(), self.lives, now)) is not None:
            instructions += self._assign(placed, now)
        return instructions

    def _assign(self, placed: Placement, now: float) -> list[Instruction]:
        job, life = placed.job, placed.life
        assert life.room > 0 and job.sent is None
        self._assignments += 1
        life.sent_count += 1
        sent = Sent(
            assignment_id=f"a{self.epoch}-{self._assignments}",
            worker_id=life.worker_id,
            generation_id=job.generation_id,
            attempt=job.generate.attempt,
            stage=placed.stage,
            number=life.sent_count,
            new_tokens=placed.offer.reach.new_tokens,
        )
        self._sent[sent.assignment_id] = life.sent[sent.assignment_id] = sent
        self.jobs.sent(job, sent)
        assignment = Assignment(
            assignment_id=sent.assignment_id,
            worker_epoch=life.pull.epoch,
            stage=placed.stage,
            generate=job.generate,
            plan=placed.plan(),
            queued_s=now - job.first_queued_at,
            prefill_worker_id=job.prefill_worker_id,
        )
        counts = [Count.PLACED]
        counts += [Count.BLIND] if placed.offer.is_blind else []
        counts += [Count.HELD] if job.held_for is not None else []
        job.held_for = None
        return [SendAssign(life.worker_id, assignment), *(Counted(count) for count in counts)]


def with_decision_time(assignment: Assignment, seconds: float) -> Assignment:
    """The assignment with what only the shell can measure."""
    plan = assignment.plan.model_copy(update={"decided_in_s": seconds})
    return assignment.model_copy(update={"plan": plan})


assert SILENT_AFTER_S > PULL_SILENT_AFTER_S, "a worker's blocks are remembered longer than its room"
__all__ = ["RouterConfig", "RouterCore", "with_decision_time"]
