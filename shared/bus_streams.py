"""The JetStream half of the bus: streams, work queues, logs with optimistic concurrency, key-value buckets.

Only `shared/bus.py` uses it. Writes are acknowledged after the server's fsync (`sync_interval: always` in its config).
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, TypeVar

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import api
from nats.js.kv import KeyValue
from pydantic import BaseModel

from proto.errors import ErrorCode, WireError
from proto.message import decode
from proto.subjects import BUCKETS, Bucket, Subject
from shared.errors import SequenceConflict
from shared.limits import MIB, SESSION_RECORDS_MAX
from shared.log import get_logger
from shared.streams import STREAMS, Stream, stream_of

M = TypeVar("M", bound=BaseModel)

# The server's error codes (nats-server errors.json) that have a meaning to us.
WRONG_LAST_SEQUENCE: Final = 10071
STREAM_FULL: Final = frozenset({10047, 10077, 10122})
# Storage or memory that a stream reserves when it is made.
NO_ROOM: Final = frozenset({10028, 10047})

PUBLISH_TIMEOUT_S: Final = 5.0
# Silence that ends one try of a read; a try is lost when the connection dies under it, so there are several.
READ_TIMEOUT_S: Final = 2.0
READ_TRIES: Final = 3
READ_BATCH: Final = 1_024
READ_BATCH_BYTES: Final = 8 * 1024 * 1024
DUPLICATE_WINDOW_S: Final = 120.0
# How long a refusal to make a stream may be somebody else's making of the same one.
ROOM_WAIT_S: Final = 10.0
ROOM_RETRY_S: Final = 0.1

log = get_logger()


@dataclass(frozen=True, slots=True)
class LogEntry(Generic[M]):
    """A record and its sequence number in the stream."""

    sequence: int
    record: M


async def ensure(client: Client) -> None:
    """Create the streams and buckets that do not exist and bring the rest to today's bounds. Anyone may do it at any time.

    Raises WireError (OVERLOADED) naming the stream if the server has no room for it.
    """
    for stream in STREAMS:
        await _made(stream.name, stream.max_bytes, partial(_ensure_stream, client, stream))
    for bucket in BUCKETS:
        await _made(bucket.name, bucket.max_bytes, partial(open_bucket, client, bucket))


async def _made(name: str, reserves: int, make: Callable[[], Awaitable[object]]) -> None:
    """Make it, and once more if the server has no room: while another service makes the same one, its bytes count twice."""
    deadline = asyncio.get_running_loop().time() + ROOM_WAIT_S
    while True:
        try:
            await make()
            return
        except nats.js.errors.APIError as refused:
            if refused.err_code not in NO_ROOM:
                raise
            if asyncio.get_running_loop().time() >= deadline:
                raise WireError(
                    ErrorCode.OVERLOADED,
                    f"the NATS server has no room for {name} ({reserves / MIB:.0f} MiB): {refused.description}; raise its "
                    "jetstream max_file_store and max_memory_store",
                ) from refused
        await asyncio.sleep(ROOM_RETRY_S * random.uniform(0.5, 1.5))


async def _ensure_stream(client: Client, stream: Stream) -> None:
    manager, config = client.jsm(), _config_of(stream)
    try:
        # Asked first: adding a stream that exists reserves its bytes a second time and may not fit.
        known = (await manager.stream_info(stream.name)).config
    except nats.js.errors.NotFoundError:
        await manager.add_stream(config)
        return
    if (known.max_bytes, known.max_msgs, known.max_age) != (config.max_bytes, config.max_msgs, config.max_age):
        await manager.update_stream(config)


def _config_of(stream: Stream) -> api.StreamConfig:
    return api.StreamConfig(
        name=stream.name,
        subjects=[stream.subject.wildcard],
        retention=api.RetentionPolicy.WORK_QUEUE if stream.work else api.RetentionPolicy.LIMITS,
        storage=api.StorageType.MEMORY if stream.in_memory else api.StorageType.FILE,
        discard=api.DiscardPolicy.NEW if stream.refuses_when_full else api.DiscardPolicy.OLD,
        max_age=stream.max_age_s,
        max_bytes=stream.max_bytes,
        max_msgs=stream.max_messages,
        duplicate_window=DUPLICATE_WINDOW_S,
        allow_direct=True,
    )


async def open_bucket(client: Client, bucket: Bucket) -> KvBucket:
    """The bucket, created if need be."""
    context = client.jetstream()
    try:
        store = await context.key_value(bucket.name)
    except nats.js.errors.BucketNotFoundError:
        store = await context.create_key_value(
            config=api.KeyValueConfig(
                bucket=bucket.name,
                ttl=bucket.ttl_s or None,
                storage=api.StorageType.MEMORY if bucket.in_memory else api.StorageType.FILE,
                max_bytes=bucket.max_bytes,
                history=1,
            )
        )
    return KvBucket(store, bucket)


class KvBucket:
    """Bytes by key, with revisions. Keys are made of `[A-Za-z0-9_-]` parts joined by dots."""

    def __init__(self, store: KeyValue, bucket: Bucket) -> None:
        self._store = store
        self.bucket = bucket

    async def get(self, key: str) -> tuple[bytes, int] | None:
        """Value and revision, None if the key is not there."""
        try:
            entry = await translated(self._store.get(key), self.bucket.name)
        except nats.js.errors.KeyNotFoundError:
            return None
        return entry.value or b"", entry.revision or 0

    async def put(self, key: str, value: bytes) -> int:
        """Set it, whatever was there. Returns the revision."""
        return int(await translated(self._store.put(key, value), self.bucket.name))

    async def create(self, key: str, value: bytes) -> int | None:
        """Set it if it is not there. Returns the revision, None if it is."""
        try:
            return int(await translated(self._store.create(key, value), self.bucket.name))
        except nats.js.errors.KeyWrongLastSequenceError:
            return None

    async def update(self, key: str, value: bytes, revision: int) -> int | None:
        """Set it if `revision` is still its revision. Returns the new one, None if it is not."""
        try:
            return int(await translated(self._store.update(key, value, last=revision), self.bucket.name))
        except nats.js.errors.KeyWrongLastSequenceError:
            return None

    async def delete(self, key: str) -> None:
        """Remove it."""
        await translated(self._store.delete(key), self.bucket.name)


async def translated(call: Awaitable[Any], what: str) -> Any:
    """Run a JetStream call. An absent server or a time-out becomes UNAVAILABLE, full OVERLOADED; other API errors pass."""
    try:
        return await call
    except (TimeoutError, nats.errors.TimeoutError, nats.errors.NoRespondersError) as late:
        raise WireError(ErrorCode.UNAVAILABLE, f"JetStream did not answer for {what}", retry_after_s=1.0) from late
    except (nats.errors.ConnectionClosedError, nats.errors.OutboundBufferLimitError) as away:
        raise WireError(ErrorCode.UNAVAILABLE, "NATS is away", retry_after_s=1.0) from away
    except (nats.js.errors.ServiceUnavailableError, nats.js.errors.NoStreamResponseError) as down:
        # A full stream is answered with status 503 too.
        if isinstance(down, nats.js.errors.APIError) and down.err_code in STREAM_FULL:
            raise WireError(ErrorCode.OVERLOADED, f"{what} is full", retry_after_s=2.0) from down
        raise WireError(ErrorCode.UNAVAILABLE, f"JetStream is not available for {what}", retry_after_s=1.0) from down


async def enqueue(client: Client, subject: Subject, body: bytes, dedup_id: str) -> None:
    """See Bus.enqueue."""
    headers = {"Nats-Msg-Id": dedup_id}
    publish = client.jetstream().publish(
        subject.at(), body, timeout=PUBLISH_TIMEOUT_S, stream=stream_of(subject).name, headers=headers
    )
    try:
        await translated(publish, subject.name)
    except nats.js.errors.APIError as refused:
        raise _refusal(refused, subject) from refused


async def append(client: Client, subject: Subject, address: str, body: bytes, expected: int | None) -> int:
    """See Bus.append."""
    headers = {} if expected is None else {"Nats-Expected-Last-Subject-Sequence": str(expected)}
    publish = client.jetstream().publish(
        address, body, timeout=PUBLISH_TIMEOUT_S, stream=stream_of(subject).name, headers=headers
    )
    try:
        acknowledged = await translated(publish, subject.name)
    except nats.js.errors.APIError as refused:
        if refused.err_code == WRONG_LAST_SEQUENCE and expected is not None:
            raise SequenceConflict(address, expected) from refused
        raise _refusal(refused, subject) from refused
    return int(acknowledged.seq)


def _refusal(refused: nats.js.errors.APIError, subject: Subject) -> WireError:
    if refused.err_code in STREAM_FULL:
        return WireError(ErrorCode.OVERLOADED, f"the queue of {subject.name} is full", retry_after_s=2.0)
    return WireError(
        ErrorCode.UNAVAILABLE, f"JetStream refused {subject.name}: {refused.description}", retry_after_s=1.0
    )


async def read(
    client: Client, subject: Subject, address: str, message_type: type[M], after: int, limit: int | None
) -> list[LogEntry[M]]:
    """See Bus.read_log. Batched direct gets: no consumer is made, so reading costs the server nothing that stays."""
    entries: list[LogEntry[M]] = []
    bound = SESSION_RECORDS_MAX if limit is None else min(limit, SESSION_RECORDS_MAX)
    while len(entries) < bound:
        start = (entries[-1].sequence if entries else after) + 1
        count = min(READ_BATCH, bound - len(entries))
        batch, pending = await _read_batch_again(client, subject, address, start, count)
        entries.extend(LogEntry(sequence, decode(data, message_type)) for sequence, data in batch)
        if not batch or pending == 0:
            break
    return entries


async def _read_batch_again(
    client: Client, subject: Subject, address: str, start: int, count: int
) -> tuple[list[tuple[int, bytes]], int]:
    for tries_left in reversed(range(READ_TRIES)):
        try:
            return await _read_batch(client, subject, address, start, count)
        except WireError:
            if tries_left == 0:
                raise
    raise AssertionError("not reached")


async def _read_batch(
    client: Client, subject: Subject, address: str, start: int, count: int
) -> tuple[list[tuple[int, bytes]], int]:
    """Up to `count` messages from sequence `start`, and how many follow them."""
    request = {"seq": start, "next_by_subj": address, "batch": count, "max_bytes": READ_BATCH_BYTES}
    inbox = client.new_inbox()
    subscription = await client.subscribe(inbox)
    try:
        await client.publish(f"$JS.API.DIRECT.GET.{stream_of(subject).name}", json.dumps(request).encode(), reply=inbox)
        batch: list[tuple[int, bytes]] = []
        pending = 0
        while True:
            message = await subscription.next_msg(timeout=READ_TIMEOUT_S)
            headers = message.headers or {}
            status = headers.get("Status")
            if status == "404":
                return batch, 0
            if status == "204":
                return batch, int(headers.get("Nats-Num-Pending", pending))
            if status is not None:
                raise WireError(ErrorCode.UNAVAILABLE, f"JetStream: {status} {headers.get('Description', '')}")
            batch.append((int(headers["Nats-Sequence"]), message.data))
    except (TimeoutError, nats.errors.TimeoutError, nats.errors.NoRespondersError) as late:
        raise WireError(ErrorCode.UNAVAILABLE, f"JetStream did not answer for {address}", retry_after_s=1.0) from late
    except (nats.errors.ConnectionClosedError, nats.errors.OutboundBufferLimitError) as away:
        raise WireError(ErrorCode.UNAVAILABLE, "NATS is away", retry_after_s=1.0) from away
    finally:
        await _dropped(subscription)


async def _dropped(subscription: Subscription) -> None:
    try:
        await subscription.unsubscribe()
    except (nats.errors.BadSubscriptionError, nats.errors.ConnectionClosedError):
        # The connection took it along.
        return


async def follow(
    client: Client, subject: Subject, message_type: type[M], after: int, reconnected: Callable[[], asyncio.Event]
) -> AsyncIterator[LogEntry[M]]:
    """See Bus.follow_log. A core subscription says that something is new; the reads are ordered and complete."""
    wake = asyncio.Event()

    async def heard(_: Msg) -> None:
        wake.set()

    subscription = await client.subscribe(subject.wildcard, cb=heard)
    try:
        await client.flush()
        while True:
            wake.clear()
            again = reconnected()
            try:
                for entry in await read(client, subject, subject.wildcard, message_type, after, None):
                    after = entry.sequence
                    yield entry
            except WireError as away:
                log.warning("log_not_read", subject=subject.name, error=str(away))
                await asyncio.sleep(1.0)
                continue
            await _first_of(wake.wait(), again.wait())
    finally:
        await _dropped(subscription)


async def _first_of(*waits: Any) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
