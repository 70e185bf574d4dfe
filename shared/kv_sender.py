"""Puts to one shard: a bounded queue and the task that sends it, in order, over a connection of its own."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final

from proto import data_port
from shared.kv_channel import ChannelError, DataChannel
from shared.log import get_logger
from shared.metrics import counter

# A shard that takes nothing for this long is behind for good; what is queued for it is dropped.
SEND_S_MAX: Final = 10.0
RECONNECT_S: Final = 0.5
# Tries to reach the shard before the queue is dropped; a new life of it gets a new sender.
TRIES_MAX: Final = 3

PUTS_DROPPED = counter("roost_kv_puts_dropped_total", "Blocks that were not sent to the kvstore, by why.", ("reason",))
PUT_BYTES = counter("roost_kv_put_bytes_total", "Bytes of frames sent to the kvstore.")

log = get_logger()


class PutSender:
    """Owns the queue, the connection and the task. The task lives while there is something to send."""

    def __init__(
        self, host: str, port: int, *, bytes_max: int, spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    ) -> None:
        """`spawn` runs a task whose bug ends the process."""
        self._host, self._port, self._bytes_max, self._spawn = host, port, bytes_max, spawn
        self._queue: deque[list[bytes]] = deque()
        self._waiting_bytes = 0
        self._flushes: dict[int, asyncio.Future[bool]] = {}
        self._flush_number = 0
        self._task: asyncio.Task[None] | None = None
        self._channel: DataChannel | None = None
        self._listener: asyncio.Task[None] | None = None
        self._is_closed = False

    def put(self, frame: bytes) -> bool:
        """Queue a frame. False, and counted, when the queue is full."""
        if self._is_closed or self._waiting_bytes + len(frame) > self._bytes_max:
            PUTS_DROPPED.labels(reason="closed" if self._is_closed else "full").inc()
            return False
        self._waiting_bytes += len(frame)
        self._queue.append(data_port.put(frame))
        self._wake()
        return True

    async def flush(self, timeout_s: float) -> bool:
        """Whether all that was put before is settled at the shard within this time."""
        if not self._queue and self._channel is None:
            return True
        self._flush_number += 1
        number = self._flush_number
        answer = self._flushes[number] = asyncio.get_running_loop().create_future()
        self._queue.append(data_port.flush(number))
        self._wake()
        try:
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError:
            return False
        finally:
            self._flushes.pop(number, None)

    def close(self) -> None:
        """Drop what is queued and let go of the connection."""
        self._is_closed = True
        self._drop("closed")
        if self._task is not None:
            self._task.cancel()
        self._disconnect()

    def _wake(self) -> None:
        if self._task is None or self._task.done():
            self._task = self._spawn(self._send())

    async def _send(self) -> None:
        tries = 0
        while self._queue:
            try:
                if self._channel is None:
                    self._channel = await DataChannel.open(self._host, self._port)
                    self._listener = self._spawn(self._listen(self._channel))
                pieces = self._queue[0]
                await self._channel.send(pieces, SEND_S_MAX)
            except ChannelError as failed:
                tries += 1
                self._disconnect()
                log.warning("kv_put_failed", error=str(failed), tries=tries)
                if tries >= TRIES_MAX:
                    self._drop("unreachable")
                    return
                await asyncio.sleep(RECONNECT_S)
                continue
            tries = 0
            self._queue.popleft()
            if len(pieces) > 1 and pieces[0][-1] == data_port.Kind.PUT:
                self._waiting_bytes -= len(pieces[1])
                PUT_BYTES.inc(len(pieces[1]))

    async def _listen(self, channel: DataChannel) -> None:
        """Answers to flushes, until the connection ends. Everything that was sent over it and not flushed is unknown then."""
        try:
            while True:
                number = data_port.number_of(await channel.receive(3600.0))
                answer = self._flushes.get(number)
                if answer is not None and not answer.done():
                    answer.set_result(True)
        except (ChannelError, data_port.PacketError):
            if self._channel is channel:
                self._channel = None
            channel.close()
            self._fail_flushes()

    def _disconnect(self) -> None:
        if self._listener is not None:
            self._listener.cancel()
            self._listener = None
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._fail_flushes()

    def _drop(self, reason: str) -> None:
        dropped = sum(pieces[0][-1] == data_port.Kind.PUT for pieces in self._queue)
        if dropped:
            PUTS_DROPPED.labels(reason=reason).inc(dropped)
        self._queue.clear()
        self._waiting_bytes = 0
        self._fail_flushes()

    def _fail_flushes(self) -> None:
        for answer in self._flushes.values():
            if not answer.done():
                answer.set_result(False)
