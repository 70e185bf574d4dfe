"""Pure: what a turn gets from its HTTP request beside the body: who asks, which model, when, under which ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from proto.errors import ErrorCode, WireError
from shared.limits import TURN_DEADLINE_S, TURN_DEADLINE_S_MAX

DEADLINE_HEADER: Final = "X-Roost-Deadline-Ms"
DEADLINE_MS_MAX: Final = int(TURN_DEADLINE_S_MAX * 1000)


@dataclass(frozen=True, slots=True)
class TurnContext:
    """Filled in by the shell. `now` is seconds since 1970."""

    turn_id: str
    session_id: str
    request_id: str
    tenant: str
    model: str
    max_tokens_default: int
    fresh_seed: int
    now: float
    deadline_header: str | None = None

    def deadline_at(self, deadline_ms: int | None = None) -> float:
        """When the turn must be over. The body's own deadline counts before the header's. Raises BAD_REQUEST."""
        if deadline_ms is None and self.deadline_header is not None:
            deadline_ms = _milliseconds(self.deadline_header)
        return self.now + (TURN_DEADLINE_S if deadline_ms is None else deadline_ms / 1000)


def _milliseconds(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 10 and 1 <= int(text) <= DEADLINE_MS_MAX:
        return int(text)
    raise WireError(
        ErrorCode.BAD_REQUEST, f"a deadline is 1 to {DEADLINE_MS_MAX} milliseconds from now", field=DEADLINE_HEADER
    )
