"""The shell of one turn: performs what its machine asks, and feeds back what came of it. Decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, assert_never

from proto.chat import ChatMessage, Role, ToolCall
from proto.errors import WireError
from proto.generate import Generate, GenerateAccepted
from proto.sessions import TurnClosed
from proto.subjects import CANCEL_GENERATE, GENERATE, SESSION_LOG, TURN_EVENT
from proto.tools import ToolResult
from proto.turns import StartTurn
from services.loop.context import ContextBuilder
from services.loop.opening import TurnOpener
from services.loop.session import Session
from services.loop.store import SessionStore
from services.loop.tool_runner import ToolRunner, interrupted
from services.loop.turn import TurnMachine
from services.loop.turn_events import (
    Append,
    Appended,
    Began,
    Confirm,
    Emit,
    Event,
    GiveUpTools,
    Instruction,
    Over,
    Revoke,
    RunTools,
    Submit,
    SubmitFailed,
    Submitted,
    ToolsReturned,
)
from shared.bus import Bus
from shared.clock import Clock
from shared.errors import SequenceConflict
from shared.log import get_logger

# Events that may wait for one turn. Tokens come one message a step; a turn this far behind is asked for again by its
# machine, which sees the hole.
EVENTS_WAITING_MAX: Final = 4_096

log = get_logger()


@dataclass(frozen=True, slots=True)
class Kit:
    """What every turn of a replica works with."""

    bus: Bus
    clock: Clock
    store: SessionStore
    opener: TurnOpener
    context: ContextBuilder
    tools: ToolRunner
    spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]


class TurnRunner:
    """One turn from its opening to its terminal event."""

    def __init__(self, start: StartTurn, session_id: str, session: Session, machine: TurnMachine, kit: Kit) -> None:
        self._start, self._session_id, self._session, self._machine, self._kit = (
            start,
            session_id,
            session,
            machine,
            kit,
        )
        self._events: asyncio.Queue[Event] = asyncio.Queue(EVENTS_WAITING_MAX)
        self._running_tools: asyncio.Task[Any] | None = None
        # The last record that this turn has built on.
        self._head = session.head
        self.is_over = False

    def tell(self, event: Event) -> None:
        """Hand an event over; never blocks."""
        if self._events.full():
            log.warning("turn_event_dropped", turn=self._start.turn_id, kind=type(event).__name__)
            return
        self._events.put_nowait(event)

    async def run(self, seen: tuple[int, ...]) -> None:
        """Until the turn is over. Raises SequenceConflict when another replica took it, WireError when NATS stays away."""
        try:
            await self._perform(self._machine.handle(Began(self._kit.clock.now(), seen)))
            while not self.is_over:
                await self._perform(self._machine.handle(await self._events.get()))
        finally:
            if self._running_tools is not None:
                self._running_tools.cancel()

    async def _perform(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Emit(event):
                    await self._kit.bus.publish(TURN_EVENT, event, turn_id=event.turn_id)
                case Append():
                    await self._append(instruction)
                case Confirm():
                    await self._confirm()
                case Submit(generate):
                    self._kit.spawn(self._submit(generate))
                case Revoke(cancel):
                    await self._kit.bus.publish(CANCEL_GENERATE, cancel)
                case RunTools(calls):
                    self._running_tools = self._kit.spawn(self._run_tools(calls))
                case GiveUpTools(calls, reason):
                    if self._running_tools is not None:
                        self._running_tools.cancel()
                    self.tell(self._returned(interrupted(calls, reason), 0.0))
                case Over():
                    self.is_over = True
                case _:
                    assert_never(instruction)

    def _check_head(self) -> None:
        """A read of the session may have folded in what another replica wrote; nothing of ours may follow that."""
        if self._session.head != self._head:
            raise SequenceConflict(SESSION_LOG.at(session_id=self._session_id), self._head)

    async def _confirm(self) -> None:
        try:
            await self._kit.store.refresh(self._session_id, self._session)
        except WireError as away:
            log.info("log_not_confirmed", session=self._session_id, error=str(away))
        self._check_head()

    async def _append(self, append: Append) -> None:
        self._check_head()
        steps = self._session.turn.steps if self._session.turn else []
        give_up_at = self._kit.opener.give_up_at(self._start.deadline_at)
        self._head = await self._kit.store.append(self._session_id, self._session, append.body, give_up_at=give_up_at)
        if isinstance(append.body, TurnClosed) and append.body.error is None:
            await self._kit.opener.remember(self._session_id, self._session, self._start, steps)
        await self._perform(self._machine.handle(Appended(self._kit.clock.now())))

    async def _submit(self, generate: Generate) -> None:
        try:
            await self._kit.bus.request(GENERATE, generate, GenerateAccepted)
        except WireError as refused:
            self.tell(SubmitFailed(self._kit.clock.now(), refused.reply))
        else:
            self.tell(Submitted(self._kit.clock.now()))

    async def _run_tools(self, calls: tuple[ToolCall, ...]) -> None:
        assert self._session.opened is not None and self._session.turn is not None
        began = self._kit.clock.monotonic()
        results = await self._kit.tools.run(self._session.opened, self._session.turn.opened, calls)
        self.tell(self._returned(results, self._kit.clock.monotonic() - began))

    def _returned(self, results: tuple[ToolResult, ...], seconds: float) -> ToolsReturned:
        messages = [
            ChatMessage(role=Role.TOOL, content=result.content, tool_call_id=result.call_id) for result in results
        ]
        spans = self._kit.context.following(messages, self._session.tokens[-1])
        return ToolsReturned(self._kit.clock.now(), results, spans, seconds)
