"""Runs one command in a cage through a warden process; reads its output while it runs, bounded, and says how it ended."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import platform
import secrets
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from services.tools.cage import (
    SCRATCH_FILES_MAX,
    SYSTEM_PATHS,
    Cage,
    Limits,
    Rung,
    bwrap_arguments,
    command,
    environment,
    sandlock_policy,
    seccomp_filter,
)
from services.tools.output import HeadTail
from services.tools.verdict import End

WARDEN: Final = Path(__file__).with_name("warden.py")
READ_BYTES: Final = 64 * 1024
# A warden that has not ended this long after its wall clock is itself at fault.
WARDEN_GRACE_S: Final = 8.0
# bubblewrap's monitor and its first process inside.
BWRAP_PROCESSES: Final = 2


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command ended. `status`: exit status, signals as 128 + number."""

    end: End
    status: int
    why: str
    stdout: HeadTail
    stderr: HeadTail


class Sandbox:
    """A cage and where its work folders are. `uids`: one user id a slot, empty when the service is not root."""

    def __init__(self, cage: Cage, scratch: Path, uids: tuple[int, ...]) -> None:
        self.cage, self._scratch, self._uids = cage, scratch, uids

    async def run(self, inner: list[str], limits: Limits, *, slot: int, content_bytes: int) -> Ran:
        """Run it to its end or to a bound. Cancelling ends it, too; in any case nothing of it is left."""
        uid = self._uids[slot] if self.cage.is_dropped else 0
        # bubblewrap brings its own file system in memory; the other rungs need a folder here.
        work = None if self.cage.rung is Rung.BWRAP else self._new_folder(uid)
        job = self._job(inner, limits, uid, work)
        reading, writing = os.pipe()
        try:
            warden = await asyncio.create_subprocess_exec(
                sys.executable, "-I", str(WARDEN), str(writing), pass_fds=(writing,), start_new_session=True, cwd="/",
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
                env=environment("/"),
            )  # fmt: skip
            os.close(writing)
            writing = -1
            try:
                return await self._attended(warden, job, limits, content_bytes, reading)
            finally:
                await asyncio.shield(asyncio.ensure_future(_ended(warden)))
        finally:
            os.close(reading)
            if writing >= 0:
                os.close(writing)
            if work is not None and work.exists():
                await _removed(work)

    def _new_folder(self, uid: int) -> Path:
        work = self._scratch / secrets.token_hex(8)
        work.mkdir(mode=0o700)
        if uid:
            os.chown(work, uid, uid)
        return work

    def _job(self, inner: list[str], limits: Limits, uid: int, work: Path | None) -> dict[str, Any]:
        cage, folder = self.cage, str(work) if work else "/"
        is_bwrap = cage.rung is Rung.BWRAP
        line = bwrap_arguments(shutil.which("bwrap") or "bwrap", cage, limits, links()) if is_bwrap else []
        return {
            "line": line,
            "command": command(cage, limits, inner),
            "seccomp": base64.b64encode(seccomp_filter(platform.machine())).decode() if is_bwrap else "",
            "policy": sandlock_policy(cage, limits, folder) if cage.rung is Rung.SANDLOCK else None,
            "env": environment(folder),
            "cwd": folder,
            "uid": uid,
            "wall_s": limits.wall_s,
            "memory_bytes": limits.memory_bytes,
            "processes_max": limits.processes_max,
            "processes_own": BWRAP_PROCESSES if is_bwrap else 0,
            "scratch": str(work) if work else "",
            "scratch_bytes": limits.scratch_bytes,
            "scratch_files_max": SCRATCH_FILES_MAX,
            "rlimits": {
                "RLIMIT_CORE": (0, 0),
                "RLIMIT_MSGQUEUE": (0, 0),
                "RLIMIT_FSIZE": (limits.scratch_bytes, limits.scratch_bytes),
                "RLIMIT_NOFILE": (limits.files_open_max, limits.files_open_max),
                # The soft one says SIGXCPU, which names the reason; the hard one cannot be ignored.
                "RLIMIT_CPU": (limits.cpu_s, limits.cpu_s + 1),
            },
        }

    async def _attended(
        self, warden: asyncio.subprocess.Process, job: dict[str, Any], limits: Limits, content_bytes: int, report: int
    ) -> Ran:
        assert warden.stdin is not None and warden.stdout is not None and warden.stderr is not None
        out, err = HeadTail(content_bytes), HeadTail(content_bytes // 4)
        is_flood = False

        async def read(stream: asyncio.StreamReader, into: HeadTail) -> None:
            nonlocal is_flood
            while chunk := await stream.read(READ_BYTES):
                into.add(chunk)
                if not is_flood and out.seen_bytes + err.seen_bytes > limits.output_bytes:
                    is_flood = True
                    warden.stdin.close()  # type: ignore[union-attr]  # "stop now"

        with suppress(ConnectionResetError, BrokenPipeError):  # it ended already; the missing report says so
            warden.stdin.write(json.dumps(job).encode() + b"\n")
            await warden.stdin.drain()
        try:
            async with asyncio.timeout(limits.wall_s + WARDEN_GRACE_S):
                await asyncio.gather(read(warden.stdout, out), read(warden.stderr, err))
                await warden.wait()
        except TimeoutError:
            return Ran(End.LOST, 0, "the warden does not end", out, err)
        line = os.read(report, READ_BYTES)
        if not line:
            return Ran(End.LOST, 0, err.text()[-500:], out, err)
        said = json.loads(line)
        end = End.OUTPUT if is_flood else End(said["end"])
        return Ran(end, int(said["status"]), str(said["why"]), out, err)


async def _ended(warden: asyncio.subprocess.Process) -> None:
    """Tell the warden to end, and see to it that it does."""
    if warden.returncode is not None:
        return
    assert warden.stdin is not None and warden.stdout is not None and warden.stderr is not None
    warden.stdin.close()
    streams = (warden.stdout, warden.stderr)
    try:
        async with asyncio.timeout(WARDEN_GRACE_S):
            await asyncio.gather(*(_discard(stream) for stream in streams), warden.wait())
    except TimeoutError:
        with suppress(ProcessLookupError):
            warden.kill()
        await warden.wait()


async def _discard(stream: asyncio.StreamReader) -> None:
    while await stream.read(READ_BYTES):
        continue


async def _removed(work: Path) -> None:
    remover = await asyncio.create_subprocess_exec("/bin/rm", "-rf", str(work), stderr=asyncio.subprocess.DEVNULL)
    await remover.wait()


def links() -> dict[str, str]:
    """System paths that are links here (/bin -> usr/bin on a merged /usr)."""
    return {path: os.readlink(path) for path in SYSTEM_PATHS if os.path.islink(path)}
