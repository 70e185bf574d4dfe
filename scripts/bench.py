"""What every benchmark shares: the results, where they were measured, and the JSON object on the last line."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

console = Console(stderr=True)


@dataclass(slots=True)
class Results:
    """What goes into the JSON object. A check that could not be measured is None, and a note says why."""

    checks: dict[str, float | None] = field(default_factory=dict)
    rows: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def leave_out(self, check: str, why: str) -> None:
        """Not measured."""
        self.checks[check] = None
        self.notes[check] = why


def percentile(values: Iterable[float], share: float) -> float:
    """The value that so large a share of all is not above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def show(results: Results, rows: Sequence[str] = ()) -> None:
    """A table of the checks, and of these rows where they were measured."""
    table = Table("check", "value")
    for name, value in results.checks.items():
        table.add_row(name, results.notes.get(name, "-") if value is None else str(value))
    for name in rows:
        if name in results.rows:
            table.add_row(name, str(results.rows[name]))
    console.print(table)


def print_json(results: Results, script: str) -> None:
    """One line."""
    whole = {
        "checks": results.checks,
        "hardware": f"{cpu_name()}, {psutil.cpu_count()} cores, {psutil.virtual_memory().total >> 30} GiB",
        "commit": commit(),
        "command": " ".join([script, *sys.argv[1:]]),
        "notes": results.notes,
        "rows": results.rows,
    }
    print(json.dumps(whole))


def commit() -> str:
    """Of the tree that was measured."""
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()


def cpu_name() -> str:
    """As the kernel says it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
