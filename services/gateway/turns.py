"""Turns that clients of this replica read or wait for: bounded, started once, read from anywhere, cancelled when left.

run       ask for a turn and read it
attach    read a turn that runs or ran, behind a place, whoever started it
cancel    stop a turn, whoever runs it
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final, Protocol

from proto.errors import ErrorCode, WireError
from proto.sessions import GetSession, SessionInfo
from proto.subjects import CANCEL_TURN, GET_SESSION, START_TURN, TURN_EVENT
from proto.turns import BEFORE_EVERYTHING, CancelTurn, Place, StartTurn, TurnEvent
from services.gateway.events import TurnReader
from services.gateway.feeds import FeedHub
from services.gateway.metrics import TURNS_IN_FLIGHT
from services.gateway.past import ended_turn, past_events
from services.gateway.settings import GatewaySettings
from shared.bus import Bus
from shared.clock import Clock
from shared.limits import TURN_DEADLINE_S_MAX
from shared.log import get_logger

# The loop says that a deadline has passed; a reader that hears nothing says so itself after this time more.
DEADLINE_GRACE_S: Final = 5.0
FULL_RETRY_S: Final = 2.0
# How often a turn that nobody has heard of is looked for.
LOOK_EVERY_S: Final = 0.5

log = get_logger()


class Events(Protocol):
    """Where an answer comes from: a live feed, or a turn that ended long ago."""

    is_over: bool
    is_ended_by_loop: bool

    async def next(self, until: float) -> TurnEvent | None:
        """The next event; None when there is none by `until` (monotonic), or when the turn `is_over`."""
        ...


class PastFeed:
    """A turn that ended long ago, said again."""

    def __init__(self, events: tuple[TurnEvent, ...]) -> None:
        self._events = iter(events)
        self.is_over = False
        self.is_ended_by_loop = True

    async def next(self, until: float) -> TurnEvent | None:
        """See Events."""
        event = next(self._events, None)
        self.is_over = event is None
        return event


class Turns:
    """Owns the count of turns in flight and their feeds."""

    def __init__(self, bus: Bus, clock: Clock, settings: GatewaySettings) -> None:
        self._bus, self._clock, self._settings = bus, clock, settings
        self._hub = FeedHub(bus, clock)
        self._count = 0
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def count(self) -> int:
        """Turns in flight."""
        return self._count

    @contextmanager
    def _room(self) -> Iterator[None]:
        if self._is_draining:
            raise WireError(ErrorCode.DRAINING, "this gateway is stopping; ask again", retry_after_s=1.0)
        if self._count >= self._settings.gateway_turns_max:
            raise WireError(
                ErrorCode.OVERLOADED,
                f"{self._count} turns are in flight here, and no more are taken",
                retry_after_s=FULL_RETRY_S,
            )
        self._count += 1
        self._idle.clear()
        TURNS_IN_FLIGHT.set(self._count)
        try:
            yield
        finally:
            self._count -= 1
            TURNS_IN_FLIGHT.set(self._count)
            if self._count == 0:
                self._idle.set()

    @asynccontextmanager
    async def run(self, start: StartTurn, *, is_named: bool, cancel_on_leave: bool) -> AsyncIterator[Events]:
        """Ask for the turn and read it from its beginning. A named one may run already, or have ended.

        Raises WireError: OVERLOADED here or by the queue, DRAINING, UNAVAILABLE, TOO_LARGE.
        """
        with self._room():
            past = (
                await self._past(start.tenant, start.session_id, start.turn_id, BEFORE_EVERYTHING) if is_named else None
            )
            if past is not None:
                yield past
                return
            reader = self._reader(start, after=BEFORE_EVERYTHING if is_named else None)
            feed = await self._hub.join(reader)
            may_run = True
            try:
                try:
                    await self._bus.enqueue(START_TURN, start, dedup_id=start.turn_id)
                except WireError as refused:
                    may_run = refused.code is ErrorCode.UNAVAILABLE
                    raise
                yield feed
            finally:
                await self._hub.leave(feed)
                if cancel_on_leave and may_run and not feed.is_ended_by_loop:
                    await self.cancel(start.turn_id, "the client went away")

    def _reader(self, start: StartTurn, after: Place | None) -> TurnReader:
        now = self._clock.monotonic()
        return TurnReader(
            start.turn_id,
            start.session_id,
            now=now,
            deadline_at=now + max(0.0, start.deadline_at - self._clock.now()) + DEADLINE_GRACE_S,
            held_bytes_max=self._settings.gateway_reader_bytes,
            after=after,
        )

    @asynccontextmanager
    async def attach(self, tenant: str, session_id: str, turn_id: str, after: Place) -> AsyncIterator[Events]:
        """Read a turn behind a place. Raises WireError NOT_FOUND for one that nobody hears of in time."""
        with self._room():
            past = await self._found(tenant, session_id, turn_id, after)
            if past is not None:
                yield past
                return
            now = self._clock.monotonic()
            reader = TurnReader(
                turn_id,
                session_id,
                now=now,
                deadline_at=now + TURN_DEADLINE_S_MAX + DEADLINE_GRACE_S,
                held_bytes_max=self._settings.gateway_reader_bytes,
                after=after,
            )
            feed = await self._hub.join(reader)
            try:
                yield feed
            finally:
                await self._hub.leave(feed)

    async def _found(self, tenant: str, session_id: str, turn_id: str, after: Place) -> PastFeed | None:
        """Wait until something is known of the turn: None if it is on the trail or runs, else what it said."""
        give_up_at = self._clock.monotonic() + self._settings.gateway_attach_wait_s
        while True:
            try:
                first = await self._bus.read_log(TURN_EVENT, TurnEvent, limit=1, turn_id=turn_id)
                if first:
                    _require_session(first[0].record, session_id)
                    return None
                info = await self._bus.request(
                    GET_SESSION, GetSession(session_id=session_id, tenant=tenant), SessionInfo
                )
                if any(turn.turn_id == turn_id for turn in info.turns):
                    return _past_of(info, turn_id, after)
            except WireError as away:
                if away.code not in (ErrorCode.UNAVAILABLE, ErrorCode.DEADLINE):
                    raise
                log.info("turn_not_looked_up", turn=turn_id, error=str(away))
            if self._clock.monotonic() >= give_up_at:
                raise WireError(ErrorCode.NOT_FOUND, "no such turn in this session", field="turn_id")
            await self._clock.sleep(LOOK_EVERY_S)

    async def _past(self, tenant: str, session_id: str, turn_id: str, after: Place) -> PastFeed | None:
        """What a turn said that ended so long ago that its trail is gone; None for any other."""
        try:
            if await self._bus.read_log(TURN_EVENT, TurnEvent, limit=1, turn_id=turn_id):
                return None
            info = await self._bus.request(GET_SESSION, GetSession(session_id=session_id, tenant=tenant), SessionInfo)
        except WireError as unknown:
            log.info("turn_not_looked_up", turn=turn_id, error=str(unknown))
            return None
        return _past_of(info, turn_id, after)

    async def cancel(self, turn_id: str, reason: str) -> None:
        """Tell all loops. A lost word costs tokens, no more: the turn's own deadline ends it."""
        try:
            await self._bus.publish(CANCEL_TURN, CancelTurn(turn_id=turn_id, reason=reason))
        except WireError as away:
            log.warning("cancel_not_sent", turn=turn_id, error=str(away))

    async def drain(self) -> None:
        """Take no more turns and wait until those in flight have ended."""
        self._is_draining = True
        await self._idle.wait()


def _past_of(info: SessionInfo, turn_id: str, after: Place) -> PastFeed | None:
    turn = ended_turn(info, turn_id)
    return None if turn is None else PastFeed(past_events(info, turn, after))


def _require_session(event: TurnEvent, session_id: str) -> None:
    if event.session_id != session_id:
        raise WireError(ErrorCode.NOT_FOUND, "no such turn in this session", field="turn_id")
