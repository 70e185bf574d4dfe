"""What a worker says on the bus, in order, by one task: tokens of a generation must not overtake each other."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, assert_never

from proto.errors import WireError
from proto.subjects import PULL, RESIDENCY, WORK_DONE
from shared.bus import Bus
from shared.log import get_logger
from shared.metrics import counter
from shared.worker.events import Say, SayDelta, SayDone, SayPull

# Messages that wait for the connection. The oldest go: loops and routers notice a hole and ask again.
MESSAGES_COUNT_MAX: Final = 16_384

DROPPED = counter("roost_worker_unsaid_total", "Messages that could not be said in time.")

Word = Say | SayDone | SayPull | SayDelta

log = get_logger()


class Outbox:
    """Owns the queue. `run` is its life."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._queue: deque[Word] = deque()
        self._filled = asyncio.Event()
        self._emptied = asyncio.Event()
        self._emptied.set()

    def add(self, word: Word) -> None:
        """Say it after all that was added before."""
        if len(self._queue) >= MESSAGES_COUNT_MAX:
            self._queue.popleft()
            DROPPED.inc()
        self._queue.append(word)
        self._emptied.clear()
        self._filled.set()

    async def emptied(self) -> None:
        """Wait until everything is said."""
        await self._emptied.wait()

    async def run(self) -> None:
        """Say what comes, for ever."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self._queue:
                word = self._queue.popleft()
                try:
                    await self._say(word)
                except WireError as away:
                    DROPPED.inc()
                    log.warning("not_said", what=type(word).__name__, error=str(away))
            self._emptied.set()

    async def _say(self, word: Word) -> None:
        match word:
            case Say():
                await self._bus.publish_to(word.address, word.event)
            case SayDone():
                await self._bus.publish(WORK_DONE, word.done)
            case SayPull():
                await self._bus.publish(PULL, word.pull)
            case SayDelta():
                await self._bus.publish(RESIDENCY, word.delta)
            case _:
                assert_never(word)
