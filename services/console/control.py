"""The control socket: one JSON line asks, one JSON line answers. Only this user can open it."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import socket
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from services.console.errors import ConsoleError, NotRunning

LINE_BYTES_MAX: Final = 1 << 20
# The kernel's limit is 108 bytes with the final zero.
SOCKET_PATH_BYTES_MAX: Final = 100
ASK_WITHIN_S: Final = 10.0

Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


def socket_path(home: Path) -> Path:
    """In the home, or under the temporary folder where that path would be too long for a socket."""
    path = home / "console.sock"
    if len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX:
        return path
    digest = hashlib.blake2b(os.fsencode(home), digest_size=8).hexdigest()
    return Path(tempfile.gettempdir()) / f"roost-{os.getuid()}" / f"{digest}.sock"


def lock(home: Path) -> int:
    """Be the one supervisor of this home, until the process ends. Raises ConsoleError."""
    home.mkdir(parents=True, exist_ok=True)
    handle = os.open(home / "console.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ConsoleError(f"Roost already runs in {home}; see `roost ps`, or stop it with `roost down`") from None
    return handle


def is_locked(home: Path) -> bool:
    """Whether a supervisor of this home lives."""
    if not (home / "console.lock").exists():
        return False
    with (home / "console.lock").open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _prepare(path: Path) -> None:
    """The socket's folder is ours alone, and nothing of a dead supervisor is in the way."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.parent.stat().st_uid != os.getuid():
        raise ConsoleError(f"{path.parent} belongs to someone else")
    path.unlink(missing_ok=True)


async def serve(path: Path, handler: Handler) -> asyncio.Server:
    """Answer on the socket. The caller holds the lock, so a socket that is there is a dead one's."""
    _prepare(path)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line = await asyncio.wait_for(reader.readline(), ASK_WITHIN_S)
            request = json.loads(line)
            if not isinstance(request, dict):
                raise ConsoleError("a command is a JSON object")
            answer = await handler(request)
        except ConsoleError as wrong:
            answer = {"error": str(wrong)}
        except (ValueError, KeyError, TimeoutError) as invalid:
            answer = {"error": f"not a command: {invalid!r}"}
        writer.write(json.dumps(answer).encode() + b"\n")
        writer.close()

    old = os.umask(0o177)
    try:
        return await asyncio.start_unix_server(talk, str(path), limit=LINE_BYTES_MAX)
    finally:
        os.umask(old)


def ask(home: Path, command: str, **arguments: Any) -> dict[str, Any]:
    """Ask the supervisor. Raises NotRunning, or ConsoleError with what it said."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ASK_WITHIN_S)
        try:
            connection.connect(str(socket_path(home)))
            connection.sendall(json.dumps({"command": command, **arguments}).encode() + b"\n")
            with connection.makefile("rb") as stream:
                line = stream.readline(LINE_BYTES_MAX)
        except (FileNotFoundError, ConnectionRefusedError, ConnectionResetError):
            raise NotRunning(str(home)) from None
        except TimeoutError:
            raise ConsoleError(f"the supervisor of {home} does not answer") from None
    if not line:
        raise NotRunning(str(home))
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        raise ConsoleError(str(answer["error"]))
    return answer
