"""`roost logs`: the last lines of the replicas' log files, and what is added to them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from services.console import processes
from services.console.errors import ConsoleError

FOLLOW_EVERY_S: Final = 0.3


def files_of(folder: Path, name: str | None) -> list[Path]:
    """Logs of a replica (decode-0), of all replicas of a service (decode), or all. Raises ConsoleError if there are none."""
    known = {file.stem: file for file in sorted(folder.glob("*.log"))}
    wanted = [stem for stem in known if name in (None, stem, stem.rpartition("-")[0])]
    if not wanted:
        raise ConsoleError(f"no log of {name or 'anything'} in {folder}; there are: {', '.join(known) or 'none'}")
    return [known[stem] for stem in wanted]


def show(files: list[Path], lines: int, write: Callable[[str], None]) -> dict[Path, int]:
    """The last lines of each; answers how far each file was read."""
    ends = {file: file.stat().st_size for file in files}
    for file in files:
        for line in processes.tail(file, lines):
            write(_labelled(file, line, files))
    return ends


def follow(ends: Mapping[Path, int], write: Callable[[str], None]) -> None:
    """Whole lines as they are added, for ever."""
    files, ends = list(ends), dict(ends)
    while True:
        time.sleep(FOLLOW_EVERY_S)
        for file in files:
            with file.open("rb") as opened:
                size = file.stat().st_size
                # A file that shrank was moved aside and begun again.
                opened.seek(ends[file] if ends[file] <= size else 0)
                fresh = opened.read()
                whole = fresh[: fresh.rfind(b"\n") + 1]
                ends[file] = opened.tell() - len(fresh) + len(whole)
            for line in whole.decode(errors="replace").splitlines():
                write(_labelled(file, line, files))


def _labelled(file: Path, line: str, files: list[Path]) -> str:
    return line if len(files) == 1 else f"{file.stem:<12} {line}"
