"""The sandbox with real processes, on each rung that this machine has: nothing gets out, nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from proto.tools import ToolOutcome
from services.tools import ladder
from services.tools.cage import Limits, program
from services.tools.sandbox import Ran, Sandbox
from services.tools.settings import ToolsSettings
from services.tools.verdict import verdict

WALL_S = 2.0
# What starting and sweeping may take beside, on a busy machine.
GRACE_S = 6.0


@pytest.fixture(params=["bwrap", "sandlock"])
async def sandbox(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Sandbox]:
    home = tmp_path / "home"
    home.mkdir()
    (home / "secret").write_text("secret")
    settings = ToolsSettings(tools_sandbox=request.param, home=home)
    found = await ladder.find(settings, f"test-{os.getpid()}")
    if found.sandbox is None:
        pytest.skip(found.reasons[0])
    yield found.sandbox
    scratch = ladder.scratch_of(settings, f"test-{os.getpid()}")
    assert not list(scratch.iterdir())
    scratch.rmdir()


LIMITS = replace(ladder.limits_of(ToolsSettings(), WALL_S), cpu_s=10)


async def run(sandbox: Sandbox, tool: str, text: str, limits: Limits = LIMITS) -> Ran:
    started = time.monotonic()
    ran = await sandbox.run(program(sandbox.cage, tool, text), limits, slot=0, content_bytes=4096)
    assert time.monotonic() - started < limits.wall_s + GRACE_S
    return ran


def outcome(ran: Ran) -> ToolOutcome:
    return verdict(ran.end, ran.status, WALL_S).outcome


def running(mark: str) -> list[str]:
    """Command lines with `mark` of all processes of this machine."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                line = (folder / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if mark in line:
                found.append(line)
    return found


async def test_a_good_call(sandbox: Sandbox) -> None:
    ran = await run(sandbox, "python", "import sys; print(6 * 7); print('e', file=sys.stderr)")
    assert (outcome(ran), ran.stdout.text(), ran.stderr.text()) == (ToolOutcome.OK, "42\n", "e\n")
    ran = await run(sandbox, "shell", "echo a | tr a b; exit 3")
    assert (outcome(ran), ran.status, ran.stdout.text()) == (ToolOutcome.ERROR, 3, "b\n")


@pytest.mark.parametrize(
    ("tool", "text", "expected"),
    [
        ("python", "while True: pass", {ToolOutcome.TIMEOUT}),
        ("shell", 'trap "" TERM INT HUP; while true; do sleep 1; done', {ToolOutcome.TIMEOUT}),
        ("shell", "kill -STOP $$", {ToolOutcome.TIMEOUT}),
        ("python", "import os\nwhile True:\n try: os.fork()\n except OSError: pass", {ToolOutcome.KILLED}),
        # The process limit may starve it before it is counted; then the sleep runs into the wall.
        ("shell", "b() { b | b & }; b; sleep 60", {ToolOutcome.KILLED, ToolOutcome.TIMEOUT}),
        ("python", "bytearray(10 << 30)", {ToolOutcome.ERROR}),
        (
            "python",
            "import os\nfor _ in range(3): os.fork()\nheld = []\nwhile True: held.append(b'x' * 1_000_000)",
            {ToolOutcome.KILLED},
        ),
        ("python", "import sys\nfor _ in range(1024): sys.stdout.write('x' * (1 << 20))", {ToolOutcome.OUTPUT_LIMIT}),
        ("shell", "yes >&2", {ToolOutcome.OUTPUT_LIMIT}),
        ("shell", "head -c 500000000 /dev/zero > big", {ToolOutcome.ERROR, ToolOutcome.KILLED}),
        (
            "python",
            "import os\nfd = os.memfd_create('x')\nos.write(fd, b'x')",
            {ToolOutcome.ERROR},
        ),
        ("python", "import os\nfor _ in range(3000):\n os.mkdir('d')\n os.chdir('d')\nos.chmod('.', 0)", None),
    ],
    ids=[
        "loop", "ignores-sigterm", "stops-itself", "fork-bomb", "shell-fork-bomb", "10-gb", "many-eat-memory", "1-gb-output",
        "floods-stderr", "huge-file", "memfd", "deep-folders",
    ],
)  # fmt: skip
async def test_abuse_ends_typed_and_in_time(
    sandbox: Sandbox, tool: str, text: str, expected: set[ToolOutcome] | None
) -> None:
    ran = await run(sandbox, tool, text)
    assert expected is None or outcome(ran) in expected, (ran.end, ran.status, ran.stderr.text())
    assert len(ran.stdout.text()) < 10_000


async def test_cpu_time_of_a_process_is_bounded(sandbox: Sandbox) -> None:
    ran = await run(sandbox, "python", "while True: pass", replace(LIMITS, cpu_s=1, wall_s=20.0))
    assert outcome(ran) is ToolOutcome.KILLED


async def test_many_files_end_the_call_or_are_refused(sandbox: Sandbox) -> None:
    """The quota is over all files, not only each."""
    text = "i=0; while head -c 20000000 /dev/zero > f$i; do i=$((i+1)); done; echo full; exit 9"
    ran = await run(sandbox, "shell", text, replace(LIMITS, wall_s=8.0))
    assert outcome(ran) in {ToolOutcome.KILLED, ToolOutcome.ERROR}


async def test_a_daemon_does_not_outlive_its_call(sandbox: Sandbox) -> None:
    """Forked twice, own sessions, detached from all streams: still gone when the result is there (F-SBX-01)."""
    mark = f"8642{os.getpid()}"
    ran = await run(
        sandbox, "shell", f"setsid sh -c 'setsid sleep {mark} & sleep {mark}' >/dev/null 2>&1 </dev/null & echo up"
    )
    assert outcome(ran) is ToolOutcome.OK and ran.stdout.text() == "up\n"
    assert not running(mark)


async def test_cancelling_ends_everything(sandbox: Sandbox) -> None:
    mark = f"9753{os.getpid()}"
    task = asyncio.create_task(run(sandbox, "shell", f"sleep {mark} & sleep {mark}", replace(LIMITS, wall_s=60.0)))
    until = time.monotonic() + 5
    while not running(mark):
        assert time.monotonic() < until
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not running(mark)


async def test_nothing_of_roost_is_visible(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOST_NATS_PASSWORD", "hunter2")
    os.chmod(tmp_path, 0o755)
    os.chmod(tmp_path / "home", 0o755)
    repository = Path(__file__).resolve().parents[3]
    paths = [str(tmp_path / "home" / "secret"), str(repository / "README.md"), f"/proc/{os.getpid()}/environ",
             "/etc/passwd", "/root/.bashrc"]  # fmt: skip
    text = f"""
import os
for path in {paths!r}:
    try: print("READ", path, open(path, "rb").read(10))
    except OSError: pass
print(sorted(os.environ), os.listdir("."))
"""
    ran = await run(sandbox, "python", text)
    assert outcome(ran) is ToolOutcome.OK, ran.stderr.text()
    shown = ran.stdout.text()
    assert "READ" not in shown and "ROOST" not in shown and "hunter2" not in shown and shown.endswith("[]\n")


async def test_no_socket_leads_out(sandbox: Sandbox, tmp_path: Path) -> None:
    """TCP, UDP, unix sockets by path and abstract ones: nothing that listens outside hears of it."""
    path, name = tmp_path / "socket", f"roost-test-{os.urandom(8).hex()}"
    os.chmod(tmp_path, 0o755)
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX) as by_path,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        udp.bind(("127.0.0.1", 0))
        by_path.bind(str(path))
        os.chmod(path, 0o777)
        abstract.bind(f"\0{name}")
        for server in (by_path, abstract):
            server.listen()
        text = f"""
import socket
def attempt(name, family, kind, address):
    try:
        with socket.socket(family, kind) as s:
            s.settimeout(1)
            s.connect(address)
            s.send(b"x")
            print("SENT", name)
    except OSError as error: print(name, error)
attempt("tcp", socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", {tcp.getsockname()[1]}))
attempt("udp", socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", {udp.getsockname()[1]}))
attempt("path", socket.AF_UNIX, socket.SOCK_STREAM, {str(path)!r})
attempt("abstract", socket.AF_UNIX, socket.SOCK_STREAM, "\\0{name}")
"""
        ran = await run(sandbox, "python", text)
        assert outcome(ran) is ToolOutcome.OK, ran.stderr.text()
        for server in (tcp, udp, by_path, abstract):
            server.setblocking(False)
        with pytest.raises(BlockingIOError):
            udp.recv(1)
        for server in (tcp, by_path, abstract):
            with pytest.raises(BlockingIOError):
                server.accept()
    assert "SENT tcp" not in ran.stdout.text() and "SENT path" not in ran.stdout.text()


async def test_other_processes_are_out_of_reach(sandbox: Sandbox) -> None:
    with subprocess.Popen(["sleep", "60"]) as victim:
        text = f"import os\ntry: os.kill({victim.pid}, 9); print('KILLED')\nexcept OSError as error: print(error)"
        ran = await run(sandbox, "python", text)
        assert victim.poll() is None and "KILLED" not in ran.stdout.text()
        victim.terminate()


async def test_system_is_read_only(sandbox: Sandbox) -> None:
    text = "for d in / /usr /dev /dev/shm /etc /tmp /var/tmp; do (echo x > $d/roost-escape) 2>/dev/null; done; true"
    await run(sandbox, "shell", text)
    for folder in ("/", "/usr", "/dev", "/dev/shm", "/etc", "/tmp", "/var/tmp"):
        assert not (Path(folder) / "roost-escape").exists()


async def test_calls_do_not_see_each_other(sandbox: Sandbox) -> None:
    await run(sandbox, "shell", "echo mine > left")
    ran = await run(sandbox, "shell", "ls -A; ls -A /tmp 2>/dev/null; true")
    assert ran.stdout.text() == ""


async def test_without_a_rung_the_ladder_refuses_with_a_reason(tmp_path: Path) -> None:
    """An interpreter that cannot run makes every probe fail."""
    settings = ToolsSettings(home=tmp_path, tools_python="/usr/bin/false")
    found = await ladder.find(settings, f"none-{os.getpid()}")
    assert found.sandbox is None and found.rung == "" and "no sandbox works here" in found.reasons[0]
    ladder.scratch_of(settings, f"none-{os.getpid()}").rmdir()


async def test_no_sandbox_at_all_must_be_typed_and_is_said(tmp_path: Path) -> None:
    settings = ToolsSettings(home=tmp_path, tools_sandbox="none-i-accept-the-risk")
    found = await ladder.find(settings, f"risk-{os.getpid()}")
    assert found.sandbox is not None and found.rung == "none" and "WITHOUT a sandbox" in found.reasons[0]
    ran = await run(found.sandbox, "shell", "setsid sleep 86421 & sleep 60")
    assert outcome(ran) is ToolOutcome.TIMEOUT and not running("86421")
    ladder.scratch_of(settings, f"risk-{os.getpid()}").rmdir()
