"""Sealed blocks on their way from the engine to the kvstore's client: a bounded queue and the task that copies them out.

A block may be evicted before its turn comes; then the rest of its chain is of no use to the kvstore either.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from proto.errors import WireError
from shared.engine.thread import EngineThread
from shared.kv_client import KvClient
from shared.kv_sender import PUTS_DROPPED
from shared.worker.events import PutBlocks

# Bodies copied out between two steps: some tens of microseconds each, which running streams wait for.
EXPORTS_COUNT_MAX: Final = 16


class PutQueue:
    """Owns the queue. `run` is its life."""

    def __init__(self, thread: EngineThread, kv: KvClient, *, blocks_max: int) -> None:
        self._thread, self._kv, self._blocks_max = thread, kv, blocks_max
        # A future marks a place that somebody waits for.
        self._queue: deque[PutBlocks | asyncio.Future[None]] = deque()
        self._waiting_blocks = 0
        self._filled = asyncio.Event()

    def add(self, put: PutBlocks) -> None:
        """Write these when there is time. Dropped and counted when too many wait."""
        if self._waiting_blocks + len(put.blocks) > self._blocks_max:
            PUTS_DROPPED.labels(reason="worker behind").inc(len(put.blocks))
            return
        self._waiting_blocks += len(put.blocks)
        self._queue.append(put)
        self._filled.set()

    async def handed_over(self) -> None:
        """Wait until everything that was added before is with the client, or dropped."""
        if not self._waiting_blocks:
            return
        place = asyncio.get_running_loop().create_future()
        self._queue.append(place)
        await place

    async def run(self) -> None:
        """Copy and hand over, for ever."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self._queue:
                item = self._queue.popleft()
                if isinstance(item, PutBlocks):
                    await self._put(item)
                    self._waiting_blocks -= len(item.blocks)
                elif not item.done():
                    item.set_result(None)

    async def _put(self, put: PutBlocks) -> None:
        for first in range(0, len(put.blocks), EXPORTS_COUNT_MAX):
            part = put.blocks[first : first + EXPORTS_COUNT_MAX]
            try:
                bodies = await asyncio.gather(*(self._thread.export(block.key) for block in part))
            except WireError:
                PUTS_DROPPED.labels(reason="engine busy").inc(len(put.blocks) - first)
                return
            there = bodies.index(None) if None in bodies else len(bodies)
            pairs = [(block, body) for block, body in zip(part, bodies[:there], strict=False) if body is not None]
            is_taken = self._kv.put(put.namespace, put.first_key, pairs)
            if there < len(part):
                PUTS_DROPPED.labels(reason="evicted").inc(len(put.blocks) - first - there)
                return
            if not is_taken:
                return  # counted by the client, or there is no kvstore
