"""`roost up`: prepares the model, then supervises here, or starts a supervisor in the background and waits for it."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from services.console import control, processes
from services.console.errors import ConsoleError, NotRunning
from services.console.render import how_to
from services.console.scale import parse_scale, replicas_of
from services.console.settings import ConsoleSettings
from services.console.supervisor import Supervisor
from services.console.view import TerminalView
from shared import log
from shared.errors import ModelNotFound
from shared.model_dir import find_tokenizer

POLL_EVERY_S: Final = 0.2


def run_here(settings: ConsoleSettings, replicas: dict[str, int], out: Console) -> int:
    """Supervise until the end; the exit status. Raises ConsoleError."""
    home = settings.home_path
    handle = control.lock(home)
    try:
        prepare_model(settings)
        logs = home / "logs"
        logs.mkdir(exist_ok=True)
        # The supervisor's own log; the terminal is for the user.
        with (logs / "console.log").open("a", buffering=1) as file:
            with redirect_stderr(file):
                log.configure(service="console", instance="console", form=settings.log_format, level=settings.log_level)
            supervisor = Supervisor(settings, replicas)
            out.print(f"starting {sum(replicas.values())} services in {home}", markup=False, soft_wrap=True)
            words = how_to(supervisor.shown_gateway, str(home), os.environ, roost=own_name(), detached=False)
            view = TerminalView(out, words, str(logs))
            try:
                return asyncio.run(supervisor.run(view))
            finally:
                view.close()
    finally:
        os.close(handle)


def prepare_model(settings: ConsoleSettings) -> None:
    """Have the model of the settings as a directory. Raises ConsoleError."""
    try:
        find_tokenizer(settings.model, settings.home_path)
    except ModelNotFound:
        # In a process of its own: this one stays without torch.
        command = [sys.executable, "-P", "-m", "shared.engine.convert"]
        # Its progress bar is for a terminal.
        quiet = {} if sys.stderr.isatty() else {"TQDM_DISABLE": "1"}
        if subprocess.run(command, check=False, env={**os.environ, **quiet}).returncode != 0:
            raise ConsoleError(f"the model {settings.model!r} could not be prepared (see above)") from None


def run_detached(settings: ConsoleSettings, scale: Iterable[str], without: Iterable[str], out: Console) -> None:
    """Start a supervisor that outlives this process, and come back when all are ready. Raises ConsoleError."""
    home = settings.home_path
    replicas_of(parse_scale(scale), without)
    home.mkdir(parents=True, exist_ok=True)
    os.close(control.lock(home))  # refused here, if another one has it
    prepare_model(settings)
    (home / "logs").mkdir(exist_ok=True)
    words = [f"--scale={word}" for word in scale] + [f"--without={word}" for word in without]
    said = home / "logs" / "up.log"
    said.unlink(missing_ok=True)
    # Appended to, like every log: it may be emptied while it is written (processes.rotate).
    with said.open("a") as file:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "services.console", "up", *words],
            stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip
    _wait_ready(settings, child, said, out)


def _wait_ready(settings: ConsoleSettings, child: subprocess.Popen[bytes], said: Path, out: Console) -> None:
    deadline = time.monotonic() + settings.console_ready_s
    late: list[str] = []
    with out.status("starting") as status:
        while time.monotonic() < deadline:
            if child.poll() is not None:
                last = "\n".join(processes.tail(said, 10))
                raise ConsoleError(f"the start ended ({child.returncode}):\n{last}")
            shown = _ask_ps(settings.home_path)
            if shown is not None and shown["ready"]:
                out.print(f"Roost is ready after {shown['uptime_s']:.1f} s, in the background.", style="bold green")
                home = str(settings.home_path)
                words = how_to(shown["gateway_url"], home, os.environ, roost=own_name(), detached=True)
                out.print(words, markup=False, soft_wrap=True)
                return
            if shown is not None:
                late = shown["late"]
                status.update(f"waiting for {', '.join(late)}")
            time.sleep(POLL_EVERY_S)
    who = ", ".join(late) or "the supervisor"
    seconds = f"{settings.console_ready_s:g} s"
    raise ConsoleError(f"{who} not ready after {seconds}; starting goes on, see `roost ps` and `roost logs`")


def own_name() -> str:
    """What to type for this command: `roost` where that is this one, else the shortest path to it."""
    beside = Path(sys.executable).parent / "roost"
    if not beside.exists() or shutil.which("roost") == str(beside):
        return "roost"
    relative = os.path.relpath(beside)
    return relative if not relative.startswith("..") else str(beside)


def _ask_ps(home: Path) -> dict[str, Any] | None:
    try:
        return control.ask(home, "ps")
    except NotRunning:
        return None
