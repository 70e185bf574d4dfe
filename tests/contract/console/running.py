"""A real `roost` for tests: commands as subprocesses in a home of its own, with the services that need no model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from services.console import control
from services.console.errors import NotRunning
from shared.settings import ENV_PREFIX
from tests.nats_server import free_port

WITHIN_S = 60.0
LEFT_OUT = ("loop", "prefill", "decode", "retrieval")
COMMAND = [sys.executable, "-P", "-m", "services.console"]


def until(happened: Callable[[], object], what: str = "it did not happen") -> None:
    """Poll with a deadline."""
    give_up_at = time.monotonic() + WITHIN_S
    while not happened():
        assert time.monotonic() < give_up_at, what
        time.sleep(0.05)


def lives(pid: int) -> bool:
    """Whether the process runs; one that ended and was not collected by its parent does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


class Home:
    """One ROOST_HOME and its commands."""

    def __init__(self, folder: Path, settings: Mapping[str, str] | None = None) -> None:
        self.path = folder / "home"
        model = folder / "model"
        model.mkdir(parents=True)
        # None of the services started here reads it; `roost up` only looks whether it is there.
        for file in ("config.json", "tokenizer.json"):
            (model / file).write_text("{}")
        clean = {name: value for name, value in os.environ.items() if not name.startswith((ENV_PREFIX, "NATS_"))}
        self.environment = clean | {
            "ROOST_HOME": str(self.path),
            "ROOST_MODEL": str(model),
            "ROOST_GATEWAY_PORT": str(free_port()),
            "ROOST_KVSTORE_RAM_BYTES": "0",
            "ROOST_KVSTORE_NVME_BYTES": str(64 << 20),
            **(settings or {}),
        }
        self.foreground: subprocess.Popen[str] | None = None

    def roost(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            [*COMMAND, *words], env=self.environment, capture_output=True, text=True, timeout=WITHIN_S, check=False
        )

    def up(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Start in the background."""
        return self.roost("up", "--detach", *self.without(), *words)

    def up_here(self, *words: str) -> subprocess.Popen[str]:
        """Start as a terminal does, and wait until all are ready."""
        self.foreground = subprocess.Popen(
            [*COMMAND, "up", *self.without(), *words],
            env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        until(lambda: self.ps_or_none() is not None and self.ps()["ready"], "not ready")
        return self.foreground

    @staticmethod
    def without() -> list[str]:
        """Options that leave out what needs a model."""
        return [f"--without={service}" for service in LEFT_OUT]

    def ps_or_none(self) -> dict[str, Any] | None:
        """What runs, as `roost ps --json` says it; None if nothing answers."""
        try:
            return control.ask(self.path, "ps")
        except NotRunning:
            return None

    def ps(self) -> dict[str, Any]:
        """What runs."""
        shown = self.ps_or_none()
        assert shown is not None, "nothing runs"
        return shown

    def row(self, instance_id: str) -> dict[str, Any]:
        """One replica in `ps`."""
        return next(row for row in self.ps()["services"] if row["instance"] == instance_id)

    def is_ready(self, instance_id: str) -> bool:
        """One replica has a process and says that it is ready."""
        row = self.row(instance_id)
        return bool(row["pid"]) and row["state"] == "ready"

    def names(self) -> set[str]:
        """All replicas."""
        return {row["instance"] for row in self.ps()["services"]}

    def pids(self) -> list[int]:
        """Of the supervisor and of all children."""
        shown = self.ps()
        return [shown["supervisor"]["pid"], *(row["pid"] for row in shown["services"] if row["pid"])]

    def close(self) -> None:
        """End whatever runs, by the pids it says."""
        if self.ps_or_none() is not None:
            self.roost("down", "--now")
        if self.foreground is not None:
            if self.foreground.poll() is None:
                self.foreground.send_signal(signal.SIGKILL)
            self.foreground.communicate(timeout=WITHIN_S)
