"""Pure: what a call runs in. Builds bubblewrap's arguments, sandlock's policy and a seccomp filter; starts nothing.

Inside there is the system's /usr, an interpreter, an empty folder /work (or the call's work folder), and nothing else: no
network, no /etc, no home, no other process, no environment. What it does not cover: faults of the kernel itself, and time
stolen by CPU use (calls run at nice 10).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final


class Rung(StrEnum):
    """The ladder, best first."""

    BWRAP = "bwrap"
    SANDLOCK = "sandlock"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one call; bytes, seconds, counts."""

    wall_s: float
    cpu_s: int
    memory_bytes: int
    processes_max: int
    scratch_bytes: int
    output_bytes: int
    files_open_max: int = 256


@dataclass(frozen=True, slots=True)
class Cage:
    """A way to run code that a probe tried. `is_dropped`: calls get user ids of their own (the service is root)."""

    rung: Rung
    python: str
    readable: tuple[str, ...]
    hidden: tuple[str, ...]
    is_dropped: bool


SYSTEM_PATHS: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/localtime")
DEVICES: Final = ("/dev/zero", "/dev/urandom", "/dev/random")
PATH: Final = "/usr/local/bin:/usr/bin:/bin"
INSIDE_WORK: Final = "/work"
# The last step before the tool's own program: limits that must be set inside the namespace. dash says -p, bash says -u.
PRELUDE: Final = 'ulimit -v {kib}; {nproc}exec "$@"'
NPROC: Final = "ulimit -p {count} 2>/dev/null || ulimit -u {count}; "
SCRATCH_FILES_MAX: Final = 10_000

# Memory that no process limit counts, and doors to kernel parts that a tool has no use for.
DENIED_CALLS: Final = {
    "x86_64": {"memfd_create": 319, "memfd_secret": 447, "shmget": 29, "mq_open": 240, "keyctl": 250, "add_key": 248,
               "request_key": 249, "ptrace": 101, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323,
               "io_uring_setup": 425, "unshare": 272, "setns": 308, "mount": 165, "open_tree": 428, "fsopen": 430},
    "aarch64": {"memfd_create": 279, "memfd_secret": 447, "shmget": 194, "mq_open": 180, "keyctl": 219, "add_key": 217,
                "request_key": 218, "ptrace": 117, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282,
                "io_uring_setup": 425, "unshare": 97, "setns": 268, "mount": 40, "open_tree": 428, "fsopen": 430},
}  # fmt: skip
AUDIT_ARCH: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT: Final = 0x40000000
_RET_ALLOW, _RET_KILL, _RET_EPERM = 0x7FFF0000, 0x80000000, 0x00050001
_LD_WORD, _JEQ, _JGE, _RET = 0x20, 0x15, 0x35, 0x06


def seccomp_filter(machine: str) -> bytes:
    """Classic BPF for `bwrap --seccomp`: EPERM for DENIED_CALLS, death for a foreign ABI. Empty for an unknown machine."""
    if machine not in DENIED_CALLS:
        return b""
    numbers = sorted(DENIED_CALLS[machine].values())
    # struct seccomp_data: nr at 0, arch at 4.
    code = [(_LD_WORD, 0, 0, 4), (_JEQ, 1, 0, AUDIT_ARCH[machine]), (_RET, 0, 0, _RET_KILL), (_LD_WORD, 0, 0, 0)]
    code.append((_JGE, len(numbers) + 1, 0, X32_BIT))
    code += [(_JEQ, len(numbers) - place, 0, number) for place, number in enumerate(numbers)]
    code += [(_RET, 0, 0, _RET_ALLOW), (_RET, 0, 0, _RET_EPERM)]
    return b"".join(struct.pack("=HBBI", *line) for line in code)


def environment(work: str) -> dict[str, str]:
    """All that the tool's environment holds."""
    return {"PATH": PATH, "HOME": work, "TMPDIR": work, "LANG": "C.UTF-8"}


def program(cage: Cage, tool: str, text: str) -> list[str]:
    """Command line of a tool's program."""
    return [cage.python, "-I", "-u", "-c", text] if tool == "python" else ["/bin/sh", "-c", text]


def command(cage: Cage, limits: Limits, inner: Sequence[str]) -> list[str]:
    """`inner` behind the prelude."""
    # Without a user id or user namespace of its own, the kernel would count everything else of this user, too.
    counts = cage.rung is Rung.BWRAP or cage.is_dropped
    # Twice the bound: the warden's count ends the call with a reason, this one only holds until then.
    nproc = NPROC.format(count=2 * limits.processes_max) if counts else ""
    prelude = PRELUDE.format(kib=limits.memory_bytes // 1024, nproc=nproc)
    return ["/bin/sh", "-c", prelude, "sh", *inner]


def bwrap_arguments(bwrap: str, cage: Cage, limits: Limits, links: dict[str, str]) -> list[str]:
    """bubblewrap's own arguments. `links`: system paths that are symbolic links on this machine, and where they lead."""
    line = [bwrap, "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"]
    line += ["--cap-drop", "ALL", "--clearenv", "--hostname", "tool"]
    for path in cage.readable:
        line += ["--symlink", links[path], path] if path in links else ["--ro-bind", path, path]
    for path in _covered(cage):
        line += ["--size", "4096", "--tmpfs", path, "--remount-ro", path]
    size = str(limits.scratch_bytes)
    line += ["--dev", "/dev", "--size", size, "--tmpfs", "/dev/shm", "--remount-ro", "/dev", "--proc", "/proc"]
    line += ["--size", size, "--tmpfs", INSIDE_WORK, "--symlink", INSIDE_WORK, "/tmp", "--remount-ro", "/"]
    for name, value in environment(INSIDE_WORK).items():
        line += ["--setenv", name, value]
    return [*line, "--chdir", INSIDE_WORK]


def _covered(cage: Cage) -> list[str]:
    """Hidden folders that lie inside readable ones."""
    return [path for path in cage.hidden if any(Path(path).is_relative_to(shown) for shown in cage.readable)]


def sandlock_policy(cage: Cage, limits: Limits, work: str) -> dict[str, Any]:
    """Fields of sandlock.Sandbox."""
    return {
        "fs_readable": [*cage.readable, *DEVICES],
        "fs_writable": [work, "/dev/null"],
        "fs_denied": list(cage.hidden),
        "extra_deny_syscalls": ["memfd_create"],
        "max_processes": 2 * limits.processes_max,
        "no_coredump": True,
        "clean_env": True,
        "env": environment(work),
        "cwd": work,
    }
