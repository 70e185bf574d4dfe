"""Drives a TurnMachine without a bus: a log in memory, and a model that says what it is told."""

from __future__ import annotations

from dataclasses import dataclass, field

from proto.chat import ChatMessage, FinishReason, Role, Sampling, ToolSpec
from proto.generate import Generate, GenerateBody, Generated, GenerateEvent, TokensOut
from proto.ids import NamespaceDigest
from proto.receipt import Source
from proto.sessions import Record, RecordBody, SessionOpened, Span, TurnOpened
from proto.tools import ToolOutcome, ToolResult
from proto.turns import Place, TextDelta, TurnEvent
from services.loop.generation import Target
from services.loop.session import Session
from services.loop.step_text import StepText
from services.loop.tool_parsing import ToolCallParser
from services.loop.turn import TurnMachine
from services.loop.turn_events import (
    Append,
    Appended,
    Began,
    Emit,
    Event,
    GiveUpTools,
    Heard,
    Instruction,
    Over,
    Revoke,
    RunTools,
    Submit,
    ToolsReturned,
)

EOS = 0
PYTHON = ToolSpec(name="python")


class Characters:
    """A detokenizer whose tokens are code points; 0 ends an answer."""

    def feed(self, token_id: int) -> str:
        return chr(token_id) if token_id != EOS else ""

    def flush(self) -> str:
        return ""


def tokens_of(text: str, *, ended: bool = True) -> tuple[int, ...]:
    return (*map(ord, text), *((EOS,) if ended else ()))


@dataclass
class Log:
    """A session's log, as JetStream would keep it."""

    records: list[Record] = field(default_factory=list)

    def append(self, body: RecordBody) -> None:
        self.records.append(Record(body=body))

    def fold(self) -> Session:
        session = Session()
        for number, record in enumerate(self.records, start=1):
            session.apply(number, record)
        return session


def opened_log(*, turn: str = "t1", prompt: str = "Q", **how: object) -> Log:
    """A log with a session and one open turn."""
    log = Log()
    tools = (PYTHON, ToolSpec(name="theirs"))
    log.append(
        SessionOpened(session_id="s1", tenant="t", model="m", created_at=0.0, tools=tools, server_tools=("python",))
    )
    log.append(turn_opened(turn, prompt, **how))
    return log


def turn_opened(turn: str, prompt: str, **how: object) -> TurnOpened:
    fields: dict[str, object] = {
        "turn_id": turn,
        "request_id": "r1",
        "opened_at": 0.0,
        "deadline_at": 100.0,
        "spans": (Span(role=Role.USER, tokens=tokens_of(prompt, ended=False)),),
        "messages": (ChatMessage(role=Role.USER, content=prompt),),
        "sampling": Sampling(max_tokens=50),
        "max_steps": 4,
    }
    return TurnOpened.model_validate({**fields, **how})


class Drive:
    """One life of a loop over a log. `told` are all instructions since the last look."""

    def __init__(self, log: Log, *, delivery: int = 1, context_tokens: int = 1_000, seen: tuple[int, ...] = ()) -> None:
        self.log, self.session = log, log.fold()
        assert self.session.turn is not None
        stops = self.session.turn.opened.sampling.stop
        self.machine = TurnMachine(
            self.session,
            Target(NamespaceDigest(bytes(32)), b"", 16, context_tokens, (EOS,)),
            reply_subject=lambda generation_id: f"reply.{generation_id}",
            make_text=lambda step_id: StepText(Characters(), stops, ToolCallParser(step_id, expects_calls=True)),
            delivery=delivery,
        )
        self.events: list[TurnEvent] = []
        self.told: list[Instruction] = []
        # With False, appends wait in `pending`, as if NATS were slow.
        self.appends_at_once = True
        self.pending: list[Append] = []
        self.feed(Began(0.0, seen))

    def feed(self, event: Event) -> list[Instruction]:
        """Hand an event in and perform what comes out, appends included."""
        out = self.machine.handle(event)
        for instruction in out:
            self.told.append(instruction)
            if isinstance(instruction, Emit):
                self.events.append(instruction.event)
            if isinstance(instruction, Append):
                self.pending.append(instruction)
        while self.pending and self.appends_at_once:
            self.append(getattr(event, "now", 0.0))
        self.machine.check_integrity()
        return out

    def append(self, now: float) -> None:
        """The oldest pending append comes back."""
        body = self.pending.pop(0).body
        self.log.append(body)
        self.session.apply(len(self.log.records), self.log.records[-1])
        self.feed(Appended(now))

    # -- the other side

    @property
    def request(self) -> Generate:
        """The latest request to the router."""
        return next(told.generate for told in reversed(self.told) if isinstance(told, Submit))

    def say(self, body: GenerateBody, *, now: float = 1.0, attempt: int | None = None) -> None:
        request = self.request
        event = GenerateEvent(generation_id=request.generation_id, attempt=attempt or request.attempt, body=body)
        self.feed(Heard(now, event))

    def stream(self, text: str, *, first: int | None = None, now: float = 1.0, ended: bool = False) -> None:
        """The worker sends these characters as tokens."""
        start = self.request.emitted if first is None else first
        self.say(TokensOut(first=start, token_ids=tokens_of(text, ended=ended)), now=now)

    def finish(self, total: int, *, reason: FinishReason = FinishReason.STOP, now: float = 1.0) -> None:
        prompt = len(self.request.tokens)
        self.say(
            Generated(
                finish_reason=reason,
                total=total,
                worker_id="w1",
                prompt_tokens=prompt,
                tokens_by_source={Source.COMPUTED: prompt},
            ),
            now=now,
        )

    def answer(self, text: str) -> None:
        """The worker says this and ends."""
        self.stream(text, ended=True)
        if not self.is_over and isinstance(self.told[-1], Emit | Submit | Revoke):
            self.finish(self.request.emitted + len(text) + 1)

    def tools_return(self, *contents: str) -> None:
        calls = next(told.calls for told in reversed(self.told) if isinstance(told, RunTools | GiveUpTools))
        results = tuple(
            ToolResult(call_id=call.call_id, name=call.name, outcome=ToolOutcome.OK, content=content, seconds=0.5)
            for call, content in zip(calls, contents, strict=True)
        )
        spans = (Span(role=Role.TOOL, tokens=tokens_of("".join(contents), ended=False)),)
        self.feed(ToolsReturned(2.0, results, spans, 0.5))

    # -- what came of it

    @property
    def is_over(self) -> bool:
        return any(isinstance(told, Over) for told in self.told)

    def told_of(self, kind: type[Instruction]) -> list[Instruction]:
        return [told for told in self.told if isinstance(told, kind)]


def read(*lives: list[TurnEvent]) -> tuple[str, list[str], list[TurnEvent]]:
    """Text, other events and terminal events as a reader gets them who drops what it has seen, token by token."""
    last, text, kinds, terminal = Place(-1, 0, 0), "", [], []
    for event in (event for life in lives for event in life):
        if event.is_terminal:
            terminal.append(event)
        if isinstance(event.body, TextDelta) and event.part == 0:
            known = max(0, last.offset - (event.offset - len(event.body.token_ids))) if event.step == last.step else 0
            if event.step < last.step or (event.step == last.step and event.offset <= last.offset):
                continue
            text += "".join(event.body.pieces[known:])
        elif event.place <= last:
            continue
        elif isinstance(event.body, TextDelta):
            text += "".join(event.body.pieces)
        else:
            kinds.append(event.body.kind)
        last = event.place
    return text, kinds, terminal
