"""THE SHELL of the router: hears, performs what its core decides, and holds the lease that makes it the active one."""

from __future__ import annotations

import asyncio
from typing import Final

from proto.errors import ErrorCode, ErrorReply, WireError
from proto.fleet import FleetPing, Heartbeat
from proto.generate import Assignment, AssignReply, CancelGenerate, Generate, GenerateAccepted, Pull, WorkDone
from proto.residency import ResidencyDelta, ResidencySnapshot
from proto.subjects import (
    ASSIGN,
    CANCEL_GENERATE,
    FLEET_PING,
    GENERATE,
    LEASES,
    PULL,
    RESIDENCY,
    ROUTER_HELLO,
    SNAPSHOT,
    WORK_DONE,
)
from services.router import events as ev
from services.router.core import RouterConfig, RouterCore, with_decision_time
from services.router.lease import LEASE_KEY, Holder, Lease, Step
from services.router.settings import RouterSettings
from shared.bus import KvBucket
from shared.log import get_logger
from shared.metrics import Health, counter, gauge, histogram
from shared.service import Service
from shared.settings import WORKER_SERVICES

RENEW_EVERY_S: Final = 1.0
# With nothing pending the core is still looked after so often: silence is noticed by nothing else.
TICK_S_MAX: Final = 1.0
# Timers closer together than this are one.
TICK_S_MIN: Final = 0.005
# GENERATE requests handled at once; each is handled without waiting, so this is only a bound.
GENERATES_MAX: Final = 4_096
DECISION_BUCKETS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25)

QUEUE = gauge("roost_router_queue_depth", "Generations that wait for a worker.")
WORKERS = gauge("roost_router_workers", "Workers that pull.")
ACTIVE = gauge("roost_router_active", "1 on the replica that holds the lease.")
BLOCKS = gauge("roost_router_index_blocks", "Distinct blocks in the residency index.")
DECISIONS = counter("roost_router_decisions_total", "What was decided, and what became of it.", ("policy", "outcome"))
TOKENS = counter("roost_router_cached_tokens_total", "Cached tokens as plans promised and as workers found.", ("kind",))
SNAPSHOTS = counter("roost_router_snapshots_total", "Times a holder was read from the beginning.")
DECISION_SECONDS = histogram(
    "roost_router_decision_seconds", "Time of one event that led to an assignment.", buckets=DECISION_BUCKETS
)

log = get_logger()


class RouterService(Service[RouterSettings]):
    """Shell of the router. Decides nothing: services/router/core.py and lease.py do."""

    name = "router"
    settings_type = RouterSettings

    async def start(self) -> None:
        """See Service."""
        settings = self.settings
        config = RouterConfig(
            policy=settings.router_policy,
            queue_count_max=settings.router_queue,
            patience_s_max=settings.router_patience_s_max,
            prefill_tokens_min=settings.router_prefill_tokens_min,
        )
        self._core = RouterCore(config, self.instance_id, self.epoch)
        self._lease = Lease(Holder(self.instance_id, self.epoch), LEASES.ttl_s)
        self._wake = asyncio.Event()
        self._is_leaving = False
        await self.hear_fleet(self._heard_heartbeat, "kvstore", *WORKER_SERVICES)
        await self.bus.subscribe(RESIDENCY, ResidencyDelta, self._heard_delta)
        await self.bus.subscribe(PULL, Pull, self._heard_pull)
        await self.bus.subscribe(WORK_DONE, WorkDone, self._heard_done)
        await self.bus.subscribe(CANCEL_GENERATE, CancelGenerate, self._heard_cancel)
        # Cards come with heartbeats: without waiting for the next ones, a new life plans as well as an old one.
        await self.bus.publish(FLEET_PING, FleetPing(asked_by=self.instance_id))
        self._bucket = await self.bus.bucket(LEASES)
        await self._renew(self._bucket)
        self.spawn(self._hold_lease())
        self.spawn(self._ticks())

    async def drain(self) -> None:
        """Stop serving and give the lease back, so that another replica begins at once. Loops place the rest again."""
        self._is_leaving = True
        if self._lease.is_active(self.clock.monotonic()):
            await self._step_down()
            try:
                await self.bus.flush()
                await self._bucket.delete(LEASE_KEY)
            except WireError as away:
                log.warning("lease_not_returned", error=str(away))

    def health(self) -> Health:
        """Ready also as a standby."""
        base = super().health()
        if base.ready and not self._core.lives:
            return Health(ready=True, degraded=True, reasons=("no worker pulls",))
        return base

    def load(self) -> dict[str, float]:
        """See Service."""
        if not hasattr(self, "_core"):
            return {}
        return {
            "active": float(self._core.is_active),
            "queue": float(self._core.jobs.waiting_count),
            "workers": float(len(self._core.lives)),
            "blocks": float(self._core.index.block_count),
        }

    # -- what is heard

    def _heard_heartbeat(self, heartbeat: Heartbeat) -> None:
        self._tell(ev.HeartbeatHeard(self.clock.monotonic(), heartbeat))

    def _heard_delta(self, delta: ResidencyDelta) -> None:
        self._tell(ev.DeltaHeard(self.clock.monotonic(), delta))

    def _heard_pull(self, pull: Pull) -> None:
        self._tell(ev.PullHeard(self.clock.monotonic(), pull))

    def _heard_done(self, done: WorkDone) -> None:
        self._tell(ev.WorkDoneHeard(self.clock.monotonic(), done))

    def _heard_cancel(self, cancel: CancelGenerate) -> None:
        self._tell(ev.CancelHeard(self.clock.monotonic(), cancel))

    async def _generate(self, generate: Generate) -> GenerateAccepted:
        if not self._lease.is_active(self.clock.monotonic()):
            raise WireError(ErrorCode.UNAVAILABLE, "this router lost its lease", retry_after_s=0.25)
        answer = self._tell(ev.GenerateArrived(self.clock.monotonic(), self.clock.now(), generate))
        assert answer is not None
        if isinstance(answer, ErrorReply):
            raise WireError.from_reply(answer)
        return answer

    # -- what is done

    def _tell(self, event: ev.Event) -> GenerateAccepted | ErrorReply | None:
        """Let the core decide and begin what it says. Returns the answer, if the event was a request."""
        if self._core.is_active and not self._lease.is_active(self.clock.monotonic()):
            # Late to renew: whoever has the lease now decides. _hold_lease does the rest.
            self._become_standby()
        began = self.clock.monotonic()
        instructions = self._core.handle(event)
        took = self.clock.monotonic() - began
        answer: GenerateAccepted | ErrorReply | None = None
        talks: list[ev.Instruction] = []
        for instruction in instructions:
            match instruction:
                case ev.Answer():
                    answer = instruction.reply
                case ev.Counted():
                    self._count(instruction)
                case ev.SendAssign():
                    DECISION_SECONDS.observe(took)
                    talks.append(ev.SendAssign(instruction.worker_id, with_decision_time(instruction.assignment, took)))
                case _:
                    talks.append(instruction)
        if talks:
            self.spawn(self._talk(talks))
        if self._core.jobs.waiting_count or talks:
            self._wake.set()
        return answer

    def _count(self, counted: ev.Counted) -> None:
        match counted.count:
            case ev.Count.SNAPSHOT:
                SNAPSHOTS.inc(counted.by)
            case ev.Count.PROMISED_TOKENS | ev.Count.FOUND_TOKENS:
                TOKENS.labels(kind=counted.count.value).inc(counted.by)
            case _:
                DECISIONS.labels(policy=self.settings.router_policy, outcome=counted.count.value).inc(counted.by)

    async def _talk(self, instructions: list[ev.Instruction]) -> None:
        """Say it in order; what has an answer is waited for beside."""
        for instruction in instructions:
            try:
                match instruction:
                    case ev.SendAssign():
                        self.spawn(self._assign(instruction.worker_id, instruction.assignment))
                        # It is written before what follows it.
                        await asyncio.sleep(0)
                    case ev.AskSnapshot():
                        self.spawn(self._snapshot(instruction))
                    case ev.Say():
                        await self.bus.publish_to(instruction.address, instruction.event)
                    case ev.SayCancel():
                        await self.bus.publish(CANCEL_GENERATE, instruction.cancel)
                    case ev.SayHello():
                        await self.bus.publish(ROUTER_HELLO, instruction.hello)
                    case _:
                        raise AssertionError(f"{instruction} is not for the bus")
            except WireError as away:
                # Loops place again what they do not hear of.
                log.warning("not_said", what=type(instruction).__name__, error=str(away))

    async def _assign(self, worker_id: str, assignment: Assignment) -> None:
        outcome, error = ev.AssignOutcome.ACCEPTED, None
        try:
            reply = await self.bus.request(
                ASSIGN, assignment, AssignReply, timeout_s=self.settings.router_assign_timeout_s, worker_id=worker_id
            )
            if not reply.accepted:
                outcome, error = ev.AssignOutcome.REFUSED, reply.error
        except WireError as failed:
            error = failed.reply
            outcome = {
                ErrorCode.DEADLINE: ev.AssignOutcome.UNANSWERED,
                ErrorCode.UNAVAILABLE: ev.AssignOutcome.UNDELIVERED,
            }.get(failed.code, ev.AssignOutcome.REFUSED)
        if outcome is not ev.AssignOutcome.ACCEPTED:
            why = error.message if error else ""
            log.warning("assignment_failed", worker=worker_id, outcome=outcome.value, error=why)
        self._tell(ev.AssignAnswered(self.clock.monotonic(), assignment.assignment_id, outcome, error))

    async def _snapshot(self, ask: ev.AskSnapshot) -> None:
        page: ResidencySnapshot | None = None
        try:
            page = await self.bus.request(
                SNAPSHOT,
                ask.request,
                ResidencySnapshot,
                timeout_s=self.settings.router_snapshot_timeout_s,
                holder_id=ask.holder_id,
            )
        except WireError as failed:
            log.info("snapshot_failed", holder=ask.holder_id, error=str(failed))
        self._tell(ev.SnapshotArrived(self.clock.monotonic(), ask.holder_id, ask.ask_number, page))

    def _become_standby(self) -> None:
        said = self._core.handle(ev.BecameStandby(self.clock.monotonic()))
        if said:
            self.spawn(self._talk(said))

    # -- time

    async def _ticks(self) -> None:
        while True:
            self._wake.clear()
            now = self.clock.monotonic()
            due = self._core.wake_at
            wait_s = TICK_S_MAX if due is None else min(max(due - now, TICK_S_MIN), TICK_S_MAX)
            try:
                await asyncio.wait_for(self._wake.wait(), wait_s)
                # Events that come close together set one timer.
                await self.clock.sleep(TICK_S_MIN)
                if (due := self._core.wake_at) is None or due > self.clock.monotonic():
                    continue
            except TimeoutError:
                self._show()
            self._tell(ev.Ticked(self.clock.monotonic()))

    def _show(self) -> None:
        QUEUE.set(self._core.jobs.waiting_count)
        WORKERS.set(len(self._core.lives))
        BLOCKS.set(self._core.index.block_count)
        ACTIVE.set(self._core.is_active)

    # -- the lease

    async def _hold_lease(self) -> None:
        while not self._is_leaving:
            await self.clock.sleep(RENEW_EVERY_S)
            if not self._is_leaving:
                await self._renew(self._bucket)

    async def _renew(self, bucket: KvBucket) -> None:
        """One round: take, keep or see who has the lease, and be what that says."""
        asked_at = self.clock.monotonic()
        # An answer that comes after the lease has ended is of no use.
        try:
            is_ours = await asyncio.wait_for(self._write_lease(bucket, asked_at), LEASES.ttl_s)
        except (WireError, TimeoutError) as away:
            log.warning("lease_not_renewed", error=repr(away))
            is_ours = None
        if self._is_leaving:
            return
        if is_ours:
            self._lease.renewed(asked_at)
        elif is_ours is False:
            self._lease.lost()
        is_active = self._lease.is_active(self.clock.monotonic())
        if is_active and not self._is_serving:
            await self._step_up()
        elif not is_active and self._is_serving:
            await self._step_down()
        elif is_active and not self._core.is_active:
            self._tell(ev.BecameActive(self.clock.monotonic()))

    async def _write_lease(self, bucket: KvBucket, now: float) -> bool:
        entry = await bucket.get(LEASE_KEY)
        match self._lease.decide(entry, now):
            case Step.CREATE:
                return await bucket.create(LEASE_KEY, self._lease.me.packed()) is not None
            case Step.UPDATE:
                assert entry is not None
                return await bucket.update(LEASE_KEY, self._lease.me.packed(), entry[1]) is not None
            case Step.WAIT:
                return False

    _is_serving = False

    async def _step_up(self) -> None:
        self._is_serving = True
        self._tell(ev.BecameActive(self.clock.monotonic()))
        log.info("active", policy=self.settings.router_policy)
        await self.bus.serve(GENERATE, Generate, self._generate, limit=GENERATES_MAX)

    async def _step_down(self) -> None:
        log.warning("standby")
        self._is_serving = False
        self._become_standby()
        self._lease.lost()
        await self.bus.unsubscribe(GENERATE)
