"""What `roost up` says in the terminal while the supervisor works."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

from rich.console import Console
from rich.status import Status


class View(Protocol):
    """Where the supervisor tells what happens."""

    def say(self, text: str) -> None:
        """One event, one line."""

    def wait_for(self, late: Sequence[str]) -> None:
        """These replicas are not ready yet."""

    def ready(self, seconds: float, late: Sequence[str]) -> None:
        """Said once: all are ready, or the time for it is over and these are late."""


class TerminalView:
    """Lines, and below them a moving one that names who is waited for; that one is shown only to a person."""

    def __init__(self, out: Console, how_to: str, logs: str) -> None:
        """`how_to` is printed once all are ready."""
        self._out, self._how_to, self._logs = out, how_to, logs
        self._status: Status | None = Status("starting", console=out) if out.is_terminal else None
        if self._status is not None:
            self._status.start()

    def say(self, text: str) -> None:
        """One event, one line."""
        self._print(f"  {text}")

    def wait_for(self, late: Sequence[str]) -> None:
        """These replicas are not ready yet."""
        if self._status is not None:
            self._status.update(f"waiting for {', '.join(late)}")

    def ready(self, seconds: float, late: Sequence[str]) -> None:
        """Said once."""
        self.close()
        if late:
            self._print(f"not ready after {seconds:.0f} s: {', '.join(late)}. They go on starting; see {self._logs}")
            return
        self._print(f"\nRoost is ready after {seconds:.1f} s.", style="bold green")
        self._print(self._how_to)

    def close(self) -> None:
        """Take the moving line away."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _print(self, text: str, **options: Any) -> None:
        # The terminal may be gone (closed window, `| head`); that must not stop the services.
        with suppress(OSError):
            self._out.print(text, markup=False, soft_wrap=True, **options)
