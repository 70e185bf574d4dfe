"""Slots for calls: so many run, so many wait for so long, the rest is told to come later."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from proto.errors import ErrorCode, WireError


class Slots:
    """Numbers 0..count-1, each with one holder at a time."""

    def __init__(self, count: int, waiting_max: int, wait_s: float) -> None:
        self._free: asyncio.LifoQueue[int] = asyncio.LifoQueue()
        for number in reversed(range(count)):
            self._free.put_nowait(number)
        self._count, self._waiting_max, self._wait_s = count, waiting_max, wait_s
        self._waiting = 0

    @property
    def held(self) -> int:
        """How many are taken."""
        return self._count - self._free.qsize()

    @asynccontextmanager
    async def take(self) -> AsyncIterator[int]:
        """A slot for the block. Raises WireError OVERLOADED when none gets free in time."""
        number = await self._next()
        try:
            yield number
        finally:
            self._free.put_nowait(number)

    async def _next(self) -> int:
        if not self._free.empty():
            return self._free.get_nowait()
        if self._waiting >= self._waiting_max:
            raise WireError(ErrorCode.OVERLOADED, f"{self._waiting} tool calls wait already", retry_after_s=1.0)
        self._waiting += 1
        try:
            async with asyncio.timeout(self._wait_s):
                return await self._free.get()
        except TimeoutError as late:
            full = f"{self._count} tool calls run, none ended within {self._wait_s:g} s"
            raise WireError(ErrorCode.OVERLOADED, full, retry_after_s=1.0) from late
        finally:
            self._waiting -= 1
