"""Pure: what can happen to a turn, and what its machine asks the shell to do."""

from __future__ import annotations

from dataclasses import dataclass

from proto.chat import ToolCall
from proto.errors import ErrorReply
from proto.generate import CancelGenerate, Generate, GenerateEvent
from proto.sessions import RecordBody, Span
from proto.tools import ToolResult
from proto.turns import TurnEvent

# -- events


@dataclass(frozen=True, slots=True)
class Began:
    """The session is loaded with this turn open in it. `seen` are tokens of the next step that the trail already shows."""

    now: float
    seen: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Appended:
    """The record of the last Append is in the log and was applied to the session."""

    now: float


@dataclass(frozen=True, slots=True)
class Heard:
    """A generate event arrived."""

    now: float
    event: GenerateEvent


@dataclass(frozen=True, slots=True)
class Submitted:
    """The router took the generation."""

    now: float


@dataclass(frozen=True, slots=True)
class SubmitFailed:
    """The router refused it or did not answer."""

    now: float
    error: ErrorReply


@dataclass(frozen=True, slots=True)
class ToolsReturned:
    """All calls of the step have results, in call order, and the spans that say them to the model."""

    now: float
    results: tuple[ToolResult, ...]
    spans: tuple[Span, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The caller wants it to stop."""

    now: float
    reason: str


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time passed."""

    now: float


@dataclass(frozen=True, slots=True)
class BusRestored:
    """NATS came back, perhaps with an empty memory: say again what this turn has shown."""

    now: float


Event = Began | Appended | Heard | Submitted | SubmitFailed | ToolsReturned | Cancelled | Ticked | BusRestored


# -- instructions


@dataclass(frozen=True, slots=True)
class Append:
    """Append to the session's log; answer with Appended, or drop the turn if someone else wrote."""

    body: RecordBody


@dataclass(frozen=True, slots=True)
class Confirm:
    """Drop the turn if someone else wrote to the session's log; no answer. A replica that was cut off learns it by this."""


@dataclass(frozen=True, slots=True)
class Submit:
    """Send to the router; answer with Submitted or SubmitFailed."""

    generate: Generate


@dataclass(frozen=True, slots=True)
class Revoke:
    """Broadcast; no answer."""

    cancel: CancelGenerate


@dataclass(frozen=True, slots=True)
class Emit:
    """Publish on the turn's trail."""

    event: TurnEvent


@dataclass(frozen=True, slots=True)
class RunTools:
    """Run these at once; answer with ToolsReturned."""

    calls: tuple[ToolCall, ...]


@dataclass(frozen=True, slots=True)
class GiveUpTools:
    """Stop running these; answer with ToolsReturned that says what is unknown about them."""

    calls: tuple[ToolCall, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Over:
    """The turn has its terminal event; its work item is done."""


Instruction = Append | Confirm | Submit | Revoke | Emit | RunTools | GiveUpTools | Over
