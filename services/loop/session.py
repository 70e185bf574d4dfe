"""Pure: a session as the fold of its log. What the records say is all there is; nothing here is stored elsewhere.

    opened -> ( turn_opened -> ( generated -> [tools_answered] )* -> turn_closed )*

Every record's tokens are appended in log order, so the next prompt begins with the previous prompt and answer, always.
A turn that failed before it was answered at all takes its tokens with it: a prompt that is over the window, or that nobody
served in time, leaves the session as it was, and the caller can say something else or the same again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from proto.chat import ChatMessage, FinishReason, Role
from proto.errors import ErrorCode, WireError
from proto.receipt import Receipt, Seconds, Source, StepReceipt, Usage
from proto.sessions import (
    Record,
    SessionInfo,
    SessionOpened,
    StepGenerated,
    ToolsAnswered,
    TurnClosed,
    TurnOpened,
    TurnSummary,
)
from services.loop.context import tokens_of

# Turns listed by `describe`; the log itself keeps all.
LISTED_TURNS_MAX = 1_000


@dataclass(slots=True)
class OpenTurn:
    """The turn that is running, as far as the log knows."""

    opened: TurnOpened
    # How many tokens the session had before it.
    begins_at: int
    steps: list[StepGenerated] = field(default_factory=list)
    answered: list[ToolsAnswered] = field(default_factory=list)

    @property
    def next_step(self) -> int:
        """Number of the step that comes next; generations and tool answers both count."""
        return len(self.steps) + len(self.answered)

    def followed_by(self, step: StepGenerated) -> OpenTurn:
        """The turn as it will be once `step` is in the log."""
        return OpenTurn(self.opened, self.begins_at, [*self.steps, step], self.answered)

    @property
    def awaits_tools(self) -> bool:
        """The last generation made calls that have no answers yet."""
        return bool(self.steps) and bool(self.steps[-1].calls) and len(self.answered) < len(self.steps)


class Session:
    """Fold of one session's records. Mutated only by `apply`, in log order."""

    def __init__(self) -> None:
        self.opened: SessionOpened | None = None
        # Sequence number of the last record applied; what the next append must expect.
        self.head = 0
        self.tokens: list[int] = []
        self.turn: OpenTurn | None = None
        self.closed: dict[str, TurnClosed] = {}
        self._summaries: list[TurnSummary] = []
        # Messages as readers see them: what was asked and what was answered.
        self._messages: list[ChatMessage] = []

    @property
    def is_fresh(self) -> bool:
        """Nothing was said yet, so the next turn renders the conversation's opening."""
        return not self.tokens

    def apply(self, sequence: int, record: Record) -> None:
        """Take the next record in. Asserts the log's grammar: a log that breaks it was not written by us."""
        assert sequence > self.head, (sequence, self.head)
        body = record.body
        match body:
            case SessionOpened():
                assert self.opened is None, "a session is opened once"
                self.opened = body
                self.tokens.extend(tokens_of(body.spans))
            case TurnOpened():
                assert self.opened is not None and self.turn is None, "one turn at a time"
                self.turn = OpenTurn(body, len(self.tokens))
                self._messages = list(body.messages)
                self.tokens.extend(tokens_of(body.spans))
            case StepGenerated():
                self._take_step(body)
            case ToolsAnswered():
                turn = self._turn_of(body.turn_id)
                assert body.step == turn.next_step and turn.awaits_tools, "answers follow calls"
                turn.answered.append(body)
                self.tokens.extend(tokens_of(body.spans))
            case TurnClosed():
                if body.final is not None:
                    self._take_step(body.final)
                turn = self._turn_of(body.turn_id)
                if body.error is not None and not turn.steps:
                    del self.tokens[turn.begins_at :]
                self._summaries.append(_summary(turn, self._messages, body))
                self.closed[body.turn_id] = body
                self.turn = None
                self._messages = []
        self.head = sequence

    def _take_step(self, step: StepGenerated) -> None:
        turn = self._turn_of(step.turn_id)
        assert step.step == turn.next_step and not turn.awaits_tools, "a call is answered before the model goes on"
        turn.steps.append(step)
        self._messages.append(ChatMessage(role=Role.ASSISTANT, content=step.text, tool_calls=step.calls))
        self.tokens.extend(step.tokens)

    def _turn_of(self, turn_id: str) -> OpenTurn:
        assert self.turn is not None and self.turn.opened.turn_id == turn_id, (
            f"record of a turn that is not open: {turn_id}"
        )
        return self.turn

    def require(self, tenant: str) -> SessionOpened:
        """The session's opening, if it exists and is this tenant's; both failures look the same (F-SEC-08)."""
        if self.opened is None or self.opened.tenant != tenant:
            raise WireError(ErrorCode.NOT_FOUND, "no such session", field="session_id")
        return self.opened

    def describe(self) -> SessionInfo:
        """For `GET /v1/sessions/{id}`."""
        assert self.opened is not None
        turns = self._summaries[-LISTED_TURNS_MAX:]
        if self.turn is not None:
            turns = [*turns, _summary(self.turn, self._messages, None)]
        return SessionInfo(
            session_id=self.opened.session_id,
            tenant=self.opened.tenant,
            model=self.opened.model,
            created_at=self.opened.created_at,
            token_count=len(self.tokens),
            turns=tuple(turns),
            tools=tuple(tool.name for tool in self.opened.tools),
            parent=self.opened.parent,
        )

    def check_integrity(self) -> None:
        """Assert that the fold is consistent with itself."""
        assert (self.opened is None) == (self.head == 0)
        assert self.turn is None or self.turn.opened.turn_id not in self.closed
        if self.turn is not None:
            assert 0 <= len(self.turn.steps) - len(self.turn.answered) <= 1
            assert self.turn.begins_at <= len(self.tokens)


def _summary(turn: OpenTurn, messages: list[ChatMessage], closed: TurnClosed | None) -> TurnSummary:
    status = "running" if closed is None else "failed" if closed.error is not None else "done"
    return TurnSummary(
        turn_id=turn.opened.turn_id,
        status=status,
        opened_at=turn.opened.opened_at,
        messages=tuple(messages),
        finish_reason=closed.finish_reason if closed else None,
        error=closed.error if closed else None,
        usage=closed.usage if closed else Usage(),
        receipt=closed.receipt if closed else None,
    )


def usage_of(turn: OpenTurn) -> Usage:
    """Tokens of all steps; each generation counts its whole prompt, as a stateless client would have paid for it."""
    receipts = [step.receipt for step in turn.steps]
    return Usage(
        prompt_tokens=sum(receipt.prompt_tokens for receipt in receipts),
        cached_tokens=sum(_cached(receipt) for receipt in receipts),
        completion_tokens=sum(receipt.generated_tokens for receipt in receipts),
    )


def _cached(receipt: StepReceipt) -> int:
    return sum(count for source, count in receipt.tokens_by_source.items() if source is not Source.COMPUTED)


def receipt_of(turn: OpenTurn, total_s: float) -> Receipt:
    """The whole turn's receipt: its steps and their sums."""
    steps = tuple(step.receipt for step in turn.steps)
    by_source: dict[Source, int] = {}
    for step in steps:
        for source, count in step.tokens_by_source.items():
            by_source[source] = by_source.get(source, 0) + count
    names = ("queue", "route", "load", "prefill", "decode")
    sums = {name: sum(getattr(step.seconds, name) for step in steps) for name in names}
    tool_s = sum(answer.seconds for answer in turn.answered)
    return Receipt(
        steps=steps,
        seconds=_seconds(sums, tool_s, total_s),
        tokens_by_source=by_source,
        bytes_moved=sum(step.bytes_moved for step in steps),
        tool_calls=sum(len(step.calls) for step in turn.steps),
    )


def _seconds(sums: dict[str, float], tool_s: float, total_s: float) -> Seconds:
    return Seconds(**sums, tool=tool_s, total=total_s)


def finish_of(turn: OpenTurn) -> FinishReason:
    """How the turn ended, going by its last step."""
    return turn.steps[-1].finish_reason if turn.steps else FinishReason.CANCELLED
