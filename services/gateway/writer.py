"""Writes server-sent events to one client, and never waits for it longer than its time. A slow one delays nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Final

from aiohttp import web

from services.gateway import sse
from shared.errors import RoostError

# Bytes that may wait in the socket's buffer before writing waits for the client.
BUFFER_BYTES: Final = 64 * 1024


class ClientGone(RoostError):
    """The client closed the connection, or takes nothing."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the client is gone: {why}")
        self.why = why


class SseWriter:
    """One response. `open` must come first."""

    def __init__(self, request: web.Request, headers: dict[str, str], stall_s: float) -> None:
        self._request, self._stall_s = request, stall_s
        self.response = web.StreamResponse(headers=sse.HEADERS | headers)

    async def open(self) -> None:
        """Send the headers."""
        await self._within(self.response.prepare(self._request))
        if self._request.transport is not None:
            self._request.transport.set_write_buffer_limits(high=BUFFER_BYTES)

    async def write(self, data: bytes) -> None:
        """Write and wait until there is room for more. Raises ClientGone."""
        if data:
            await self._within(self.response.write(data))

    async def close(self) -> None:
        """The orderly end."""
        await self._within(self.response.write_eof())

    async def _within(self, work: Awaitable[object]) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await work
        except TimeoutError as stalled:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ClientGone("stalled") from stalled
        except ConnectionError as closed:
            raise ClientGone("disconnected") from closed
