"""The whole system as real processes: nats-server and `python -m services.<name>`, each startable, killable, startable again.

Everything of one system lies in one folder and listens on loopback. Processes are ended by the pids that were started here.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from shared.settings import ENV_PREFIX
from tests.nats_server import NatsServer, free_port

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("kvstore", "router", "loop", "prefill", "decode", "tools", "retrieval", "gateway")
READY_S_MAX = 90.0
STOP_S_MAX = 30.0


class Process:
    """One replica of one service: the same name, port and settings in each of its lives."""

    def __init__(self, service: str, number: int, system: System) -> None:
        self.service, self.name = service, f"{service}-{number}"
        self._system = system
        self.metrics_port = free_port()
        self.log_path = system.folder / "logs" / f"{self.name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.settings: dict[str, str] = {}

    def start(self) -> None:
        """Begin a life."""
        assert self._process is None or self._process.poll() is not None, f"{self.name} runs"
        environment = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
        environment |= {
            "ROOST_HOME": str(self._system.home),
            "ROOST_NATS_URL": self._system.nats.url,
            "ROOST_INSTANCE": self.name,
            "ROOST_METRICS_PORT": str(self.metrics_port),
            **self._system.settings,
            **self.settings,
        }
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", f"services.{self.service}"],
                env=environment, cwd=self._system.folder, stdout=log, stderr=log,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        """Of the running life."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether a life goes on."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """kill -9."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, and wait for the drain."""
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(how)
        try:
            self._process.wait(timeout=STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise
        finally:
            self._process = None

    def is_ready(self) -> bool:
        """What /readyz says."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/readyz", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            return False

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels; 0 when it has none."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.split("{")[0].split(" ")[0] == name and all(part in line for part in wanted)
        )

    def tail(self, lines: int = 40) -> str:
        """The end of its log."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])


class System:
    """Use as a context manager; `start` waits until everything is ready."""

    def __init__(self, folder: Path, models: Path, settings: Mapping[str, str] | None = None) -> None:
        self.folder, self.home = folder, folder / "home"
        self.home.mkdir(parents=True)
        (folder / "logs").mkdir()
        (self.home / "models").symlink_to(models)
        self.ram_path = Path(f"/dev/shm/roost-test-{os.getpid()}-{free_port()}")
        self.gateway_port = free_port()
        self.settings = {
            "ROOST_GATEWAY_PORT": str(self.gateway_port),
            "ROOST_KVSTORE_RAM_PATH": str(self.ram_path),
            "ROOST_KVSTORE_RAM_BYTES": str(256 << 20),
            "ROOST_KVSTORE_NVME_BYTES": str(1 << 30),
            "ROOST_WORKER_THREADS": "2",
            **(settings or {}),
        }
        self.nats = NatsServer(folder / "nats")
        self.processes: dict[str, Process] = {}

    @property
    def url(self) -> str:
        """Of the gateway."""
        return f"http://127.0.0.1:{self.gateway_port}"

    def add(self, service: str, number: int = 0, **settings: str) -> Process:
        """A further replica; not started."""
        process = Process(service, number, self)
        process.settings = settings
        self.processes[process.name] = process
        return process

    def start(self, services: Iterable[str] = SERVICES) -> None:
        """NATS and one replica of each service, all ready."""
        self.nats.start()
        for service in services:
            self.add(service).start()
        self.wait_ready()

    def wait_ready(self, *names: str) -> None:
        """Until these processes (all, if none is named) are ready, and the gateway says that the system is."""
        waiting = set(names or self.processes)
        deadline = time.monotonic() + READY_S_MAX
        while waiting or not self._gateway_is_ready():
            waiting = {name for name in waiting if not self.processes[name].is_ready()}
            for name in waiting:
                assert self.processes[name].is_running, f"{name} ended:\n{self.processes[name].tail()}"
            assert time.monotonic() < deadline, self.describe(waiting)
            time.sleep(0.05)

    def _gateway_is_ready(self) -> bool:
        if "gateway-0" not in self.processes:
            return True
        try:
            with urllib.request.urlopen(f"{self.url}/readyz", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            return False

    def describe(self, names: Iterable[str]) -> str:
        """Ends of the logs, for a failure's message."""
        parts = [f"--- {name}\n{self.processes[name].tail()}" for name in names]
        return "\n".join(("not ready in time", *parts))

    def __getitem__(self, name: str) -> Process:
        return self.processes[name]

    def restart(self, name: str, *, how: str = "stop") -> None:
        """End a life (`stop` or `kill`) and begin the next; returns when it is ready."""
        getattr(self.processes[name], how)()
        self.processes[name].start()
        self.wait_ready(name)

    def stop(self) -> None:
        """Everything, NATS last."""
        for process in self.processes.values():
            if process.is_running:
                process.kill()
        self.nats.stop()

    def __enter__(self) -> System:
        return self

    def __exit__(self, kind: type[BaseException] | None, bug: BaseException | None, at: TracebackType | None) -> None:
        self.stop()
        shutil.rmtree(self.ram_path, ignore_errors=True)


def call(method: str, url: str, body: Any = None, *, raw: bytes | None = None) -> tuple[int, Any]:
    """One HTTP request with a JSON answer: status and body."""
    data = raw if raw is not None else None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, method=method, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=110) as answer:
            return answer.status, json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as refused:
        return refused.code, json.loads(refused.read())
