"""The bus: the only user of nats-py. Typed messages in and out, validated once, everything bounded.

    publish / subscribe     fire and forget; the subscriber's handler is a plain function that must only take the message in
    request / serve         one answer or a WireError; handlers run as tasks, at most `HANDLERS_COUNT_MAX` of them
    enqueue / work          JetStream work queue; a message is acknowledged when its handler returns
    append / read_log       JetStream log per subject with optimistic concurrency
    trail / read_trail      published like an event and kept in memory for a while
    bucket                  JetStream key-value

The connection is made again for ever. A subscription is flushed before `subscribe` and `serve` return, so whoever is told
of it afterwards can already be heard. A handler's own bug is reported through `on_fatal` and ends the process.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from typing import Any, Final, TypeVar

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from pydantic import BaseModel

from proto.errors import ErrorCode, ErrorReply, WireError
from proto.message import decode, encode
from proto.subjects import HEADER_ERROR, Bucket, Subject
from shared import bus_streams
from shared.bus_streams import KvBucket, LogEntry
from shared.bus_work import WorkItem, WorkPuller
from shared.errors import SequenceConflict
from shared.limits import (
    BODY_BYTES_MAX,
    HANDLERS_COUNT_MAX,
    REQUEST_TIMEOUT_S,
    SUBSCRIPTION_BYTES_MAX,
    SUBSCRIPTION_MESSAGES_MAX,
)
from shared.log import get_logger
from shared.metrics import BUS_DROPPED, BUS_RECONNECTS, BUS_SLOW
from shared.settings import RoostSettings

M = TypeVar("M", bound=BaseModel)
R = TypeVar("R", bound=BaseModel)

RECONNECT_WAIT_S: Final = 0.2
# Publishes that may wait for a reconnect, in bytes; beyond it publishing is refused as unavailable.
RECONNECT_BUFFER_BYTES: Final = 8 * 1024 * 1024
PING_EVERY_S: Final = 10

log = get_logger()


class Bus:
    """One connection to NATS, owned by one service and one event loop."""

    def __init__(self, client: Client, on_fatal: Callable[[BaseException], None]) -> None:
        self._client = client
        self._on_fatal = on_fatal
        self._tasks: set[asyncio.Task[None]] = set()
        self._subscriptions: dict[str, list[Subscription]] = {}
        # Set and replaced at each reconnect, so that long polls know to ask again.
        self.reconnected = asyncio.Event()
        self._on_reconnect: list[Callable[[], None]] = []

    @classmethod
    async def connect(
        cls, settings: RoostSettings, name: str, on_fatal: Callable[[BaseException], None] = lambda _: None
    ) -> Bus:
        """Connect, waiting for the server as long as it takes, and make sure that streams and buckets exist."""
        client = Client()
        bus = cls(client, on_fatal)
        password = settings.nats_password.get_secret_value() if settings.nats_password else None
        wait_s = RECONNECT_WAIT_S
        while True:
            try:
                await client.connect(
                    servers=[settings.nats_url],
                    name=name,
                    user=settings.nats_user,
                    password=password,
                    allow_reconnect=True,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type]  # typed int, used as seconds
                    ping_interval=PING_EVERY_S,
                    max_outstanding_pings=2,
                    pending_size=RECONNECT_BUFFER_BYTES,
                    error_cb=bus._heard_error,
                    disconnected_cb=bus._heard_disconnect,
                    reconnected_cb=bus._heard_reconnect,
                )
                break
            except (TimeoutError, OSError, nats.errors.Error) as failed:
                log.warning("nats_not_reached", url=settings.nats_url, error=str(failed), retry_in_s=round(wait_s, 2))
                await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
                wait_s = min(wait_s * 1.5, 3.0)
                client = bus._client = Client()
        async with AsyncExitStack() as undo:
            undo.push_async_callback(bus._client.close)
            await bus_streams.ensure(bus._client)
            undo.pop_all()
        return bus

    @property
    def is_connected(self) -> bool:
        """Whether the server is there at this moment."""
        return bool(self._client.is_connected)

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Be called each time the connection was made again. The callback must not block."""
        self._on_reconnect.append(callback)

    # -- publish and subscribe

    async def publish(self, subject: Subject, message: BaseModel, **parts: str) -> None:
        """Say it to whoever listens. Raises WireError TOO_LARGE, or UNAVAILABLE when the reconnect buffer is full."""
        assert isinstance(message, subject.message), (subject.name, type(message))
        await self._send(subject.at(**parts), encode(message))

    async def publish_to(self, address: str, message: BaseModel) -> None:
        """Say it on an address that came with a request (a reply subject)."""
        await self._send(address, encode(message))

    async def _send(self, address: str, body: bytes, reply: str = "", headers: dict[str, str] | None = None) -> None:
        self._check_size(address, body)
        try:
            await self._client.publish(address, body, reply=reply, headers=headers)
        except nats.errors.OutboundBufferLimitError as full:
            raise WireError(ErrorCode.UNAVAILABLE, "NATS is away and the send buffer is full") from full
        except nats.errors.ConnectionClosedError as closed:
            raise WireError(ErrorCode.UNAVAILABLE, "the connection to NATS is closed") from closed

    async def subscribe(
        self, subject: Subject, message_type: type[M], handler: Callable[[M], None], **parts: str
    ) -> None:
        """Hear every message. `handler` is called in order and must return at once."""
        assert message_type is subject.message
        address = subject.at(**parts) if parts else subject.wildcard
        await self.subscribe_to(address, message_type, handler)

    async def subscribe_to(self, address: str, message_type: type[M], handler: Callable[[M], None]) -> None:
        """Hear an exact address, such as a reply subject made here."""

        async def take(message: Msg) -> None:
            try:
                taken = decode(message.data, message_type)
            except WireError as invalid:
                BUS_DROPPED.labels(subject=message_type.__name__).inc()
                log.warning("invalid_message", subject=message.subject, error=str(invalid))
                return
            self._guarded(handler, taken)

        await self._subscribe(address, take, queue="")

    def _guarded(self, handler: Callable[[M], None], message: M) -> None:
        try:
            handler(message)
        except Exception as bug:  # noqa: BLE001 - nats-py would swallow it; our bugs must end the process
            self._on_fatal(bug)

    async def _subscribe(self, address: str, callback: Callable[[Msg], Awaitable[None]], queue: str) -> None:
        subscription = await self._client.subscribe(
            address,
            queue=queue,
            cb=callback,
            pending_msgs_limit=SUBSCRIPTION_MESSAGES_MAX,
            pending_bytes_limit=SUBSCRIPTION_BYTES_MAX,
        )
        self._subscriptions.setdefault(address, []).append(subscription)
        # The server has it before anyone is told of it.
        await self.flush()

    async def unsubscribe(self, subject: Subject, **parts: str) -> None:
        """Stop hearing (or serving) it here."""
        for subscription in self._subscriptions.pop(subject.at(**parts) if parts else subject.wildcard, []):
            with suppress(nats.errors.BadSubscriptionError, nats.errors.ConnectionClosedError):
                await subscription.unsubscribe()

    async def flush(self) -> None:
        """Everything said so far has reached the server."""
        try:
            await self._client.flush(timeout=int(REQUEST_TIMEOUT_S))
        except (nats.errors.TimeoutError, nats.errors.ConnectionClosedError, nats.errors.FlushTimeoutError) as failed:
            raise WireError(ErrorCode.UNAVAILABLE, f"NATS does not answer: {failed!r}") from failed

    # -- request and serve

    async def request(
        self,
        subject: Subject,
        message: BaseModel,
        reply_type: type[R],
        *,
        timeout_s: float = REQUEST_TIMEOUT_S,
        **parts: str,
    ) -> R:
        """Ask one server. Raises WireError: theirs as sent, UNAVAILABLE if nobody serves, DEADLINE if no answer came."""
        assert isinstance(message, subject.message) and reply_type is subject.reply, subject.name
        address = subject.at(**parts)
        body = encode(message)
        self._check_size(address, body)
        try:
            answer = await self._client.request(address, body, timeout=timeout_s)
        except nats.errors.NoRespondersError as nobody:
            raise WireError(
                ErrorCode.UNAVAILABLE, f"nobody serves {address} at the moment", retry_after_s=1.0
            ) from nobody
        except (TimeoutError, nats.errors.TimeoutError) as late:
            raise WireError(ErrorCode.DEADLINE, f"no answer from {address} within {timeout_s:g} s") from late
        except (nats.errors.ConnectionClosedError, nats.errors.OutboundBufferLimitError) as away:
            raise WireError(ErrorCode.UNAVAILABLE, "NATS is away") from away
        if answer.headers and HEADER_ERROR in answer.headers:
            raise WireError.from_reply(decode(answer.data, ErrorReply))
        return decode(answer.data, reply_type)

    async def serve(
        self,
        subject: Subject,
        message_type: type[M],
        handler: Callable[[M], Awaitable[BaseModel]],
        *,
        limit: int = HANDLERS_COUNT_MAX,
        **parts: str,
    ) -> None:
        """Answer requests as one member of the subject's queue group. Beyond `limit` at once: OVERLOADED."""
        assert message_type is subject.message and subject.reply is not None
        running = 0

        async def answer(message: Msg) -> None:
            nonlocal running
            try:
                reply: BaseModel = await handler(decode(message.data, message_type))
                assert isinstance(reply, subject.reply or BaseModel), (subject.name, type(reply))
            except WireError as refused:
                reply = refused.reply
            finally:
                running -= 1
            await self._answer(message, reply)

        async def take(message: Msg) -> None:
            nonlocal running
            if running >= limit:
                full = ErrorReply(
                    code=ErrorCode.OVERLOADED, message=f"{limit} requests are being handled", retry_after_s=1.0
                )
                await self._answer(message, full)
                return
            running += 1
            self.spawn(answer(message))

        address = subject.at(**parts) if parts else subject.wildcard
        await self._subscribe(address, take, queue="q")

    async def _answer(self, message: Msg, reply: BaseModel) -> None:
        if not message.reply:
            return
        headers = {HEADER_ERROR: reply.code.value} if isinstance(reply, ErrorReply) else None
        try:
            await self._send(message.reply, encode(reply), headers=headers)
        except WireError as failed:
            log.warning("answer_not_sent", subject=message.subject, error=str(failed))

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine beside; if it raises, that is fatal."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (bug := task.exception()) is not None:
            self._on_fatal(bug)

    # -- JetStream

    async def enqueue(self, subject: Subject, message: BaseModel, *, dedup_id: str) -> None:
        """Put work into its queue, on disk when this returns. A full queue is OVERLOADED; a repeated id changes nothing."""
        assert isinstance(message, subject.message)
        await bus_streams.enqueue(self._client, subject, self._sized(subject.at(), message), dedup_id)

    async def work(
        self, subject: Subject, message_type: type[M], handler: Callable[[M, WorkItem], Awaitable[None]], *, limit: int
    ) -> WorkPuller[M]:
        """Take work, at most `limit` at once. An item is kept alive while its handler runs and acknowledged when it returns."""
        assert message_type is subject.message
        puller = WorkPuller(self._client, subject, message_type, handler, limit)
        await puller.open()
        self.spawn(puller.run(self._spawned, lambda: self.reconnected))
        return puller

    def _spawned(self, work: Any) -> None:
        self.spawn(work)

    async def append(self, subject: Subject, record: BaseModel, *, expected: int, **parts: str) -> int:
        """Append to a log after sequence number `expected` (0: the first). Returns the new number; SequenceConflict if lost."""
        assert isinstance(record, subject.message)
        address = subject.at(**parts)
        return await bus_streams.append(self._client, subject, address, self._sized(address, record), expected)

    async def append_any(self, subject: Subject, record: BaseModel) -> int:
        """Append to a log that has many writers and no order between them."""
        address = subject.at()
        return await bus_streams.append(self._client, subject, address, self._sized(address, record), None)

    async def read_log(
        self, subject: Subject, message_type: type[M], *, after: int = 0, limit: int | None = None, **parts: str
    ) -> list[LogEntry[M]]:
        """Records of one subject after sequence number `after`, oldest first."""
        assert message_type is subject.message
        return await bus_streams.read(self._client, subject, subject.at(**parts), message_type, after, limit)

    def follow_log(self, subject: Subject, message_type: type[M], *, after: int = 0) -> AsyncIterator[LogEntry[M]]:
        """Records after `after`, and then each new one as it comes, for ever, over reconnects."""
        assert message_type is subject.message
        return bus_streams.follow(self._client, subject, message_type, after, lambda: self.reconnected)

    async def bucket(self, bucket: Bucket) -> KvBucket:
        """A key-value bucket."""
        return await bus_streams.open_bucket(self._client, bucket)

    # -- the rest

    def _sized(self, address: str, message: BaseModel) -> bytes:
        body = encode(message)
        self._check_size(address, body)
        return body

    def _check_size(self, address: str, body: bytes) -> None:
        limit = min(BODY_BYTES_MAX, self._client.max_payload)
        if len(body) > limit:
            raise WireError(
                ErrorCode.TOO_LARGE, f"{len(body)} bytes for {address}; a message may have {limit}", field="body"
            )

    async def _heard_error(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            BUS_SLOW.inc()
            log.error("slow_consumer", subject=error.subject)
            return
        log.warning("nats_error", error=repr(error))

    async def _heard_disconnect(self) -> None:
        log.warning("nats_disconnected")

    async def _heard_reconnect(self) -> None:
        BUS_RECONNECTS.inc()
        log.info("nats_reconnected")
        # The server may have come back with an empty memory: streams and buckets in memory are gone then.
        self.spawn(self._restore())

    async def _restore(self) -> None:
        try:
            await bus_streams.ensure(self._client)
        except (TimeoutError, WireError, nats.errors.Error) as failed:
            log.warning("streams_not_restored", error=str(failed))
        event, self.reconnected = self.reconnected, asyncio.Event()
        event.set()
        for callback in self._on_reconnect:
            callback()

    async def close(self) -> None:
        """Say what is still to be said, then close. Bounded; never raises for an absent server."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.is_connected:
            with suppress(WireError):
                await self.flush()
        with suppress(nats.errors.Error, asyncio.TimeoutError, OSError):
            await self._client.close()


__all__ = ["Bus", "KvBucket", "LogEntry", "SequenceConflict", "WorkItem"]
