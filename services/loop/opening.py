"""Finds the session that a turn belongs to and opens the turn in its log: native by id, stateless by digest."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Final

from proto.chat import ChatMessage, Role, ToolSpec
from proto.errors import ErrorCode, WireError
from proto.message import Message
from proto.sessions import SessionOpened, Span, StepGenerated, TurnClosed, TurnOpened
from proto.subjects import LIST_TOOLS
from proto.tools import ListTools, ToolList
from proto.turns import StartTurn
from services.loop.context import ContextBuilder
from services.loop.digests import answered_lengths, chain
from services.loop.session import Session
from services.loop.store import SessionStore
from shared.bus import Bus, KvBucket
from shared.clock import Clock
from shared.log import get_logger

# How many of the latest answers in a history are looked up; an ordinary client's is the last one.
LOOKUPS_MAX: Final = 4

log = get_logger()


class LoggedAs(Message):
    """Value in the digests bucket: the conversation with this digest ends at this record of this session."""

    session_id: str
    sequence: int


class TurnOpener:
    """Opens turns. Holds nothing between them."""

    def __init__(self, bus: Bus, store: SessionStore, digests: KvBucket, context: ContextBuilder, clock: Clock) -> None:
        self._bus, self._store, self._digests, self._context, self._clock = bus, store, digests, context, clock

    async def find(self, start: StartTurn, delivery: int) -> tuple[str, Session, Sequence[ChatMessage]]:
        """Session id, session, and which of the turn's messages are new to it. May create or fork the session.

        Raises WireError NOT_FOUND for a native turn of a session that is not there.
        """
        if not start.stateless:
            session = await self._store.load(start.session_id, refresh=delivery > 1)
            session.require(start.tenant)
            return start.session_id, session, start.messages
        if delivery > 1:
            session = await self._store.load(start.session_id, refresh=True)
            if session.opened is not None:
                return start.session_id, session, self._unlogged(session, start)
        found = await self._logged(start)
        if found is not None:
            return found
        opened = SessionOpened(
            session_id=start.session_id,
            tenant=start.tenant,
            model=start.model,
            created_at=self._clock.now(),
            tools=(*start.tools, *await self.server_tools(start.server_tools)),
            server_tools=start.server_tools,
        )
        return start.session_id, await self._create(opened, start.deadline_at), start.messages

    def _unlogged(self, session: Session, start: StartTurn) -> Sequence[ChatMessage]:
        """Messages of a stateless turn that was begun under its own session id: all, or those after the fork's parent."""
        assert session.opened is not None
        if session.opened.parent is None:
            return start.messages
        lengths = answered_lengths(start.messages, LOOKUPS_MAX)
        return start.messages[lengths[0] :] if lengths else start.messages

    async def _logged(self, start: StartTurn) -> tuple[str, Session, Sequence[ChatMessage]] | None:
        """The log of the longest answered prefix of the history, continued or forked; None if none is known."""
        digests = chain(start.tenant, start.model, start.tools, start.server_tools, start.messages)
        for length in answered_lengths(start.messages, LOOKUPS_MAX):
            entry = await self._digests.get(digests[length])
            if entry is None:
                continue
            known = LoggedAs.model_validate(json.loads(entry[0]))
            session = await self._store.load(known.session_id, refresh=True)
            if session.opened is None or session.opened.tenant != start.tenant:
                continue
            new = start.messages[length:]
            is_ours = session.turn is not None and session.turn.opened.turn_id == start.turn_id
            if is_ours or start.turn_id in session.closed or (session.head == known.sequence and session.turn is None):
                return known.session_id, session, new
            return await self._fork(start, known, new)
        return None

    async def _fork(
        self, start: StartTurn, known: LoggedAs, new: Sequence[ChatMessage]
    ) -> tuple[str, Session, Sequence[ChatMessage]]:
        """The history goes on from an older point of its session: a session of its own begins with the same tokens."""
        base = await self._store.load_until(known.session_id, known.sequence)
        assert base.opened is not None
        whole = Span(role=Role.SYSTEM, tokens=tuple(base.tokens))
        opened = base.opened.model_copy(
            update={
                "session_id": start.session_id,
                "created_at": self._clock.now(),
                "spans": (whole,),
                "parent": f"{known.session_id}@{known.sequence}",
            }
        )
        return start.session_id, await self._create(opened, start.deadline_at), new

    async def server_tools(self, names: Sequence[str]) -> tuple[ToolSpec, ...]:
        """Specs of Roost's own tools, in canonical order. Raises WireError BAD_REQUEST naming one that is not there."""
        if not names:
            return ()
        known = (await self._bus.request(LIST_TOOLS, ListTools(), ToolList)).tools
        by_name = {tool.name: tool for tool in known}
        missing = [name for name in names if name not in by_name]
        if missing:
            raise WireError(
                ErrorCode.BAD_REQUEST, f"no tool {missing[0]!r}; there are: {', '.join(sorted(by_name))}", field="tools"
            )
        return tuple(tool for tool in known if tool.name in names)

    async def _create(self, opened: SessionOpened, deadline_at: float) -> Session:
        session = Session()
        await self._store.append(opened.session_id, session, opened, give_up_at=self.give_up_at(deadline_at))
        return session

    async def open(self, session_id: str, session: Session, start: StartTurn, new: Sequence[ChatMessage]) -> None:
        """Append the turn with its delta tokens."""
        opened = session.require(start.tenant)
        if session.is_fresh:
            spans = self._context.opening(opened.system, new, opened.tools)
        else:
            spans = self._context.following(new, session.tokens[-1])
        now = self._clock.now()
        body = TurnOpened(
            turn_id=start.turn_id,
            request_id=start.request_id,
            # The gateway's moment, so that the receipt's total holds the queue too; not if its clock is far off.
            opened_at=start.started_at if 0 <= now - start.started_at < 3_600 else now,
            deadline_at=start.deadline_at,
            spans=spans,
            messages=tuple(new),
            sampling=start.sampling,
            grammar=start.grammar,
            tool_choice=start.tool_choice,
            max_steps=start.max_steps,
            forced=start.forced,
        )
        await self._store.append(session_id, session, body, give_up_at=self.give_up_at(start.deadline_at))

    async def remember(
        self, session_id: str, session: Session, start: StartTurn, steps: Sequence[StepGenerated]
    ) -> None:
        """Store under which digest a stateless client will send this conversation next. Losing it costs reuse, no more."""
        if not start.stateless or not steps:
            return
        answer = ChatMessage(role=Role.ASSISTANT, content=steps[-1].text, tool_calls=steps[-1].calls)
        digest = chain(start.tenant, start.model, start.tools, start.server_tools, (*start.messages, answer))[-1]
        value = LoggedAs(session_id=session_id, sequence=session.head)
        try:
            await self._digests.put(digest, value.model_dump_json().encode())
        except WireError as lost:
            log.warning("digest_not_stored", session=session_id, error=str(lost))

    def give_up_at(self, deadline_at: float) -> float:
        """A deadline in event loop time."""
        return asyncio.get_running_loop().time() + max(1.0, deadline_at - self._clock.now())


def orphaned(session: Session, now: float) -> TurnClosed | None:
    """The record that closes a turn whose deadline passed while nobody ran it; None if there is no such turn."""
    turn = session.turn
    if turn is None or now < turn.opened.deadline_at:
        return None
    error = WireError(ErrorCode.DEADLINE, "the turn's deadline passed while nobody ran it").reply
    return TurnClosed(turn_id=turn.opened.turn_id, steps=turn.next_step, error=error, closed_at=now)
