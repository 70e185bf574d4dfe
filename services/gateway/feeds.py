"""Does for one client what its TurnReader says: hears live events, reads the trail, waits. Shell of events.py.

hub     one subscription a turn, however many clients read it here
feed    one client: `next` gives it what is new, in order, each thing once
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from proto.errors import WireError
from proto.subjects import TURN_EVENT
from proto.turns import TurnEvent
from services.gateway.events import Deliver, Ended, ReadTrail, TurnReader, Wait
from shared.bus import Bus, LogEntry
from shared.clock import Clock
from shared.log import get_logger

log = get_logger()


class TurnFeed:
    """One client's way through one turn. `next` is called by one task at a time."""

    def __init__(self, bus: Bus, reader: TurnReader, clock: Clock) -> None:
        self._bus, self._reader, self._clock = bus, reader, clock
        self._wake = asyncio.Event()
        self._reading: asyncio.Task[list[LogEntry[TurnEvent]]] | None = None
        # Taken from the reader, not yet by the client.
        self._next: Iterator[TurnEvent] = iter(())
        self.is_over = False
        # The loop itself said the end, so nothing runs any more.
        self.is_ended_by_loop = False

    @property
    def turn_id(self) -> str:
        """Of the turn that is read."""
        return self._reader.turn_id

    def hear(self, event: TurnEvent) -> None:
        """A live event arrived."""
        self._reader.hear(event, self._clock.monotonic())
        self._wake.set()

    def disturbed(self) -> None:
        """The connection was lost and is back."""
        self._reader.disturbed(self._clock.monotonic())
        self._wake.set()

    async def next(self, until: float) -> TurnEvent | None:
        """The next event; None when there is none by `until` (monotonic), or when the turn `is_over`."""
        while True:
            event = next(self._next, None)
            if event is not None:
                return event
            self._wake.clear()
            self._take_trail()
            now = self._clock.monotonic()
            match self._reader.next(now):
                case Deliver(events):
                    self._next = iter(events)
                case Ended(by_loop):
                    self.is_over, self.is_ended_by_loop = True, by_loop
                    return None
                case ReadTrail(after, limit):
                    self._reading = asyncio.ensure_future(self._read(after, limit))
                case Wait(due):
                    if now >= until:
                        return None
                    await self._wait(min(due, until) - now)

    async def _read(self, after: int, limit: int) -> list[LogEntry[TurnEvent]]:
        try:
            return await self._bus.read_log(TURN_EVENT, TurnEvent, after=after, limit=limit, turn_id=self.turn_id)
        finally:
            self._wake.set()

    def _take_trail(self) -> None:
        reading = self._reading
        if reading is None or not reading.done():
            return
        self._reading = None
        now = self._clock.monotonic()
        try:
            entries = reading.result()
        except WireError as failed:
            log.info("trail_not_read", turn=self.turn_id, error=str(failed))
            self._reader.trail_failed(now)
            return
        self._reader.trail_read([(entry.sequence, entry.record) for entry in entries], now)

    async def _wait(self, seconds: float) -> None:
        waits = {asyncio.ensure_future(self._wake.wait())} | ({self._reading} if self._reading else set())
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits - {self._reading}:
                wait.cancel()

    def close(self) -> None:
        """Nobody reads any more."""
        if self._reading is not None:
            self._reading.cancel()


class FeedHub:
    """Owns the subscriptions. One of the bus's callbacks tells it of reconnects."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus, self._clock = bus, clock
        self._feeds: dict[str, list[TurnFeed]] = {}
        bus.on_reconnect(self._disturbed)

    async def join(self, reader: TurnReader) -> TurnFeed:
        """A feed that hears from now on; give it back with `leave`. Raises WireError UNAVAILABLE."""
        feed = TurnFeed(self._bus, reader, self._clock)
        feeds = self._feeds.setdefault(reader.turn_id, [])
        feeds.append(feed)
        is_heard = len(feeds) > 1
        try:
            if not is_heard:
                await self._bus.subscribe(TURN_EVENT, TurnEvent, self._hear, turn_id=reader.turn_id)
                is_heard = True
        finally:
            if not is_heard:
                await self.leave(feed)
        return feed

    async def leave(self, feed: TurnFeed) -> None:
        """The feed is not read any more."""
        feed.close()
        feeds = self._feeds[feed.turn_id]
        feeds.remove(feed)
        if not feeds:
            del self._feeds[feed.turn_id]
            await self._bus.unsubscribe(TURN_EVENT, turn_id=feed.turn_id)

    def _hear(self, event: TurnEvent) -> None:
        for feed in self._feeds.get(event.turn_id, ()):
            feed.hear(event)

    def _disturbed(self) -> None:
        for feeds in self._feeds.values():
            for feed in feeds:
                feed.disturbed()

    def check_integrity(self) -> None:
        """Assert that no turn is heard for nobody."""
        assert all(self._feeds.values())
