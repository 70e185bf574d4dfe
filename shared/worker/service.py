"""THE SHELL of a worker: turns messages and engine events into events of its core and performs what that answers."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import ClassVar, Final, TypeVar, assert_never

from proto.errors import WireError
from proto.fleet import FleetPing, ModelCard
from proto.frame import FrameFormat
from proto.generate import Assignment, AssignReply, CancelGenerate, Generated, RouterHello, Stage, WorkerPrice
from proto.residency import ResidencySnapshot, SnapshotRequest
from proto.subjects import ASSIGN, CANCEL_GENERATE, FLEET_PING, ROUTER_HELLO, SNAPSHOT
from shared.clock import Clock
from shared.engine.create import create_engine
from shared.engine.protocol import LAYOUT_VERSION, EngineEvent, EngineInfo, EngineStats
from shared.engine.thread import EngineThread
from shared.errors import ModelNotFound
from shared.kv_client import KvClient
from shared.log import get_logger
from shared.metrics import Health, counter, gauge, histogram
from shared.model_dir import ModelDirectory, find_model
from shared.service import Service
from shared.worker import events as ev
from shared.worker.calibrate import Calibration
from shared.worker.core import WorkerConfig, WorkerCore
from shared.worker.jobs import Jobs, Parts
from shared.worker.outbox import Outbox
from shared.worker.puts import PutQueue
from shared.worker.settings import WorkerSettings

# Timers closer together than this are one.
TICK_S_MIN: Final = 0.005
# Share of the time to drain in which running work may end; the rest is for giving back what did not.
DRAIN_SHARE: Final = 0.8
assert 0 < DRAIN_SHARE < 1, "loops must hear of what is cut before the process ends"

STREAMS = gauge("roost_worker_streams", "Generations in hand.")
BLOCKS = gauge("roost_worker_blocks", "Blocks of the pool by use; free, cached and held are all of them.", ("use",))
TOKENS = counter(
    "roost_worker_tokens_total", "Prompt tokens by where their KV came from, and generated tokens.", ("kind",)
)
ASSIGNMENTS = counter(
    "roost_worker_assignments_total", "Assignments by how they were answered and ended.", ("outcome",)
)
LOAD_SECONDS = histogram("roost_worker_load_seconds", "Loading KV of one generation.")
PREFILL_SECONDS = histogram("roost_worker_prefill_seconds", "Computing the prompt of one generation.")
DECODE_SECONDS = histogram("roost_worker_decode_seconds", "Saying the tokens of one generation.")

WorkerSettingsType = TypeVar("WorkerSettingsType", bound=WorkerSettings)

log = get_logger()


class WorkerService(Service[WorkerSettingsType]):
    """Shell of both stages. Decides nothing: core.py does."""

    stage: ClassVar[Stage]

    def __init__(self, settings: WorkerSettingsType, clock: Clock | None = None) -> None:
        super().__init__(settings, clock)
        self._thread: EngineThread | None = None
        self._kv: KvClient | None = None
        self._core: WorkerCore | None = None
        self._calibration: Calibration | None = None
        self._stats: EngineStats | None = None
        self._are_stats_wanted = self._are_stats_asked = False
        # Those who wait for an assignment's answer; every one of them gets it.
        self._waiters: dict[str, list[asyncio.Future[AssignReply]]] = {}
        self._wake, self._idle = asyncio.Event(), asyncio.Event()
        self._trouble: str | None = None

    async def start(self) -> None:
        """See Service."""
        settings = self.settings
        model = await asyncio.to_thread(_find_model, settings)
        make = partial(create_engine, settings.worker_engine, model, settings.engine_options)
        thread = self._thread = EngineThread(make, self._engine_told)
        self.spawn(thread.run())
        info = await thread.ready()
        self._outbox = Outbox(self.bus)
        self._kv = await self._open_kv(info)
        blocks_max = settings.worker_puts_waiting_bytes_max // info.block_bytes
        self._puts = PutQueue(thread, self._kv, blocks_max=blocks_max)
        parts = Parts(thread, self._kv, self._puts, self.clock, info.block_tokens)
        self._jobs = Jobs(parts, tell=self._tell, spawn=self.spawn)
        price = await self._calibrate(thread, info)
        self._core = self._make_core(info, price)
        await self._listen()
        for life in (self._outbox.run(), self._puts.run(), self._ticks()):
            self.spawn(life)
        self._idle.set()
        self._tell(ev.RouterHeard(self.clock.monotonic()))

    async def _open_kv(self, info: EngineInfo) -> KvClient:
        format = FrameFormat(
            kv_dtype=info.kv_dtype,
            layout_version=LAYOUT_VERSION,
            shape=info.body_shape,
            block_bytes=info.block_bytes,
            block_tokens=info.block_tokens,
        )
        kv = KvClient(self.bus, self.clock, format)
        await kv.open()
        # Shards are known by their next heartbeat; asked for one, they are known before the first assignment.
        with suppress(WireError):  # NATS is away; heartbeats come by themselves
            await self.bus.publish(FLEET_PING, FleetPing(asked_by=self.instance_id))
        return kv

    async def _calibrate(self, thread: EngineThread, info: EngineInfo) -> WorkerPrice:
        if self.settings.worker_engine == "sim":
            return self.settings.sim_price
        began = self.clock.monotonic()
        self._calibration = Calibration(thread, info, self.clock)
        price = await self._calibration.run(self.stage, self.settings.worker_step_tokens, WorkerPrice())
        self._calibration = None
        log.info("calibrated", took_s=round(self.clock.monotonic() - began, 3), **price.model_dump())
        return price

    def _make_core(self, info: EngineInfo, price: WorkerPrice) -> WorkerCore:
        card = ModelCard(
            worker_id=self.instance_id,
            epoch=self.epoch,
            model=info.model,
            fingerprint=info.fingerprint,
            tokenizer_digest=info.tokenizer_digest,
            kv_dtype=info.kv_dtype,
            layout_version=LAYOUT_VERSION,
            block_tokens=info.block_tokens,
            rope_scaling=info.rope_scaling,
            context_tokens=info.context_tokens,
            block_bytes=info.block_bytes,
        )
        config = WorkerConfig(
            stage=self.stage,
            streams_max=self.settings.worker_streams_max,
            fetch_stall_s=self.settings.worker_fetch_stall_s,
            flush_s=self.settings.worker_flush_s,
        )
        return WorkerCore(card, config, price, blocks_total=info.blocks_total)

    async def _listen(self) -> None:
        await self.bus.serve(ASSIGN, Assignment, self._assign, worker_id=self.instance_id)
        await self.bus.serve(SNAPSHOT, SnapshotRequest, self._snapshot, holder_id=self.instance_id)
        await self.bus.subscribe(CANCEL_GENERATE, CancelGenerate, self._heard_cancel)
        await self.bus.subscribe(ROUTER_HELLO, RouterHello, self._heard_router)
        self.bus.on_reconnect(self._restored)

    async def drain(self) -> None:
        """Finish what is in hand; what is not done in time goes back to its loop, which places it elsewhere."""
        if self._core is None:
            return
        self._tell(ev.DrainBegan(self.clock.monotonic()))
        try:
            await asyncio.wait_for(self._idle.wait(), self.settings.drain_s * DRAIN_SHARE)
        except TimeoutError:
            log.warning("work_given_back", count=len(self._core.works))
            self._tell(ev.DrainCut(self.clock.monotonic()))
        await self._outbox.emptied()
        await self._puts.handed_over()

    async def stop(self) -> None:
        """See Service."""
        if self._kv is not None:
            await self._kv.close()
        if self._thread is not None:
            await self._thread.stop()

    def health(self) -> Health:
        """Ready, and degraded while the kvstore is not used as it should be."""
        base = super().health()
        if base.ready and self._trouble is not None:
            return Health(ready=True, degraded=True, reasons=(self._trouble,))
        return base

    def load(self) -> dict[str, float]:
        """See Service."""
        core, stats = self._core, self._stats
        if core is None:
            return {}
        load = {"streams": float(len(core.works)), "room": float(core.room(self.clock.monotonic()))}
        if stats is not None:
            load["blocks_used"] = (stats.blocks_held + stats.blocks_cached) / stats.blocks_total
        return load

    def model_card(self) -> ModelCard | None:
        """See Service."""
        return self._core.card if self._core is not None else None

    def residency_seq(self) -> int | None:
        """See Service."""
        return self._core.blocks.seq if self._core is not None else None

    # -- what is heard

    async def _assign(self, assignment: Assignment) -> AssignReply:
        answer: asyncio.Future[AssignReply] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(assignment.assignment_id, []).append(answer)
        self._tell(ev.AssignArrived(self.clock.monotonic(), self.clock.now(), assignment))
        # Its deadline may be the next thing that is due.
        self._wake.set()
        return await answer

    async def _snapshot(self, request: SnapshotRequest) -> ResidencySnapshot:
        assert self._core is not None
        return self._core.page(request)

    def _heard_cancel(self, cancel: CancelGenerate) -> None:
        self._tell(ev.CancelHeard(self.clock.monotonic(), cancel))

    def _heard_router(self, _: RouterHello) -> None:
        self._tell(ev.RouterHeard(self.clock.monotonic()))

    def _restored(self) -> None:
        self._tell(ev.BusRestored(self.clock.monotonic()))
        self.spawn(self.beat())

    def _engine_told(self, events: list[EngineEvent]) -> None:
        if self._calibration is not None:
            self._calibration.hear(events)
        elif self._core is not None:
            self._tell(ev.EngineTold(self.clock.monotonic(), events))

    # -- what is done

    def _tell(self, event: ev.Event) -> None:
        """Let the core decide and begin what it says."""
        core = self._core
        assert core is not None
        before = len(core.works)
        for instruction in core.handle(event):
            self._perform(instruction)
        if len(core.works) != before or isinstance(event, ev.ClaimAnswered):
            STREAMS.set(len(core.works))
            (self._idle.clear if core.works else self._idle.set)()
            self._want_stats()

    def _perform(self, instruction: ev.Instruction) -> None:
        match instruction:
            case ev.AnswerAssign():
                self._answer(instruction)
            case ev.ClaimBlocks():
                self._jobs.claim(instruction.request)
            case ev.FetchBlocks():
                self._jobs.fetch(instruction)
            case ev.StartEngine():
                self._jobs.start(instruction.assignment_id)
            case ev.FlushPuts():
                self._jobs.flush(instruction)
            case ev.CancelEngine():
                self._jobs.cancel(instruction.assignment_id)
            case ev.PutBlocks():
                self._puts.add(instruction)
            case ev.CountTokens():
                TOKENS.labels(kind=instruction.kind).inc(instruction.count)
            case ev.Say() | ev.SayDone() | ev.SayPull() | ev.SayDelta():
                self._observe(instruction)
                self._outbox.add(instruction)
            case _:
                assert_never(instruction)

    def _answer(self, answer: ev.AnswerAssign) -> None:
        ASSIGNMENTS.labels(outcome="accepted" if answer.reply.accepted else "refused").inc()
        if answer.reply.error is not None:
            log.info("assignment_refused", assignment=answer.assignment_id, error=answer.reply.error.message)
        for waiter in self._waiters.pop(answer.assignment_id, ()):
            if not waiter.done():
                waiter.set_result(answer.reply)

    def _observe(self, word: ev.Instruction) -> None:
        match word:
            case ev.SayDone(done):
                ASSIGNMENTS.labels(outcome=done.outcome.value).inc()
                if done.error is not None:
                    log.info(
                        "work_ended", assignment=done.assignment_id, outcome=done.outcome, error=done.error.message
                    )
            case ev.Say() if isinstance(body := word.event.body, Generated):
                LOAD_SECONDS.observe(body.load_s)
                PREFILL_SECONDS.observe(body.prefill_s)
                DECODE_SECONDS.observe(body.decode_s)

    def _want_stats(self) -> None:
        """Room is what the router places by, so it is looked up at each change."""
        self._are_stats_wanted = True
        if not self._are_stats_asked:
            self._are_stats_asked = True
            self.spawn(self._ask_stats())

    async def _ask_stats(self) -> None:
        assert self._thread is not None
        while self._are_stats_wanted:
            self._are_stats_wanted = False
            stats = self._stats = await self._thread.stats()
            for use, count in (
                ("free", stats.blocks_free),
                ("cached", stats.blocks_cached),
                ("held", stats.blocks_held),
            ):
                BLOCKS.labels(use=use).set(count)
            self._tell(ev.StatsArrived(self.clock.monotonic(), stats))
        self._are_stats_asked = False

    # -- time

    async def _ticks(self) -> None:
        core, kv = self._core, self._kv
        assert core is not None and kv is not None
        while True:
            self._wake.clear()
            try:
                await asyncio.wait_for(self._wake.wait(), max(core.wake_at - self.clock.monotonic(), TICK_S_MIN))
            except TimeoutError:
                self._trouble = kv.trouble
                if core.works:
                    self._want_stats()
                self._tell(ev.Ticked(self.clock.monotonic()))


def _find_model(settings: WorkerSettings) -> ModelDirectory:
    """Blocking. Makes the model's directory if it is not there."""
    try:
        return find_model(settings.model, settings.home_path)
    except ModelNotFound:
        # Local: it needs torch, which a process with a simulated engine otherwise never pays for.
        from shared.engine.convert import ensure_model

        return ensure_model(settings.model, settings.home_path)
