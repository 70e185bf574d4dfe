"""JetStream work queues: items pulled when there is room, kept alive while worked on, acknowledged when done.

Only `shared/bus.py` uses it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, Generic, TypeVar

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import api
from pydantic import BaseModel

from proto.errors import WireError
from proto.message import decode
from proto.subjects import Subject
from shared.bus_streams import translated
from shared.limits import TURN_ACK_WAIT_S, TURN_DELIVERIES_MAX
from shared.log import get_logger
from shared.streams import stream_of

M = TypeVar("M", bound=BaseModel)

FETCH_S: Final = 15.0
# Waiting pulls a consumer may have: more loop replicas than anyone runs on one NATS.
WAITING_PULLS_MAX: Final = 512

log = get_logger()


class WorkItem:
    """One delivery of one work message. The handler may hand it back with `later`; else returning acknowledges it."""

    def __init__(self, message: Msg) -> None:
        self._message = message
        self.delivery: int = message.metadata.num_delivered or 1
        self.is_settled = False

    async def keep(self) -> None:
        """Say that the work goes on, so that nobody else gets it."""
        await self._message.in_progress()

    async def later(self, delay_s: float) -> None:
        """Hand it back; it is delivered again after the delay."""
        if not self.is_settled:
            self.is_settled = True
            await self._message.nak(delay=delay_s)

    async def done(self) -> None:
        """Remove it from the queue."""
        if not self.is_settled:
            self.is_settled = True
            await self._message.ack()

    async def drop(self) -> None:
        """Remove it as not workable."""
        if not self.is_settled:
            self.is_settled = True
            await self._message.term()


class WorkPuller(Generic[M]):
    """Pulls work from a queue, never more than `limit` items at once, and stops when told to."""

    def __init__(
        self,
        client: Client,
        subject: Subject,
        message_type: type[M],
        handler: Callable[[M, WorkItem], Awaitable[None]],
        limit: int,
    ) -> None:
        self._client, self._subject, self._type, self._handler = client, subject, message_type, handler
        self._room = asyncio.Semaphore(limit)
        self._stopped = asyncio.Event()
        self._pull: Any = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._running = 0

    async def open(self) -> None:
        """Make the consumer; all pullers of a subject share it."""
        stream = stream_of(self._subject).name
        config = api.ConsumerConfig(
            durable_name="workers",
            ack_policy=api.AckPolicy.EXPLICIT,
            ack_wait=TURN_ACK_WAIT_S,
            max_deliver=TURN_DELIVERIES_MAX,
            max_ack_pending=-1,
            max_waiting=WAITING_PULLS_MAX,
            filter_subject=self._subject.wildcard,
        )
        context = self._client.jetstream()
        self._pull = await translated(
            context.pull_subscribe(self._subject.wildcard, durable="workers", stream=stream, config=config), stream
        )

    async def run(self, spawn: Callable[[Any], None], reconnected: Callable[[], asyncio.Event]) -> None:
        """Until `stop`: take an item when there is room, and run the handler beside."""
        while not self._stopped.is_set():
            await self._room.acquire()
            message = await self._fetch(reconnected())
            if message is None:
                self._room.release()
                continue
            self._running += 1
            self._idle.clear()
            spawn(self._handle(message))
        # Without interest in its inbox the server forgets the pull that may still wait there.
        await self._pull.unsubscribe()

    async def _fetch(self, reconnected: asyncio.Event) -> Msg | None:
        """The next message, None if none came in time, the server went away, or `stop` was called."""
        fetch = asyncio.ensure_future(self._pull.fetch(1, timeout=FETCH_S))
        others = [asyncio.ensure_future(self._stopped.wait()), asyncio.ensure_future(reconnected.wait())]
        try:
            await asyncio.wait([fetch, *others], return_when=asyncio.FIRST_COMPLETED)
            if not fetch.done():
                return None
            messages: list[Msg] = fetch.result()
            return messages[0] if messages else None
        except (TimeoutError, nats.errors.TimeoutError):
            return None
        except (nats.errors.Error, nats.js.errors.APIError) as failed:
            log.warning("fetch_failed", subject=self._subject.name, error=repr(failed))
            await asyncio.sleep(0.5)
            return None
        finally:
            for task in (fetch, *others):
                task.cancel()

    async def _handle(self, message: Msg) -> None:
        item = WorkItem(message)
        keeper = asyncio.ensure_future(self._keep(item))
        try:
            try:
                work = decode(message.data, self._type)
            except WireError as invalid:
                log.error("invalid_work", subject=self._subject.name, error=str(invalid))
                await item.drop()
                return
            await self._handler(work, item)
            await item.done()
        except (TimeoutError, nats.errors.Error) as away:
            # Not acknowledged, so it is delivered again; handlers are idempotent.
            log.warning("work_not_settled", subject=self._subject.name, error=repr(away))
        finally:
            keeper.cancel()
            self._running -= 1
            self._room.release()
            if self._running == 0:
                self._idle.set()

    async def _keep(self, item: WorkItem) -> None:
        while True:
            await asyncio.sleep(TURN_ACK_WAIT_S / 3)
            if item.is_settled:
                return
            try:
                await item.keep()
            except nats.errors.Error as away:
                log.warning("work_not_kept", subject=self._subject.name, error=repr(away))

    async def stop(self) -> None:
        """Take nothing more."""
        self._stopped.set()

    async def idle(self) -> None:
        """Wait until no handler runs."""
        await self._idle.wait()
