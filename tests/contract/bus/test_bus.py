"""The bus against a real nats-server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from proto.errors import ErrorCode, WireError
from proto.fleet import FleetPing
from proto.message import Message
from proto.retrieval import Passages, Search
from proto.sessions import Record, SessionOpened
from proto.subjects import (
    DIGESTS,
    FLEET_PING,
    LIST_TOOLS,
    SEARCH,
    SESSION_LOG,
    START_TURN,
    TURN_EVENT,
)
from proto.tools import ListTools, ToolList
from proto.turns import StartTurn, TurnEvent, TurnStarted
from shared import bus_streams
from shared.bus import Bus, LogEntry, WorkItem
from shared.errors import SequenceConflict
from shared.settings import RoostSettings
from tests.nats_server import NatsServer


def opened(session: str, system: str = "") -> Record:
    return Record(body=SessionOpened(session_id=session, tenant="t", model="m", created_at=0.0, system=system))


def turn(turn_id: str) -> StartTurn:
    return StartTurn(
        turn_id=turn_id,
        session_id="s1",
        request_id="r1",
        tenant="t",
        model="m",
        messages=({"role": "user", "content": "hi"},),  # type: ignore[arg-type]
        deadline_at=1.0,
        started_at=0.0,
    )


async def eventually(condition: object, within_s: float = 5.0) -> None:
    deadline = asyncio.get_running_loop().time() + within_s
    while not condition():  # type: ignore[operator]
        assert asyncio.get_running_loop().time() < deadline, "did not happen in time"
        await asyncio.sleep(0.01)


async def test_publish_reaches_every_subscriber_in_order(bus: Bus) -> None:
    """A heartbeat listener hears what is said after it subscribed, without a pause in between."""
    heard: list[str] = []
    await bus.subscribe(FLEET_PING, FleetPing, lambda ping: heard.append(ping.asked_by))
    for number in range(50):
        await bus.publish(FLEET_PING, FleetPing(asked_by=str(number)))
    await eventually(lambda: len(heard) == 50)
    assert heard == [str(number) for number in range(50)]


async def test_request_gets_the_answer_or_the_servers_typed_error(bus: Bus) -> None:
    """A handler's WireError arrives at the caller with code and field, not as a time-out."""

    async def search(question: Search) -> Passages:
        if question.query == "bad":
            raise WireError(ErrorCode.BAD_REQUEST, "no such thing", field="query")
        return Passages(passages=(), document_count=7)

    await bus.serve(SEARCH, Search, search)
    assert (await bus.request(SEARCH, Search(tenant="t", query="good"), Passages)).document_count == 7
    with pytest.raises(WireError) as refused:
        await bus.request(SEARCH, Search(tenant="t", query="bad"), Passages)
    assert (refused.value.code, refused.value.reply.field) == (ErrorCode.BAD_REQUEST, "query")


async def test_request_to_nobody_says_so_at_once(bus: Bus) -> None:
    """No tools service runs: the loop learns it in milliseconds and can decide."""
    with pytest.raises(WireError) as nobody:
        await bus.request(LIST_TOOLS, ListTools(), ToolList)
    assert nobody.value.code is ErrorCode.UNAVAILABLE


async def test_a_slow_handler_does_not_block_others_and_full_is_a_refusal(bus: Bus) -> None:
    """F-NAT-02: one request hangs; others on the same subject are still answered, up to the bound."""
    release = asyncio.Event()

    async def search(question: Search) -> Passages:
        if question.query == "slow":
            await release.wait()
        return Passages(passages=(), document_count=1)

    await bus.serve(SEARCH, Search, search, limit=2)
    slow = [asyncio.ensure_future(bus.request(SEARCH, Search(tenant="t", query="slow"), Passages)) for _ in range(1)]
    await asyncio.sleep(0)
    assert (await bus.request(SEARCH, Search(tenant="t", query="fast"), Passages)).document_count == 1
    slow.append(asyncio.ensure_future(bus.request(SEARCH, Search(tenant="t", query="slow"), Passages)))
    await asyncio.sleep(0.05)
    with pytest.raises(WireError) as full:
        await bus.request(SEARCH, Search(tenant="t", query="fast"), Passages)
    assert full.value.code is ErrorCode.OVERLOADED
    release.set()
    assert all([(await one).document_count == 1 for one in slow])


async def test_too_large_a_message_is_refused_before_it_is_sent(bus: Bus) -> None:
    """F-NAT-01: an oversize body is the caller's typed error; the connection and other requests live on."""

    async def search(_: Search) -> Passages:
        return Passages(passages=(), document_count=1)

    await bus.serve(SEARCH, Search, search)
    with pytest.raises(WireError) as large:
        await bus.request(SEARCH, Search(tenant="t", query="x" * 9_000_000), Passages)
    assert large.value.code is ErrorCode.TOO_LARGE and "9000" in str(large.value)
    assert (await bus.request(SEARCH, Search(tenant="t", query="y"), Passages)).document_count == 1


async def test_invalid_bytes_are_dropped_counted_and_disturb_nobody(bus: Bus) -> None:
    """Someone publishes garbage on a subject of ours: the next good message is heard."""
    heard: list[str] = []
    await bus.subscribe(FLEET_PING, FleetPing, lambda ping: heard.append(ping.asked_by))
    await bus._client.publish(FLEET_PING.at(), b"\x00\xff garbage")
    await bus.publish(FLEET_PING, FleetPing(asked_by="me"))
    await eventually(lambda: heard == ["me"])


async def test_append_is_ordered_by_optimistic_concurrency(bus: Bus) -> None:
    """Two loops write the same session: the one that saw an older record loses and changes nothing."""
    first = await bus.append(SESSION_LOG, opened("s1", "a"), expected=0, session_id="s1")
    second = await bus.append(SESSION_LOG, opened("s1", "b"), expected=first, session_id="s1")
    await bus.append(SESSION_LOG, opened("s2", "other"), expected=0, session_id="s2")
    with pytest.raises(SequenceConflict):
        await bus.append(SESSION_LOG, opened("s1", "late"), expected=first, session_id="s1")
    with pytest.raises(SequenceConflict):
        await bus.append(SESSION_LOG, opened("s1", "again"), expected=0, session_id="s1")
    entries = await bus.read_log(SESSION_LOG, Record, session_id="s1")
    assert [(entry.sequence, entry.record.body.system) for entry in entries] == [(first, "a"), (second, "b")]  # type: ignore[union-attr]
    assert await bus.read_log(SESSION_LOG, Record, after=second, session_id="s1") == []
    assert await bus.read_log(SESSION_LOG, Record, session_id="nobody") == []


async def test_a_long_log_is_read_in_batches(bus: Bus) -> None:
    """A session of 3,000 records comes back whole and in order."""
    expected = 0
    for number in range(3_000):
        expected = await bus.append(SESSION_LOG, opened("s1", str(number)), expected=expected, session_id="s1")
    entries = await bus.read_log(SESSION_LOG, Record, session_id="s1")
    assert [entry.record.body.system for entry in entries] == [str(number) for number in range(3_000)]  # type: ignore[union-attr]


async def test_work_is_done_once_kept_while_running_and_given_back_on_request(bus: Bus) -> None:
    """F-NAT-04: a repeated id is one piece of work; `later` brings it back; done removes it."""
    seen: list[tuple[str, int]] = []

    async def handle(work: StartTurn, item: WorkItem) -> None:
        seen.append((work.turn_id, item.delivery))
        if work.turn_id == "t2" and item.delivery == 1:
            await item.later(0.05)

    puller = await bus.work(START_TURN, StartTurn, handle, limit=4)
    await bus.enqueue(START_TURN, turn("t1"), dedup_id="t1")
    await bus.enqueue(START_TURN, turn("t1"), dedup_id="t1")
    await bus.enqueue(START_TURN, turn("t2"), dedup_id="t2")
    await eventually(lambda: len(seen) >= 3)
    await puller.stop()
    await puller.idle()
    assert sorted(seen) == [("t1", 1), ("t2", 1), ("t2", 2)]


async def test_work_of_a_dead_worker_is_given_to_another(nats_server: NatsServer, bus: Bus) -> None:
    """kill -9 of a loop: the turn it had comes to another loop after the acknowledgement window."""
    taken = asyncio.Event()

    async def hang(_: StartTurn, __: WorkItem) -> None:
        taken.set()
        await asyncio.Event().wait()

    first = await Bus.connect(RoostSettings(nats_url=nats_server.url), "first")
    await first.work(START_TURN, StartTurn, hang, limit=1)
    await bus.enqueue(START_TURN, turn("t1"), dedup_id="t1")
    await taken.wait()
    await first.close()
    seen: list[int] = []

    async def handle(_: StartTurn, item: WorkItem) -> None:
        seen.append(item.delivery)

    await bus.work(START_TURN, StartTurn, handle, limit=1)
    await eventually(lambda: seen == [2], within_s=10.0)


async def test_a_trail_can_be_read_back(bus: Bus) -> None:
    """A client reconnects to another gateway: the turn's events so far are there, in order."""
    for offset in range(5):
        event = TurnEvent(
            turn_id="t1", session_id="s1", step=0, offset=offset, part=0, body=TurnStarted(model="m", prompt_tokens=1)
        )
        await bus.publish(TURN_EVENT, event, turn_id="t1")
    # The server stores a moment after it has taken the publish, so a reader of a trail looks again at a gap.
    entries: list[LogEntry[TurnEvent]] = []
    for _ in range(200):
        entries = await bus.read_log(TURN_EVENT, TurnEvent, turn_id="t1")
        if len(entries) == 5:
            break
        await asyncio.sleep(0.01)
    assert [entry.record.offset for entry in entries] == list(range(5))


async def test_bucket_create_and_update_are_compare_and_set(bus: Bus) -> None:
    """Two tools services claim one call: one of them gets it."""
    bucket = await bus.bucket(DIGESTS)
    revision = await bucket.create("a.b", b"1")
    assert revision is not None
    assert await bucket.create("a.b", b"2") is None
    assert await bucket.update("a.b", b"3", revision + 17) is None
    second = await bucket.update("a.b", b"3", revision)
    assert second is not None and await bucket.get("a.b") == (b"3", second)
    await bucket.delete("a.b")
    assert await bucket.get("a.b") is None


async def test_everything_survives_a_broker_that_is_killed(nats_server: NatsServer, bus: Bus) -> None:
    """kill -9 of NATS: acknowledged records are there after the restart, subscriptions and work pulls go on."""
    heard: list[str] = []
    seen: list[str] = []

    async def handle(work: StartTurn, _: WorkItem) -> None:
        seen.append(work.turn_id)

    await bus.subscribe(FLEET_PING, FleetPing, lambda ping: heard.append(ping.asked_by))
    await bus.work(START_TURN, StartTurn, handle, limit=1)
    sequence = await bus.append(SESSION_LOG, opened("s1", "kept"), expected=0, session_id="s1")
    nats_server.kill()
    nats_server.start()
    await eventually(lambda: bus.is_connected, within_s=10.0)
    entries = await bus.read_log(SESSION_LOG, Record, session_id="s1")
    assert [entry.sequence for entry in entries] == [sequence]
    await bus.publish(FLEET_PING, FleetPing(asked_by="after"))
    await eventually(lambda: heard == ["after"])
    await bus.enqueue(START_TURN, turn("t9"), dedup_id="t9")
    await eventually(lambda: seen == ["t9"], within_s=10.0)


def test_every_message_type_is_ours() -> None:
    """The subject table names message classes only, so that nothing untyped crosses the wire."""
    assert issubclass(StartTurn, Message)


async def test_services_that_start_at_once_on_a_fresh_server_all_come_up(tmp_path: Path) -> None:
    """While one makes a stream the server reserves its bytes for each other one that asks: they do not fit side by side."""
    for number in range(6):
        server = NatsServer(tmp_path / str(number))
        server.start()
        try:
            settings = RoostSettings(nats_url=server.url)
            connected = await asyncio.gather(*(Bus.connect(settings, f"b{each}") for each in range(12)))
            await asyncio.gather(*(each.close() for each in connected))
        finally:
            server.stop()


async def test_a_server_without_room_is_a_refusal_that_names_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a traceback of the NATS client: who runs a NATS server of their own must see what to raise."""
    monkeypatch.setattr(bus_streams, "ROOM_WAIT_S", 0.3)
    server = NatsServer(tmp_path / "small", max_file_store="2GB")
    server.start()
    try:
        with pytest.raises(WireError, match=r"no room for SESSIONS \(8192 MiB\).*max_file_store") as refused:
            await Bus.connect(RoostSettings(nats_url=server.url), "b")
        assert refused.value.code is ErrorCode.OVERLOADED
    finally:
        server.stop()
