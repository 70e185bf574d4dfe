"""The loop's turn machine with a runner like services/loop/runner.py: an append is waited for before anything after it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from proto.chat import ChatMessage, Role, Sampling
from proto.errors import ErrorCode, ErrorReply
from proto.generate import GenerateAccepted
from proto.sessions import Record, SessionOpened, Span, TurnOpened
from proto.subjects import CANCEL_GENERATE, CANCEL_TURN, GENERATE, TURN_EVENT
from proto.turns import TextDelta
from services.loop.generation import Target
from services.loop.session import Session
from services.loop.step_text import StepText
from services.loop.tool_parsing import ToolCallParser
from services.loop.trail import terminal_event
from services.loop.turn import TurnMachine
from services.loop.turn_events import (
    Append,
    Appended,
    Began,
    Cancelled,
    Confirm,
    Emit,
    Event,
    Heard,
    Instruction,
    Over,
    Revoke,
    Submit,
    SubmitFailed,
    Submitted,
    Ticked,
)
from shared.limits import TURN_ACK_WAIT_S
from tests.sim.bus import Bus, Conflict, Logs, Silence
from tests.sim.node import Node
from tests.sim.world import Life, World

SUBMIT_TIMEOUT_S = 5.0
TICK_S = 0.25
BUSY_RETRY_S = 0.5
# How often a loop says that it still has a turn.
KEPT_EVERY_S = TURN_ACK_WAIT_S / 3


@dataclass(frozen=True)
class Turn:
    """What a client asks."""

    turn_id: str
    session_id: str
    tokens: tuple[int, ...]
    sampling: Sampling
    deadline_at: float


@dataclass
class _Delivery:
    turn: Turn
    number: int
    loop: LoopNode
    life: Life
    kept_at: float


class Characters:
    """A detokenizer whose tokens are code points."""

    def feed(self, token_id: int) -> str:
        return chr(token_id)

    def flush(self) -> str:
        return ""


class WorkQueue:
    """START_TURN as JetStream keeps it: a turn is one loop's for as long as that says so each moment, and then another's.

    So a loop that only stalls, or that nobody hears, has its turns given away while it goes on with them.
    """

    def __init__(self, world: World, can_speak: Callable[[LoopNode], bool]) -> None:
        self.world, self._can_speak = world, can_speak
        self.loops: list[LoopNode] = []
        self.open: dict[str, _Delivery] = {}
        # Turns that were given to a second loop although the first was still alive.
        self.given_away = 0

    def put(self, turn: Turn) -> None:
        self._give(turn, 1)

    def _give(self, turn: Turn, number: int) -> None:
        ready = [loop for loop in self.loops if loop.is_on and self._can_speak(loop)]
        if not ready:
            self.world.after(0.2, lambda: self._give(turn, number))
            return
        loop = self.world.random.choice(ready)
        self.open[turn.turn_id] = _Delivery(turn, number, loop, loop.life, self.world.now)
        self.world.after(0.003, lambda: loop.take(turn, number), loop.life)
        self.world.after(KEPT_EVERY_S, lambda: self._look(turn, number))

    def _look(self, turn: Turn, number: int) -> None:
        given = self.open.get(turn.turn_id)
        if given is None or given.number != number:
            return
        if given.life.is_on and self._can_speak(given.loop):
            given.kept_at = self.world.now
        if self.world.now - given.kept_at < TURN_ACK_WAIT_S:
            self.world.after(KEPT_EVERY_S, lambda: self._look(turn, number))
            return
        self.given_away += given.life.is_on
        self.world.say("queue", f"{turn.turn_id} is delivered again")
        self._give(turn, number + 1)

    def later(self, turn: Turn) -> None:
        """Not now: deliver it again, to anyone."""
        given = self.open.get(turn.turn_id)
        if given is not None:
            given.number += 1
            self.world.after(BUSY_RETRY_S, lambda: self._again(turn, given.number))

    def _again(self, turn: Turn, number: int) -> None:
        given = self.open.get(turn.turn_id)
        if given is not None and given.number == number:
            self._give(turn, number)

    def done(self, turn_id: str) -> None:
        self.open.pop(turn_id, None)


class LoopNode(Node):
    """One replica."""

    def __init__(self, name: str, world: World, bus: Bus, logs: Logs, queue: WorkQueue, target: Target) -> None:
        super().__init__(name, world, bus)
        self.logs, self.queue, self.target = logs, queue, target
        self.runners: dict[str, Runner] = {}

    def born(self) -> None:
        self.runners = {}
        self.bus.open_box(self.name, self.life, self._heard)
        self.bus.subscribe(CANCEL_TURN, self.life, self._cancelled)
        self.world.every(TICK_S, lambda: self._all(Ticked(self.world.now)), self.life)

    def _all(self, event: Event) -> None:
        for runner in list(self.runners.values()):
            runner.tell(event)

    def _heard(self, event: Any) -> None:
        """The reply subject names the generation, whose turn is its id up to the step."""
        runner = self.runners.get(event.generation_id.rsplit("-", 1)[0])
        if runner is not None:
            runner.tell(Heard(self.world.now, event))

    def _cancelled(self, cancel: Any) -> None:
        runner = self.runners.get(cancel.turn_id)
        if runner is not None:
            runner.tell(Cancelled(self.world.now, cancel.reason))

    def take(self, turn: Turn, delivery: int) -> None:
        """Open the turn, or find it opened, or ended. One at a time of a session, as the service's lock has it."""
        if any(runner.turn.session_id == turn.session_id for runner in self.runners.values()):
            self.world.after(BUSY_RETRY_S, lambda: self.take(turn, delivery), self.life)
            return
        records = self.logs.sessions.setdefault(turn.session_id, [])
        session = fold(records)
        if turn.turn_id in session.closed:
            self.show(terminal_event(turn.session_id, session.closed[turn.turn_id]))
            self.queue.done(turn.turn_id)
            return
        try:
            if session.opened is None:
                opened = SessionOpened(session_id=turn.session_id, tenant="t", model="sim", created_at=self.world.now)
                self._append(session, turn.session_id, opened)
            if session.turn is None:
                self._append(session, turn.session_id, _opened(turn, self.world.now))
        except Conflict:
            session.turn = None
        if session.turn is None or session.turn.opened.turn_id != turn.turn_id:
            self.world.after(BUSY_RETRY_S, lambda: self.take(turn, delivery), self.life)
            return
        runner = self.runners[turn.turn_id] = Runner(self, turn, session, delivery)
        runner.begin()

    def _append(self, session: Session, session_id: str, body: Any) -> None:
        record = Record(body=body)
        session.apply(self.logs.append(session_id, record, expected=session.head), record)

    def show(self, event: Any) -> None:
        """On the trail, and live to whoever listens."""
        self.logs.trails.setdefault(event.turn_id, []).append(event)
        self.bus.publish(self.name, TURN_EVENT, event)


class Runner:
    """One turn in one life of a loop."""

    def __init__(self, loop: LoopNode, turn: Turn, session: Session, delivery: int) -> None:
        self.loop, self.turn, self.session, self.delivery = loop, turn, session, delivery
        self.machine = TurnMachine(
            session,
            loop.target,
            reply_subject=lambda generation_id: f"{loop.name}/{generation_id}",
            make_text=lambda step_id: StepText(Characters(), (), ToolCallParser(step_id, expects_calls=False)),
            delivery=delivery,
        )
        self._todo: deque[Instruction] = deque()
        self._events: deque[Event] = deque()
        self._is_appending = False

    def begin(self) -> None:
        seen = self._seen() if self.delivery > 1 else ()
        self.tell(Began(self.loop.world.now, seen))

    def _seen(self) -> tuple[int, ...]:
        assert self.session.turn is not None
        step = self.session.turn.next_step
        seen: list[int] = []
        for event in self.loop.logs.trails.get(self.turn.turn_id, []):
            if event.step == step and event.part == 0 and isinstance(event.body, TextDelta):
                first = event.offset - len(event.body.token_ids)
                if first <= len(seen):
                    seen.extend(event.body.token_ids[len(seen) - first :])
        return tuple(seen)

    def tell(self, event: Event) -> None:
        self._events.append(event)
        self._pump()

    def _pump(self) -> None:
        while not self._is_appending and self.loop.runners.get(self.turn.turn_id) is self:
            if self._todo:
                self._perform(self._todo.popleft())
            elif self._events:
                self._todo.extend(self.machine.handle(self._events.popleft()))
                self.machine.check_integrity()
            else:
                return

    def _perform(self, instruction: Instruction) -> None:
        loop = self.loop
        match instruction:
            case Emit(event):
                loop.show(event)
            case Append(body):
                self._is_appending = True
                loop.world.after(loop.world.random.uniform(0.0005, 0.01), lambda: self._append(body), loop.life)
            case Confirm():
                if len(loop.logs.sessions[self.turn.session_id]) != self.session.head:
                    self._lost()
            case Submit(generate):
                loop.bus.request(loop.life, GENERATE, generate, self._submitted, SUBMIT_TIMEOUT_S)
            case Revoke(cancel):
                loop.bus.publish(loop.name, CANCEL_GENERATE, cancel)
            case Over():
                del loop.runners[self.turn.turn_id]
                loop.queue.done(self.turn.turn_id)
            case other:
                raise AssertionError(other)

    def _append(self, body: Any) -> None:
        record = Record(body=body)
        try:
            head = self.loop.logs.append(self.turn.session_id, record, expected=self.session.head)
        except Conflict:
            self._lost()
            return
        self.session.apply(head, record)
        self._is_appending = False
        self._todo.extendleft(reversed(self.machine.handle(Appended(self.loop.world.now))))
        self._pump()

    def _lost(self) -> None:
        """Another replica has the turn."""
        self.loop.world.say(self.loop.name, f"{self.turn.turn_id} is somebody else's")
        del self.loop.runners[self.turn.turn_id]
        self.loop.queue.later(self.turn)

    def _submitted(self, reply: Any) -> None:
        now = self.loop.world.now
        if isinstance(reply, GenerateAccepted):
            self.tell(Submitted(now))
        elif isinstance(reply, ErrorReply):
            self.tell(SubmitFailed(now, reply))
        else:
            code = ErrorCode.UNAVAILABLE if reply is Silence.NOBODY else ErrorCode.DEADLINE
            self.tell(SubmitFailed(now, ErrorReply(code=code, message="as the bus says")))


def fold(records: list[Record]) -> Session:
    session = Session()
    for number, record in enumerate(records, start=1):
        session.apply(number, record)
    return session


def _opened(turn: Turn, now: float) -> TurnOpened:
    return TurnOpened(
        turn_id=turn.turn_id, request_id="r", opened_at=now, deadline_at=turn.deadline_at,
        spans=(Span(role=Role.USER, tokens=turn.tokens),),
        messages=(ChatMessage(role=Role.USER, content="x"),), sampling=turn.sampling, max_steps=4,
    )  # fmt: skip
