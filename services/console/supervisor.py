"""The supervisor: carries out what the fleet core says, hears heartbeats, answers the control socket. Sleeps otherwise."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from proto.fleet import Heartbeat, ServiceState
from proto.subjects import HEARTBEAT
from services.console import control, processes
from services.console.errors import ConsoleError
from services.console.fleet import NATS, Finish, Fleet, Instruction, Kill, Phase, Start, Terminate, name_of
from services.console.render import why_refused
from services.console.scale import parse_scale
from services.console.settings import GATEWAY_PORT, ConsoleSettings, gateway_address, names_own_nats
from services.console.view import View
from shared.bus import Bus
from shared.limits import SILENT_AFTER_S
from shared.log import get_logger
from shared.nats_config import nats_config

ROTATE_EVERY_S: Final = 10.0
TERM_MARGIN_S: Final = 2.0
# What a shell says for a command it could not run.
EXIT_NOT_STARTED: Final = 127

log = get_logger()


def free_port(host: str, port: int, variable: str) -> int:
    """The port, or any free one for 0. Raises ConsoleError if it is taken."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as taken:
            raise ConsoleError(
                f"{host}:{port} cannot be used ({taken.strerror}); choose another with {variable}"
            ) from taken
        return int(probe.getsockname()[1])


class Supervisor:
    """One `roost up`."""

    def __init__(self, settings: ConsoleSettings, replicas: dict[str, int]) -> None:
        if settings.metrics_port:
            raise ConsoleError(
                "ROOST_METRICS_PORT: all services would take the same port; leave it unset with `roost up`"
            )
        self.settings, self.home = settings, settings.home_path
        self.gateway_host, port = gateway_address(os.environ)
        self.gateway_port = free_port(self.gateway_host, port, GATEWAY_PORT)
        for index in range(1, replicas["gateway"]):
            free_port(self.gateway_host, self.gateway_port + index, GATEWAY_PORT)
        self._own_nats = not names_own_nats()
        self._nats_port = (
            free_port("127.0.0.1", settings.console_nats_port, "ROOST_CONSOLE_NATS_PORT") if self._own_nats else 0
        )
        self.nats_url = f"nats://127.0.0.1:{self._nats_port}" if self._own_nats else settings.nats_url
        self.fleet = Fleet(
            replicas,
            with_nats=self._own_nats,
            term_s=settings.drain_s + TERM_MARGIN_S,
            stop_s=settings.console_stop_s,
        )
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._heard: dict[str, tuple[float, Heartbeat]] = {}
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._finish: Finish | None = None
        self._bug: BaseException | None = None
        self._view: View  # set by run()
        self._began_at = time.monotonic()
        self._has_reported = False

    @property
    def logs(self) -> Path:
        """Folder of the log files."""
        return self.home / "logs"

    @property
    def gateway_url(self) -> str:
        """Where the first gateway answers."""
        host = "127.0.0.1" if self.gateway_host in ("0.0.0.0", "::") else self.gateway_host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.gateway_port}"

    @property
    def shown_gateway(self) -> str | None:
        """The same, if any gateway is wanted."""
        return self.gateway_url if self.fleet.replicas["gateway"] else None

    # -- life

    async def run(self, view: View) -> int:
        """Until told to stop; the exit status. Raises ConsoleError naming the replica that refused to start."""
        self._view = view
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # With nohup, a closed terminal stops nothing.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                loop.add_signal_handler(number, self.stop)
        self._prepare()
        path = control.socket_path(self.home)
        server = await control.serve(path, self._answer)
        await self._act(self.fleet.begin(time.monotonic()))
        for work in (self._listen(), self._rotate()):
            self._spawn(work)
        try:
            while self._finish is None:
                if self._bug is not None:
                    # Children end with this process: better all of it than a fleet that nobody starts again.
                    raise self._bug
                self._changed.clear()
                self._report(time.monotonic())
                try:
                    await asyncio.wait_for(self._changed.wait(), self._sleep_s(time.monotonic()))
                except TimeoutError:
                    await self._act(self.fleet.wake(time.monotonic()))
        finally:
            server.close()
            path.unlink(missing_ok=True)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._finish.culprit is not None:
            why = why_refused(processes.tail(self.logs / f"{self._finish.culprit}.log", 10))
            raise ConsoleError(f"{self._finish.culprit} refused to start:\n  {why}")
        return self._finish.status

    def _sleep_s(self, now: float) -> float | None:
        """Until the next thing that is due by the clock; None for no such thing."""
        at = [] if self.fleet.wake_at is None else [self.fleet.wake_at]
        if not self._has_reported and not self.fleet.is_stopping:
            at.append(self._began_at + self.settings.console_ready_s)
        return max(0.0, min(at) - now) if at else None

    def _report(self, now: float) -> None:
        """Tell, once, that all are ready, or who still is not when the time is over."""
        if self._has_reported or self.fleet.is_stopping:
            return
        late, seconds = self.fleet.late(), now - self._began_at
        if late and seconds < self.settings.console_ready_s:
            self._view.wait_for(late)
        else:
            self._has_reported = True
            self._view.ready(seconds, late)

    def stop(self) -> None:
        """Drain and end; a second time: kill."""
        self._view.say("killing all" if self.fleet.is_stopping else "draining; once more to kill at once")
        self._spawn(self._act(self.fleet.stop(time.monotonic())))

    def _prepare(self) -> None:
        self.logs.mkdir(parents=True, exist_ok=True)
        if self._own_nats:
            processes.nats_binary()
            store = self.home / "jetstream"
            store.mkdir(exist_ok=True)
            text = nats_config(host="127.0.0.1", port=self._nats_port, store_dir=str(store))
            (self.home / "nats.conf").write_text(text)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (bug := task.exception()) is not None:
            self._bug = self._bug or bug
            self._changed.set()

    # -- doing what the core says

    async def _act(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Start(instance_id, service):
                    await self._start(instance_id, service)
                case Terminate(instance_id):
                    self._signal(instance_id, signal.SIGTERM)
                case Kill(instance_id):
                    self._signal(instance_id, signal.SIGKILL)
                case Finish():
                    self._finish = instruction
        self._changed.set()

    def _command(self, service: str) -> list[str]:
        if service == NATS:
            return [processes.nats_binary(), "-c", str(self.home / "nats.conf")]
        return [sys.executable, "-P", "-m", f"services.{service}"]

    def _environment(self, instance_id: str, service: str) -> dict[str, str]:
        own = {"ROOST_INSTANCE": instance_id, "ROOST_NATS_URL": self.nats_url, "ROOST_HOME": str(self.home)}
        if service == "gateway":
            own["ROOST_GATEWAY_PORT"] = str(self.gateway_port + int(instance_id.rpartition("-")[2]))
        return dict(os.environ) | own

    async def _start(self, instance_id: str, service: str) -> None:
        self._heard.pop(instance_id, None)
        log_file = self.logs / f"{instance_id}.log"
        processes.rotate(log_file, self.settings.console_log_bytes)
        try:
            process = await processes.spawn(self._command(service), log_file, self._environment(instance_id, service))
        except OSError as refused:
            # No memory, no file handles: a failure like another, tried again after the back-off.
            log.warning("not_started", child=instance_id, error=str(refused))
            await self._act(self.fleet.exited(instance_id, EXIT_NOT_STARTED, time.monotonic()))
            return
        self._processes[instance_id] = process
        log.info("started", child=instance_id, pid=process.pid)
        child = self.fleet.children.get(instance_id)
        if child is not None and child.phase is Phase.STOPPING:
            # Told to end while it was being made.
            self._signal(instance_id, signal.SIGKILL if child.kill_at == float("inf") else signal.SIGTERM)
        if service == NATS:
            self.fleet.ready(instance_id, time.monotonic())
        self._spawn(self._watch(instance_id, process))

    async def _watch(self, instance_id: str, process: asyncio.subprocess.Process) -> None:
        status = await process.wait()
        del self._processes[instance_id]
        log.info("exited", child=instance_id, status=status)
        stopping = self.fleet.is_stopping or self.fleet.children[instance_id].phase is Phase.STOPPING
        instructions = self.fleet.exited(instance_id, status, time.monotonic())
        child = self.fleet.children.get(instance_id)
        if not stopping and child is not None:
            again_s = max(0.0, child.restart_at - time.monotonic())
            self._view.say(
                f"{instance_id} ended with {status}; again in {again_s:.1f} s ({self.logs / instance_id}.log)"
            )
        await self._act(instructions)

    def _signal(self, instance_id: str, number: signal.Signals) -> None:
        process = self._processes.get(instance_id)
        if process is not None and process.returncode is None:
            process.send_signal(number)

    # -- hearing

    async def _listen(self) -> None:
        """Connect as soon as NATS is there, and hear heartbeats for ever."""
        while True:
            settings = self.settings.model_copy(update={"nats_url": self.nats_url})
            connecting = asyncio.ensure_future(Bus.connect(settings, "console"))
            try:
                await asyncio.wait([connecting])
            finally:
                connecting.cancel()
            if connecting.exception() is None:
                break
            log.warning("nats_not_ready", error=repr(connecting.exception()))
            await asyncio.sleep(1.0)
        bus = connecting.result()
        try:
            await bus.subscribe(HEARTBEAT, Heartbeat, self._hear)
            await asyncio.Event().wait()
        finally:
            await bus.close()

    def _hear(self, heartbeat: Heartbeat) -> None:
        process = self._processes.get(heartbeat.instance_id)
        if process is None or process.pid != heartbeat.pid:
            return
        now = time.monotonic()
        self._heard[heartbeat.instance_id] = (now, heartbeat)
        child = self.fleet.children[heartbeat.instance_id]
        if child.ready_at is None and child.phase is Phase.RUNNING and self._is_ready(heartbeat):
            self.fleet.ready(heartbeat.instance_id, now)
            self._view.say(f"{heartbeat.instance_id} ready after {now - child.started_at:.1f} s")
            self._changed.set()

    def _is_ready(self, heartbeat: Heartbeat) -> bool:
        """A gateway is ready once it has heard who can serve a turn, where that is wanted at all."""
        serves = self.fleet.replicas["loop"] and (self.fleet.replicas["decode"] or self.fleet.replicas["prefill"])
        lacks = heartbeat.service == "gateway" and heartbeat.degraded and bool(serves)
        return heartbeat.state is ServiceState.READY and not lacks

    async def _rotate(self) -> None:
        while True:
            await asyncio.sleep(ROTATE_EVERY_S)
            for file in self.logs.glob("*.log"):
                processes.rotate(file, self.settings.console_log_bytes)

    # -- answering

    async def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        now = time.monotonic()
        match request["command"]:
            case "ps":
                return self._shown(now)
            case "down":
                if not self.fleet.is_stopping:
                    self.stop()
                if request.get("now"):
                    self.stop()
            case "scale":
                wanted = parse_scale(request["words"])
                for index in range(self.fleet.replicas["gateway"], wanted.get("gateway", 0)):
                    if name_of("gateway", index) not in self.fleet.children:
                        free_port(self.gateway_host, self.gateway_port + index, GATEWAY_PORT)
                for service, count in wanted.items():
                    await self._act(self.fleet.scale(service, count, now))
            case "restart" | "kill" as verb:
                instance_id = str(request["instance"])
                if instance_id not in self.fleet.children:
                    raise ConsoleError(f"no replica {instance_id!r}; there are {', '.join(self.fleet.children)}")
                orders: list[Instruction] = [Kill(instance_id)]
                await self._act(orders if verb == "kill" else self.fleet.restart(instance_id, now))
            case unknown:
                raise ConsoleError(f"unknown command {unknown!r}")
        return {"ok": True}

    def _shown(self, now: float) -> dict[str, Any]:
        rows = [self._row(instance_id, now) for instance_id in sorted(self.fleet.children)]
        return {
            "home": str(self.home),
            "gateway_url": self.shown_gateway,
            "nats_url": self.nats_url,
            "model": self.settings.model,
            "supervisor": {"pid": os.getpid(), "memory_bytes": processes.memory_bytes(os.getpid())},
            "ready": self.fleet.is_ready,
            "late": self.fleet.late(),
            "uptime_s": round(now - self._began_at, 1),
            "stopping": self.fleet.is_stopping,
            "replicas": self.fleet.replicas,
            "services": rows,
        }

    def _row(self, instance_id: str, now: float) -> dict[str, Any]:
        child = self.fleet.children[instance_id]
        process = self._processes.get(instance_id)
        heard_at, heartbeat = self._heard.get(instance_id, (now, None))
        reasons = list(heartbeat.reasons) if heartbeat else []
        state = "ready" if child.service == NATS else heartbeat.state.value if heartbeat else "starting"
        if now - heard_at > SILENT_AFTER_S:
            state, reasons = "silent", [*reasons, f"no heartbeat for {now - heard_at:.0f} s"]
        if child.phase is Phase.WAITING:
            state, reasons = "waiting", [f"ended; starts again in {max(0.0, child.restart_at - now):.1f} s"]
        elif child.phase is Phase.STOPPING:
            state = "draining"
        return {
            "instance": instance_id,
            "service": child.service,
            "state": state,
            "degraded": bool(heartbeat and heartbeat.degraded),
            "reasons": reasons,
            "load": heartbeat.load if heartbeat else {},
            "pid": process.pid if process else None,
            "metrics_port": heartbeat.metrics_port if heartbeat else None,
            "uptime_s": round(now - child.started_at, 1) if process else 0.0,
            "restarts": child.restarts,
            "memory_bytes": processes.memory_bytes(process.pid) if process else 0,
        }
