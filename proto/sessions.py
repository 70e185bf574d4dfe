"""Pure: a session is an append-only log of records in JetStream, one subject a session. Gateway and loop read it.

The next prompt is the concatenation of every `tokens` field in log order, so the prefix cannot drift. Each append
states the sequence number of the record before it; the one that loses the race changes nothing.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from proto.chat import ChatMessage, FinishReason, Grammar, Role, Sampling, ToolCall, ToolChoice, ToolSpec
from proto.errors import ErrorReply
from proto.ids import Id
from proto.message import Message, Tokens
from proto.receipt import Receipt, StepReceipt, Usage


class Span(Message):
    """A run of tokens with its role: part of the prompt from now on."""

    role: Role
    tokens: Tokens
    # Text as the caller sent it; the tokens are the truth.
    text: str = ""


class SessionOpened(Message):
    """First record. `parent` names the session and record this one was forked from; its tokens are then in `spans`."""

    kind: Literal["opened"] = "opened"
    session_id: Id
    tenant: str
    model: str
    created_at: float
    system: str = ""
    tools: tuple[ToolSpec, ...] = ()
    server_tools: tuple[str, ...] = ()
    spans: tuple[Span, ...] = ()
    parent: str | None = None


class TurnOpened(Message):
    """A turn was taken: its delta is part of the log, and everything needed to run it again from here."""

    kind: Literal["turn_opened"] = "turn_opened"
    turn_id: Id
    request_id: Id
    opened_at: float
    deadline_at: float
    spans: tuple[Span, ...]
    messages: tuple[ChatMessage, ...]
    sampling: Sampling
    grammar: Grammar | None = None
    tool_choice: ToolChoice = ToolChoice()
    max_steps: int
    forced: Tokens = ()


class StepGenerated(Message):
    """The model has spoken: the tokens as generated, with the calls that were read from them."""

    kind: Literal["generated"] = "generated"
    turn_id: Id
    step: int
    tokens: Tokens
    text: str
    calls: tuple[ToolCall, ...] = ()
    finish_reason: FinishReason
    receipt: StepReceipt


class ToolsAnswered(Message):
    """Results of all calls of one step, tokenized, in call order."""

    kind: Literal["tools_answered"] = "tools_answered"
    turn_id: Id
    step: int
    spans: tuple[Span, ...]
    seconds: float


class TurnClosed(Message):
    """The turn is over. An aborted turn keeps what was delivered; one that failed before that leaves no tokens."""

    kind: Literal["turn_closed"] = "turn_closed"
    turn_id: Id
    # The last generation, when it made no calls: nothing can come between it and the close, so both are one write.
    final: StepGenerated | None = None
    # Steps it had, generations and tool answers together: the place of its terminal event.
    steps: int = 0
    finish_reason: FinishReason | None = None
    error: ErrorReply | None = None
    usage: Usage = Usage()
    receipt: Receipt = Receipt()
    closed_at: float


RecordBody = Annotated[
    SessionOpened | TurnOpened | StepGenerated | ToolsAnswered | TurnClosed, Field(discriminator="kind")
]


class Record(Message):
    """One entry of a session's log."""

    body: RecordBody


class CreateSession(Message):
    """gateway -> loop: open a session."""

    session_id: Id
    tenant: str
    model: str
    system: str = ""
    tools: tuple[ToolSpec, ...] = ()
    server_tools: tuple[str, ...] = ()


class GetSession(Message):
    """gateway -> loop: describe a session. Another tenant's session is answered as not found."""

    session_id: Id
    tenant: str


class TurnSummary(Message):
    """One turn as `GET /v1/sessions/{id}` shows it."""

    turn_id: str
    status: Literal["running", "done", "failed"]
    opened_at: float
    messages: tuple[ChatMessage, ...]
    finish_reason: FinishReason | None = None
    error: ErrorReply | None = None
    usage: Usage = Usage()
    receipt: Receipt | None = None


class SessionInfo(Message):
    """A session as its readers see it."""

    session_id: str
    tenant: str
    model: str
    created_at: float
    token_count: int
    turns: tuple[TurnSummary, ...] = ()
    tools: tuple[str, ...] = ()
    parent: str | None = None
