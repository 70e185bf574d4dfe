"""Pure: what the console says instead of a traceback."""

from __future__ import annotations

from shared.errors import RoostError


class ConsoleError(RoostError):
    """Something the user can put right; the message says how."""


class NotRunning(ConsoleError):
    """No supervisor answers for this home."""

    def __init__(self, home: str) -> None:
        super().__init__(f"nothing runs in {home}; start it with: roost up")
