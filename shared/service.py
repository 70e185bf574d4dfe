"""The life of a service: starting -> ready -> draining -> stopped. Signals, heartbeats, health, and the one broad except.

A service is a subclass with `start` (subscribe; the service is ready when it returns), `drain` (finish what was taken),
and `health` (what /readyz and heartbeats say). `run` does the rest:

    SIGTERM or SIGINT   stop taking work, `drain` within `drain_s`, leave the bus, exit 0
    an error of ours    log it, exit 1; the supervisor (or compose) starts a new life with a new epoch
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from importlib.metadata import version
from typing import Any, ClassVar, Generic, TypeVar

from proto.errors import WireError
from proto.fleet import FleetPing, Heartbeat, KvStoreCard, ModelCard, ServiceState
from proto.subjects import FLEET_PING, HEARTBEAT
from shared import log as logs
from shared.bus import Bus
from shared.clock import Clock, RealClock
from shared.errors import RoostError, SettingsError, StartRefused
from shared.limits import HEARTBEAT_S
from shared.metrics import BUILD_INFO, Health, MetricsServer
from shared.settings import RoostSettings, read_settings

SettingsType = TypeVar("SettingsType", bound=RoostSettings)

EXIT_OK, EXIT_BUG, EXIT_SETTINGS = 0, 1, 2

log = logs.get_logger()


class Service(Generic[SettingsType]):
    """Base of the eight shells. A subclass sets `name` and `settings_type`."""

    name: ClassVar[str]
    settings_type: type[SettingsType]

    def __init__(self, settings: SettingsType, clock: Clock | None = None) -> None:
        self.settings = settings
        self.clock: Clock = clock or RealClock()
        self.instance_id = settings.instance or f"{self.name}-{socket.gethostname()[:24]}-{secrets.token_hex(3)}"
        # One number a life, larger than that of any life before it on this machine.
        self.epoch = time.time_ns() // 1_000
        self.state = ServiceState.STARTING
        self.bus: Bus = None  # type: ignore[assignment]  # set before start() is called
        self._started_at = self.clock.now()
        self._stop = asyncio.Event()
        self._fatal: BaseException | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._metrics: MetricsServer | None = None

    # -- what a subclass says

    async def start(self) -> None:
        """Subscribe and get ready. The service is READY when this returns."""
        raise NotImplementedError

    async def drain(self) -> None:
        """Take nothing new and finish what was taken; cancelled after `drain_s`."""

    async def stop(self) -> None:
        """Let go of threads, files and sockets. Called in any case."""

    def health(self) -> Health:
        """How well it is. Called from another thread too, so only look."""
        return Health(ready=self.state is ServiceState.READY)

    def load(self) -> dict[str, float]:
        """Numbers for `roost ps`."""
        return {}

    def model_card(self) -> ModelCard | None:
        """What this worker serves, if it is one."""
        return None

    def kv_card(self) -> KvStoreCard | None:
        """What this shard holds, if it is one."""
        return None

    def residency_seq(self) -> int | None:
        """Number of the last residency change said in this life, if it holds blocks."""
        return None

    # -- what it gets

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run beside until the service stops. If it raises, the service ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (bug := task.exception()) is not None:
            self.fail(bug)

    def fail(self, bug: BaseException) -> None:
        """Something that must not happen happened: end this life."""
        if self._fatal is None:
            self._fatal = bug
        self._stop.set()

    def request_stop(self) -> None:
        """End this life in an orderly way."""
        self._stop.set()

    async def beat(self) -> None:
        """Say a heartbeat now (on a change that others should know at once)."""
        health = self.health()
        heartbeat = Heartbeat(
            service=self.name,
            instance_id=self.instance_id,
            epoch=self.epoch,
            state=self.state,
            degraded=health.degraded or not health.ready,
            reasons=health.reasons,
            host=socket.gethostname(),
            pid=os.getpid(),
            metrics_port=self._metrics.port if self._metrics else 0,
            started_at=self._started_at,
            sent_at=self.clock.now(),
            load=self.load(),
            model_card=self.model_card() if self.state is ServiceState.READY else None,
            kv_card=self.kv_card() if self.state is ServiceState.READY else None,
            residency_seq=self.residency_seq() if self.state is ServiceState.READY else None,
        )
        with suppress(WireError):  # NATS is away; the next beat says it
            await self.bus.publish(HEARTBEAT, heartbeat, service=self.name)

    async def hear_fleet(self, handler: Callable[[Heartbeat], None], *services: str) -> None:
        """Hear the heartbeats of these services, and of no others: in a large fleet most are of no use to most."""
        for service in services:
            await self.bus.subscribe(HEARTBEAT, Heartbeat, handler, service=service)

    # -- life

    async def run(self) -> int:
        """One life. Returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        log.info("starting", epoch=self.epoch, settings=self.settings.shown())
        BUILD_INFO.labels(service=self.name, version=version("roost")).set(1)
        self._metrics = MetricsServer(self.settings.metrics_host, self.settings.metrics_port, self._safe_health)
        try:
            connecting = asyncio.ensure_future(Bus.connect(self.settings, self.instance_id, self.fail))
            if not await self._unless_stopped(connecting):
                return EXIT_OK
            self.bus = connecting.result()
            starting = self.spawn(self._start())
            await self._unless_stopped(starting)
            await self._stop.wait()
            if self._fatal is not None:
                raise self._fatal
            await self._drain()
            return EXIT_OK
        except StartRefused as refused:
            log.error("refused_to_start", error=str(refused))
            return EXIT_SETTINGS
        except Exception:
            log.exception("fatal")
            return EXIT_BUG
        finally:
            await self._close()

    async def _unless_stopped(self, task: asyncio.Task[Any] | asyncio.Future[Any]) -> bool:
        """Wait for the task; False if a stop came first (the task is then cancelled)."""
        stop = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if task.done():
            return True
        task.cancel()
        return False

    async def _start(self) -> None:
        await self.bus.subscribe(FLEET_PING, FleetPing, self._pinged)
        self.spawn(self._beats())
        await self.start()
        self.state = ServiceState.READY
        log.info("ready", after_s=round(self.clock.now() - self._started_at, 3), metrics_port=self._port())
        await self.beat()

    def _port(self) -> int:
        return self._metrics.port if self._metrics else 0

    def _pinged(self, _: FleetPing) -> None:
        self.spawn(self.beat())

    async def _beats(self) -> None:
        while True:
            await self.beat()
            await self.clock.sleep(HEARTBEAT_S)

    def _safe_health(self) -> Health:
        health = self.health()
        if self.bus is None or not self.bus.is_connected:
            return Health(
                ready=False, alive=health.alive, degraded=True, reasons=(*health.reasons, "NATS is not connected")
            )
        return health

    async def _drain(self) -> None:
        self.state = ServiceState.DRAINING
        log.info("draining", within_s=self.settings.drain_s)
        await self.beat()
        try:
            await asyncio.wait_for(self.drain(), self.settings.drain_s)
        except TimeoutError:
            log.warning("drain_cut", after_s=self.settings.drain_s)

    async def _close(self) -> None:
        self.state = ServiceState.STOPPED
        if self.bus is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.beat(), 1.0)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.stop()
        if self.bus is not None:
            await self.bus.close()
        if self._metrics is not None:
            self._metrics.close()
        log.info("stopped")


def main(service: type[Service[SettingsType]]) -> int:
    """Entry of every `python -m services.<name>`: settings, logs, one life."""
    try:
        settings = read_settings(service.settings_type)
    except SettingsError as wrong:
        sys.stderr.write(f"{service.name}: {wrong}\n")
        return EXIT_SETTINGS
    instance = settings.instance or service.name
    logs.configure(service=service.name, instance=instance, form=settings.log_format, level=settings.log_level)
    try:
        return asyncio.run(_live(service, settings))
    except RoostError as refused:
        log.error("refused_to_start", error=str(refused))
        return EXIT_SETTINGS


async def _live(service: type[Service[SettingsType]], settings: SettingsType) -> int:
    return await service(settings).run()
