"""One process a call, between the service and the sandbox: starts it, watches its bounds, and leaves nothing of it behind.

Runs as `python -I warden.py REPORT_FD`. Standard input: one line of JSON (the job), then nothing; its end means "stop now",
so that a killed service takes its calls along. Standard output and error go to the tool. The report is one line of JSON.

Being the subreaper, it inherits every process whose parent ends, however often it forked and whatever session it made, so
the tree below it is everything the call started. Only the standard library, and sandlock on that rung.
"""

from __future__ import annotations

import base64
import ctypes
import importlib
import json
import os
import resource
import select
import signal
import stat
import subprocess
import sys
import time
from typing import Any

PR_SET_CHILD_SUBREAPER, PR_SET_DUMPABLE = 36, 4
WATCH_S = 0.02
SCRATCH_EVERY = 8  # looks at the tree for one look at the folder
SWEEP_S_MAX = 5.0
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
LINE_BYTES_MAX = 1 << 20


def children_of(pid: int) -> list[int]:
    """Processes whose parent is `pid`, over all its threads."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as listing:
                found += [int(child) for child in listing.read().split()]
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return found
    return found


def tree_below(pid: int, limit: int) -> list[int]:
    """All descendants, parents first; stops after `limit`."""
    found = children_of(pid)
    for parent in found:
        if len(found) > limit:
            break
        found += children_of(parent)
    return found


def resident_bytes(pid: int) -> int:
    """Memory that only this process can be blamed for; file pages do not count."""
    try:
        with open(f"/proc/{pid}/status") as status:
            lines = [line.split() for line in status if line.startswith(("RssAnon:", "RssShmem:", "VmSwap:"))]
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    return sum(int(line[1]) for line in lines) * 1024


def reap() -> None:
    """Collect orphans that ended. The main child is left to whoever waits for it."""
    for pid in children_of(os.getpid()):
        if pid != MAIN:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue


MAIN = 0


def kill_tree() -> None:
    """End all descendants. Stopped first, so that none forks while the others are killed; bounded."""
    until = time.monotonic() + SWEEP_S_MAX
    while time.monotonic() < until:
        reap()
        pids = [pid for pid in tree_below(os.getpid(), 100_000) if not is_zombie(pid)]
        if not pids:
            return
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                try:
                    os.kill(pid, number)
                except (ProcessLookupError, PermissionError):
                    continue
        time.sleep(0.002)


def is_zombie(pid: int) -> bool:
    """Ended, but not waited for."""
    try:
        with open(f"/proc/{pid}/stat") as line:
            return line.read().rpartition(")")[2].split()[0] in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return True


def scratch_is_full(folder: str, bytes_max: int, files_max: int) -> bool:
    """Whether the files below `folder` are more than they may be. What cannot be counted counts as too much."""
    folders, size, count = [folder], 0, 0
    while folders:
        path = folders.pop()
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    found = entry.stat(follow_symlinks=False)
                    size += found.st_blocks * 512
                    count += 1
                    if stat.S_ISDIR(found.st_mode):
                        folders.append(entry.path)
                    if size > bytes_max or count > files_max:
                        return True
        except FileNotFoundError:
            continue
        except PermissionError:
            if opened(path):
                folders.append(path)
            continue
        except OSError:
            return True
    return False


def opened(path: str) -> bool:
    """Give a folder that the tool closed its modes back."""
    try:
        if os.stat(path).st_mode & 0o700 == 0o700:
            return False
        os.chmod(path, 0o700)
    except OSError:
        return False
    return True


def drop(job: dict[str, Any]) -> None:
    """Limits that everything below inherits, low priority, and the call's own user id where the service is root."""
    for name, value in job["rlimits"].items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        allowed = [bound if hard == resource.RLIM_INFINITY else min(bound, hard) for bound in value]
        resource.setrlimit(number, (allowed[0], allowed[1]))
    os.nice(10)
    with open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")
    if job["uid"]:
        os.setgroups([])
        os.setresgid(job["uid"], job["uid"], job["uid"])
        os.setresuid(job["uid"], job["uid"], job["uid"])
        # Cleared by the change of user; /proc/self would belong to root without it.
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)


class Plain:
    """A child made by fork and exec: bubblewrap, or the tool itself on the rung `none`."""

    def __init__(self, job: dict[str, Any]) -> None:
        line = list(job["line"])
        kept: tuple[int, ...] = ()
        if job["seccomp"]:
            reading, writing = os.pipe()
            os.write(writing, base64.b64decode(job["seccomp"]))
            os.close(writing)
            line += ["--seccomp", str(reading)]
            kept = (reading,)
        self._child = subprocess.Popen(
            [*line, *job["command"]], stdin=subprocess.DEVNULL, env=job["env"], cwd=job["cwd"], pass_fds=kept,
            start_new_session=True,
        )  # fmt: skip
        for descriptor in kept:
            os.close(descriptor)
        self.pid = self._child.pid

    def status(self) -> int:
        """Exit status; a signal is 128 and its number."""
        code = self._child.wait()
        return code if code >= 0 else 128 - code


class Sandlocked:
    """A child made by sandlock."""

    def __init__(self, job: dict[str, Any], sandlock: Any) -> None:
        self._child = sandlock.Sandbox(**job["policy"]).popen(job["command"], stdin=sandlock.sandbox.StdioMode.NULL)
        self.pid = self._child.pid

    def status(self) -> int:
        """Exit status; a signal is 128 and its number."""
        result = self._child.wait(timeout=SWEEP_S_MAX)
        number = int(result.signal) if result.signal is not None else -1
        return 128 + number if number > 0 else int(result.exit_code) & 0xFF


def watch(job: dict[str, Any], pid: int) -> str:
    """Wait for the end of the call or the first bound it breaks; says which."""
    until = time.monotonic() + job["wall_s"]
    poll = select.poll()
    ended = os.pidfd_open(pid)
    poll.register(ended, select.POLLIN)
    poll.register(0, select.POLLIN | select.POLLHUP)
    looks = 0
    while True:
        for descriptor, _ in poll.poll(WATCH_S * 1000 * (1 if looks < 50 else 3)):
            return "exit" if descriptor == ended else "cancelled"
        looks += 1
        reap()
        if time.monotonic() >= until:
            return "wall"
        pids = tree_below(os.getpid(), job["processes_max"] + job["processes_own"])
        if len(pids) > job["processes_max"] + job["processes_own"]:
            return "processes"
        if sum(map(resident_bytes, pids)) > job["memory_bytes"]:
            return "memory"
        if job["scratch"] and looks % SCRATCH_EVERY == 0 and full(job):
            return "scratch"


def full(job: dict[str, Any]) -> bool:
    """See scratch_is_full."""
    return scratch_is_full(job["scratch"], job["scratch_bytes"], job["scratch_files_max"])


def remove(folder: str) -> None:
    """Remove the work folder, whatever modes and depth the tool gave it. The service looks again."""
    for line in (["/bin/rm", "-rf", folder], ["/bin/chmod", "-R", "u+rwx", folder], ["/bin/rm", "-rf", folder]):
        if os.path.lexists(folder):
            subprocess.run(
                line, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
            )


def main() -> int:
    """One call."""
    global MAIN
    report = int(sys.argv[1])
    os.set_inheritable(report, False)
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(0, LINE_BYTES_MAX)
        if not chunk:
            return 1
        line += chunk
    job = json.loads(line)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Imported while this process may still read its own environment.
    sandlock = importlib.import_module("sandlock") if job["policy"] else None
    drop(job)
    try:
        child = Sandlocked(job, sandlock) if job["policy"] else Plain(job)
    except (OSError, RuntimeError) as failed:
        os.write(report, json.dumps({"end": "start", "status": 0, "why": str(failed)[:500]}).encode())
        return 1
    MAIN = child.pid
    end = watch(job, child.pid)
    kill_tree()
    status = child.status()
    MAIN = 0
    kill_tree()
    if job["scratch"]:
        if end == "exit" and full(job):
            end = "scratch"
        remove(job["scratch"])
    os.write(report, json.dumps({"end": end, "status": status, "why": ""}).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
