"""Pure: how a sandboxed call ended, from what its warden reported, as an outcome and a sentence for the model."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from proto.tools import ToolOutcome


class End(StrEnum):
    """What ended the processes of a call. The warden says the first six, the service the last two."""

    EXIT = "exit"
    WALL = "wall"
    MEMORY = "memory"
    PROCESSES = "processes"
    SCRATCH = "scratch"
    START = "start"  # the rung did not start
    OUTPUT = "output"
    LOST = "lost"  # the warden went away without a report


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome, the line that tells the model why (empty when all went well), and the limit that was hit, for the metric."""

    outcome: ToolOutcome
    why: str = ""
    limit: str = ""


_KILLED: Final = {
    End.MEMORY: "it used more memory than it may",
    End.PROCESSES: "it started more processes than it may",
    End.SCRATCH: "it wrote more files than it may",
}
# Shells and bubblewrap report a signal as 128 and its number.
_SIGNAL_BASE: Final = 128
_LIMIT_SIGNALS: Final = {
    signal.SIGXCPU: (ToolOutcome.KILLED, "cpu", "it used more CPU time than it may"),
    signal.SIGXFSZ: (ToolOutcome.KILLED, "scratch", "it wrote a larger file than it may"),
    signal.SIGKILL: (ToolOutcome.KILLED, "kernel", "the kernel killed it for memory or CPU time"),
}


def verdict(end: End, status: int, limit_s: float) -> Verdict:
    """The verdict on a call; `status` is an exit status, signals as 128 + number; `limit_s` its wall clock."""
    match end:
        case End.EXIT:
            return _exited(status)
        case End.WALL:
            return Verdict(ToolOutcome.TIMEOUT, f"Killed: it ran longer than {limit_s:g} s.", "wall")
        case End.OUTPUT:
            return Verdict(ToolOutcome.OUTPUT_LIMIT, "Killed: it printed more than it may.", "output")
        case End.START:
            return Verdict(ToolOutcome.REFUSED, "The sandbox did not start; nothing was run.")
        case End.LOST:
            return Verdict(ToolOutcome.UNKNOWN, "The sandbox was lost; whether the call had an effect is not known.")
        case _:
            return Verdict(ToolOutcome.KILLED, f"Killed: {_KILLED[end]}.", end.value)


def _exited(status: int) -> Verdict:
    if status == 0:
        return Verdict(ToolOutcome.OK)
    number = status - _SIGNAL_BASE
    if number in _LIMIT_SIGNALS:
        outcome, limit, why = _LIMIT_SIGNALS[signal.Signals(number)]
        return Verdict(outcome, f"Killed: {why}.", limit)
    if number in set(signal.Signals):
        return Verdict(ToolOutcome.ERROR, f"Ended by signal {signal.Signals(number).name}.")
    return Verdict(ToolOutcome.ERROR, f"Exit status {status}.")


def content(stdout: str, stderr: str, why: str) -> str:
    """What the model reads."""
    parts = [stdout]
    if stderr:
        parts.append(f"[stderr]\n{stderr}")
    if why:
        parts.append(f"[{why}]")
    return "\n".join(part.rstrip("\n") for part in parts if part) or "[no output]"
