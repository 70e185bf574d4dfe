"""Pure: what can happen to a router, and what its core asks the shell to do.

`now` is monotonic time of the router's process. Deadlines come as wall time, so `GenerateArrived` carries both.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from proto.errors import ErrorReply
from proto.fleet import Heartbeat
from proto.generate import (
    Assignment,
    CancelGenerate,
    Generate,
    GenerateAccepted,
    GenerateEvent,
    Pull,
    RouterHello,
    WorkDone,
)
from proto.residency import ResidencyDelta, ResidencySnapshot, SnapshotRequest

# -- events


@dataclass(frozen=True, slots=True)
class BecameActive:
    """The lease is ours from now on."""

    now: float


@dataclass(frozen=True, slots=True)
class BecameStandby:
    """The lease is not ours any more, or may not be."""

    now: float


@dataclass(frozen=True, slots=True)
class GenerateArrived:
    """A loop asks. The list that comes back has exactly one Answer. `wall` is the time that deadlines are said in."""

    now: float
    wall: float
    generate: Generate


@dataclass(frozen=True, slots=True)
class CancelHeard:
    """A loop (or a router, ourselves included) stops a generation up to an attempt."""

    now: float
    cancel: CancelGenerate


@dataclass(frozen=True, slots=True)
class PullHeard:
    """A worker says what room it has."""

    now: float
    pull: Pull


@dataclass(frozen=True, slots=True)
class WorkDoneHeard:
    """An assignment is off a worker's hands."""

    now: float
    done: WorkDone


class AssignOutcome(StrEnum):
    """What became of an ASSIGN request."""

    ACCEPTED = "accepted"
    REFUSED = "refused"  # the worker said no
    UNDELIVERED = "undelivered"  # nobody was there: it is certain that no worker has it
    UNANSWERED = "unanswered"  # a worker may or may not have it


@dataclass(frozen=True, slots=True)
class AssignAnswered:
    """The ASSIGN request came to an end."""

    now: float
    assignment_id: str
    outcome: AssignOutcome
    error: ErrorReply | None = None


@dataclass(frozen=True, slots=True)
class HeartbeatHeard:
    """Any service lives, or says that it has stopped."""

    now: float
    heartbeat: Heartbeat


@dataclass(frozen=True, slots=True)
class DeltaHeard:
    """A holder's blocks changed."""

    now: float
    delta: ResidencyDelta


@dataclass(frozen=True, slots=True)
class SnapshotArrived:
    """The page asked for with `ask_number`; None if the holder did not answer or answered with an error."""

    now: float
    holder_id: str
    ask_number: int
    snapshot: ResidencySnapshot | None


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time passed. Due at `RouterCore.wake_at`, harmless at any time."""

    now: float


Event = (
    BecameActive
    | BecameStandby
    | GenerateArrived
    | CancelHeard
    | PullHeard
    | WorkDoneHeard
    | AssignAnswered
    | HeartbeatHeard
    | DeltaHeard
    | SnapshotArrived
    | Ticked
)

# -- instructions


@dataclass(frozen=True, slots=True)
class Answer:
    """Reply to the GENERATE request that this event was."""

    reply: GenerateAccepted | ErrorReply


@dataclass(frozen=True, slots=True)
class Say:
    """Publish on a generation's reply subject."""

    address: str
    event: GenerateEvent


@dataclass(frozen=True, slots=True)
class SayCancel:
    """Publish on CANCEL_GENERATE."""

    cancel: CancelGenerate


@dataclass(frozen=True, slots=True)
class SayHello:
    """Publish on ROUTER_HELLO."""

    hello: RouterHello


@dataclass(frozen=True, slots=True)
class SendAssign:
    """Request ASSIGN at a worker; tell the outcome as AssignAnswered, whatever it is."""

    worker_id: str
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class AskSnapshot:
    """Request a page at a holder; tell the outcome as SnapshotArrived, whatever it is."""

    holder_id: str
    ask_number: int
    request: SnapshotRequest


class Count(StrEnum):
    """What is worth counting."""

    PLACED = "placed"  # a decision was made
    HELD = "held"  # placed after a wait for a busy worker that holds its prompt
    BLIND = "blind"  # placed without knowing what the worker holds
    REFUSED = "refused"  # the worker said no, or nobody was there
    LOST = "lost"  # told the loop that its generation is lost
    DEADLINE = "deadline"
    OVERLOADED = "overloaded"
    SNAPSHOT = "snapshot"  # paging through a holder began
    NAMESPACE_MISMATCH = "namespace_mismatch"
    PROMISED_TOKENS = "promised_tokens"
    FOUND_TOKENS = "found_tokens"


@dataclass(frozen=True, slots=True)
class Counted:
    """For the metrics."""

    count: Count
    by: int = 1


Instruction = Answer | Say | SayCancel | SayHello | SendAssign | AskSnapshot | Counted
