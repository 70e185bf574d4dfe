"""Finds the rung: tries each way to run code with a real command, and takes the first that holds."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.tools.cage import SYSTEM_PATHS, Cage, Limits, Rung, program
from services.tools.sandbox import Sandbox
from services.tools.settings import ToolsSettings
from services.tools.verdict import End
from shared.log import get_logger

PROBE_WALL_S: Final = 10.0
UNCONFINED: Final = "none-i-accept-the-risk"
SYSTEM_PYTHON: Final = "/usr/bin/python3"

# What must hold inside. It prints one JSON object; each value must be the expected one.
PROBE: Final = """
import json, os, socket
def fails(act):
    try: act()
    except OSError: return True
    return False
def dial(): socket.create_connection(("127.0.0.1", {port}), timeout=1)
def call(): socket.socket(socket.AF_UNIX).connect("\\0{name}")
def seen(): return bool(os.listdir({hidden!r}))
def write(): open("/usr/roost-probe", "w")
open("mine", "w").write("x")
try: hidden = not seen()
except OSError: hidden = True
print(json.dumps(dict(hidden=hidden, tcp=fails(dial), unix=fails(call), write=fails(write), files=os.listdir(".") == ["mine"],
                      env=not any(name.startswith("ROOST") for name in os.environ))))
"""

log = get_logger()


@dataclass(frozen=True, slots=True)
class Found:
    """What the ladder led to. `sandbox` None: code tools refuse, and `reasons` says why."""

    sandbox: Sandbox | None
    reasons: tuple[str, ...] = ()

    @property
    def rung(self) -> str:
        """For ToolResult.sandbox and ToolList.sandbox; empty when there is none."""
        return self.sandbox.cage.rung.value if self.sandbox else ""


def limits_of(settings: ToolsSettings, wall_s: float) -> Limits:
    """Bounds of a call."""
    return Limits(
        wall_s=wall_s,
        cpu_s=settings.tools_cpu_s,
        memory_bytes=settings.tools_memory_bytes,
        processes_max=settings.tools_processes_max,
        scratch_bytes=settings.tools_scratch_bytes,
        output_bytes=settings.tools_output_bytes,
    )


def scratch_of(settings: ToolsSettings, instance_id: str) -> Path:
    """The folder of this replica's work folders: emptied, and closed to other users' eyes."""
    base = Path(settings.tools_scratch_path or tempfile.gettempdir()) / f"roost-tools-{os.getuid()}"
    base.mkdir(mode=0o711, parents=True, exist_ok=True)
    if base.is_symlink() or base.stat().st_uid != os.getuid():
        raise PermissionError(f"{base} belongs to someone else")
    folder = base / instance_id
    # A life that was killed may have left folders behind.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o711, exist_ok=True)
    return folder


def uids_of(settings: ToolsSettings) -> tuple[int, ...]:
    """A user id a slot, other ones in each numbered replica; empty when this process may not change its user."""
    if os.getuid() != 0:
        return ()
    number = re.search(r"(\d{1,3})$", settings.instance or "")
    first = settings.tools_uid_first + settings.tools_calls_max * (int(number[1]) if number else 0)
    return tuple(range(first, first + settings.tools_calls_max))


def candidates(settings: ToolsSettings) -> list[Cage]:
    """Ways to run code, best first."""
    choice = settings.tools_sandbox
    rungs = {"auto": (Rung.BWRAP, Rung.SANDLOCK), UNCONFINED: (Rung.NONE,)}.get(choice) or (Rung(choice),)
    own = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    pythons = [settings.tools_python] if settings.tools_python else list(dict.fromkeys((own, SYSTEM_PYTHON)))
    hidden = tuple(dict.fromkeys((str(settings.install_path), str(settings.home_path))))
    found = []
    for rung in rungs:
        for is_dropped in (True, False) if os.getuid() == 0 else (False,):
            for python in pythons:
                readable = _readable(python)
                # Showing the interpreter must not show what is to be hidden.
                if not any(Path(shown).is_relative_to(path) for shown in readable for path in hidden):
                    found.append(Cage(rung, python, readable, hidden, is_dropped))
    return found


def _readable(python: str) -> tuple[str, ...]:
    """System paths, and the interpreter's own prefix when it lies elsewhere (<prefix>/bin/python)."""
    system = tuple(path for path in SYSTEM_PATHS if os.path.exists(path))
    prefix = str(Path(os.path.realpath(python)).parent.parent)
    return system if prefix == "/" or prefix.startswith("/usr") else (*system, prefix)


async def find(settings: ToolsSettings, instance_id: str) -> Found:
    """Climb down the ladder until a probe holds."""
    scratch, uids = scratch_of(settings, instance_id), uids_of(settings)
    failures: list[str] = []
    for cage in candidates(settings):
        if cage.rung is Rung.BWRAP and shutil.which("bwrap") is None:
            failures.append("bwrap: not installed")
            continue
        sandbox = Sandbox(cage, scratch, uids)
        problem = await probe(sandbox, settings)
        if not problem:
            log.info("sandbox_found", rung=cage.rung, python=cage.python, own_user=cage.is_dropped)
            reasons = ("code tools run WITHOUT a sandbox (ROOST_TOOLS_SANDBOX)",) if cage.rung is Rung.NONE else ()
            return Found(sandbox, reasons)
        failures.append(f"{cage.rung}: {problem}")
        log.warning("sandbox_probe_failed", rung=cage.rung, python=cage.python, problem=problem)
    why = "; ".join(dict.fromkeys(failures)) or "no interpreter outside of Roost's own folders"
    return Found(None, (f"code tools refuse to run, no sandbox works here ({why})"[:900],))


async def probe(sandbox: Sandbox, settings: ToolsSettings) -> str:
    """What does not hold in this cage, empty if all does. Really dials, writes and looks from inside."""
    name = f"roost-probe-{os.getpid()}-{os.urandom(4).hex()}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind("\0" + name)
        unix.listen()
        code = PROBE.format(port=tcp.getsockname()[1], name=name, hidden=str(settings.install_path))
        limits = limits_of(settings, PROBE_WALL_S)
        ran = await sandbox.run(program(sandbox.cage, "python", code), limits, slot=0, content_bytes=16_384)
    if ran.end is not End.EXIT or ran.status != 0:
        return f"{ran.end} {ran.status} {ran.why} {ran.stderr.text().strip()[-200:]}".strip()
    if sandbox.cage.rung is Rung.NONE:
        return ""
    held: dict[str, bool] = json.loads(ran.stdout.text())
    broken = [what for what, holds in held.items() if not holds]
    return f"does not confine: {', '.join(broken)}" if broken else ""
