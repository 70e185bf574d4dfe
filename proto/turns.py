"""Pure: gateway <-> loop. A turn is started through a work queue and answered by ordered, repeatable events.

Every event has a place `(step, offset, part)`. A turn that is resumed after a crash may say the same events again, cut
differently; whoever reads them drops what lies at or before the last place it has seen, token by token.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from proto.chat import ChatMessage, FinishReason, Grammar, Sampling, ToolCall, ToolChoice, ToolSpec
from proto.errors import ErrorReply
from proto.ids import Id
from proto.message import Message, Tokens
from proto.receipt import Receipt, Usage


class Place(NamedTuple):
    """Position of an event in its turn. Totally ordered; also the SSE event id, as `step.offset.part`."""

    step: int
    offset: int
    part: int

    def __str__(self) -> str:
        return f"{self.step}.{self.offset}.{self.part}"

    @classmethod
    def parse(cls, text: str) -> Place:
        """Inverse of str(). Raises ValueError on anything else."""
        parts = text.split(".")
        if len(parts) != 3 or not all(part.isascii() and part.isdigit() and len(part) <= 9 for part in parts):
            raise ValueError(f"not an event id of the form step.offset.part: {text[:40]!r}")
        return cls(*map(int, parts))


BEFORE_EVERYTHING = Place(-1, 0, 0)


class StartTurn(Message):
    """Run one turn. `messages` is what is new; with `stateless` it is the whole conversation, matched to a log by digest."""

    turn_id: Id
    session_id: Id
    request_id: Id
    tenant: str
    model: str
    messages: tuple[ChatMessage, ...] = Field(min_length=1)
    stateless: bool = False
    # Tools whose calls go back to the caller, and names of tools that Roost itself runs.
    tools: tuple[ToolSpec, ...] = ()
    server_tools: tuple[str, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    sampling: Sampling = Sampling()
    grammar: Grammar | None = None
    max_steps: int = Field(default=8, ge=1, le=64)
    deadline_at: float  # seconds since 1970
    started_at: float
    # Tokens that the model is made to say instead of sampling them: replay of a recorded answer.
    forced: Tokens = ()


class CancelTurn(Message):
    """Stop a turn. Idempotent; heard by every loop replica, acted on by the one that runs it."""

    turn_id: Id
    reason: str = "cancelled by the caller"


class TurnStarted(Message):
    """The loop took the turn. `prompt_tokens` counts the first step's prompt."""

    kind: Literal["started"] = "started"
    model: str
    prompt_tokens: int


class TextDelta(Message):
    """New tokens of the answer. `pieces[i]` is the text that became final with `token_ids[i]` (may be empty).

    `offset` of the event's place is the number of tokens of this step after this delta, so the first token of the delta
    has offset `place.offset - len(token_ids)`. Text that was still held when a step ended (a half stop string) follows
    at part 1 of the last offset, as one piece without a token.
    """

    kind: Literal["text"] = "text"
    token_ids: Tokens
    pieces: tuple[str, ...]
    logprobs: tuple[float, ...] | None = None


class ToolCalled(Message):
    """A complete call, at part 2 + index of the last offset of its step. `run_here`: Roost runs it; else the caller must."""

    kind: Literal["tool_call"] = "tool_call"
    index: int
    call: ToolCall
    run_here: bool


class ToolReturned(Message):
    """A tool that Roost ran has ended, well or not."""

    kind: Literal["tool_result"] = "tool_result"
    call_id: str
    name: str
    outcome: str  # proto.tools.ToolOutcome
    content: str
    seconds: float


class TurnDone(Message):
    """The good terminal event."""

    kind: Literal["done"] = "done"
    finish_reason: FinishReason
    usage: Usage
    receipt: Receipt


class TurnFailed(Message):
    """The other terminal event. Exactly one of the two ends a turn."""

    kind: Literal["failed"] = "failed"
    error: ErrorReply


TurnBody = Annotated[
    TurnStarted | TextDelta | ToolCalled | ToolReturned | TurnDone | TurnFailed, Field(discriminator="kind")
]


class TurnEvent(Message):
    """One event of a turn at its place."""

    turn_id: Id
    session_id: Id
    step: int
    offset: int
    part: int
    body: TurnBody

    @property
    def place(self) -> Place:
        """Where it stands in the turn."""
        return Place(self.step, self.offset, self.part)

    @property
    def is_terminal(self) -> bool:
        """Nothing follows it."""
        return isinstance(self.body, TurnDone | TurnFailed)
