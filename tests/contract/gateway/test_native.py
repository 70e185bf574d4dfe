"""Native sessions and turns over real HTTP and a real bus; the loop is played by a script."""

from __future__ import annotations

import asyncio
from typing import Any

from proto.chat import ChatMessage, FinishReason, Role
from proto.errors import ErrorCode
from proto.sessions import TurnSummary
from proto.turns import StartTurn
from services.gateway.events import END_PART
from services.gateway.identity import turn_id_from
from tests.contract.gateway.conftest import Api, Event, RunGateway
from tests.contract.gateway.scripted_loop import (
    RECEIPT,
    USAGE,
    WORDS,
    ScriptedLoop,
    call_run_here,
    never_ends,
)
from tests.nats_server import NatsServer

TEXT = "".join(WORDS)
ALL_IDS = ["0.0.0", "0.1.0", "0.2.0", "0.3.0", "0.4.0", "0.5.0", f"1.0.{END_PART}"]


def text_of(events: list[Event]) -> str:
    return "".join(event.data["text"] for event in events if event.kind == "text")


async def turn(api: Api, session: str, **body: Any) -> list[Event]:
    async with api.stream("POST", f"/v1/sessions/{session}/turns", {"content": "Where?", **body}) as stream:
        return [event async for event in stream]


async def test_a_turn_is_streamed_with_ids_usage_and_receipt(api: Api) -> None:
    """The first thing a new user sees."""
    events = await turn(api, await api.session(), return_token_ids=True)
    assert [event.kind for event in events] == ["started", *["text"] * 5, "done"]
    assert [event.id for event in events] == ALL_IDS
    assert text_of(events) == TEXT
    assert [event.data["token_ids"] for event in events if event.kind == "text"] == [[100 + i] for i in range(5)]
    done = events[-1].data
    assert done["finish_reason"] == "stop"
    assert done["usage"] == {
        "prompt_tokens": 40,
        "completion_tokens": 5,
        "total_tokens": 45,
        "prompt_tokens_details": {"cached_tokens": 32},
    }
    assert done["receipt"]["tokens_by_source"] == {"resident": 32, "computed": 8}
    assert abs(done["receipt"]["seconds"]["bus"] - 0.2) < 1e-9


async def test_a_turn_as_one_object(api: Api, loop: ScriptedLoop) -> None:
    """A script that does not want to read a stream; tools that were run are in the answer."""
    loop.script = call_run_here
    session = await api.session()
    status, answer = await api.call("POST", f"/v1/sessions/{session}/turns", {"content": "6*7?", "stream": False})
    assert status == 200
    assert (answer["status"], answer["text"], answer["finish_reason"]) == ("done", "42", "stop")
    assert answer["tool_calls"] == [] and answer["tool_results"][0]["content"] == "42"
    assert answer["session_id"] == session and answer["receipt"]["steps"][0]["worker_id"] == "decode-0"
    assert "token_ids" not in answer


async def test_what_the_loop_is_asked(api: Api, loop: ScriptedLoop) -> None:
    """Ids, tenant, deadline and request id travel with the turn."""
    session = await api.session(session_id="mine")
    headers = {"X-Request-Id": "req-7", "X-Roost-Deadline-Ms": "30000"}
    async with api.stream("POST", f"/v1/sessions/{session}/turns", {"content": "Hi", "max_tokens": 9}, **headers) as s:
        assert [event async for event in s][-1].kind == "done"
    start = loop.started[0]
    assert (start.session_id, start.tenant, start.model, start.request_id) == ("mine", "default", "tiny", "req-7")
    assert start.sampling.max_tokens == 9 and not start.stateless
    assert abs(start.deadline_at - start.started_at - 30) < 0.01


async def test_a_turn_that_is_refused_at_once_is_an_http_error(api: Api, loop: ScriptedLoop) -> None:
    """Streams and objects alike: a prompt beyond the window, found by the loop after it began, is a 400."""

    async def refuse(scripted: ScriptedLoop, start: StartTurn) -> None:
        await scripted.begin(start)
        await scripted.fail(start, ErrorCode.CONTEXT_LENGTH, "messages")

    loop.script = refuse
    session = await api.session()
    for stream in (True, False):
        body = {"content": "long", "stream": stream}
        status, answer = await api.call("POST", f"/v1/sessions/{session}/turns", body)
        assert status == 400
        assert answer["error"]["code"] == "context_length_exceeded" and answer["error"]["param"] == "messages"


async def test_a_failure_in_the_middle_is_the_last_event(api: Api, loop: ScriptedLoop) -> None:
    """Exactly one terminal event, whatever happens."""

    async def break_off(scripted: ScriptedLoop, start: StartTurn) -> None:
        await scripted.begin(start)
        await scripted.words(start, 0, 2)
        await scripted.fail(start, ErrorCode.INTERNAL)

    loop.script = break_off
    events = await turn(api, await api.session())
    assert [event.kind for event in events] == ["started", "text", "text", "failed"]
    assert events[-1].data["error"]["code"] == "internal_error"


async def test_a_resumed_loop_says_things_again_in_other_cuts(api: Api, loop: ScriptedLoop) -> None:
    """The loop was killed after two words; the next life says all of them again. The client gets each token once."""

    async def twice(scripted: ScriptedLoop, start: StartTurn) -> None:
        await scripted.begin(start)
        await scripted.words(start, 0, 3)
        await scripted.begin(start)
        await scripted.words(start)
        await scripted.done(start)
        await scripted.done(start)

    loop.script = twice
    events = await turn(api, await api.session())
    assert [event.id for event in events] == ALL_IDS


async def test_a_client_goes_on_where_it_was_cut_off_at_another_gateway(
    loop: ScriptedLoop, run_gateway: RunGateway
) -> None:
    """Its gateway is gone; the next one reads the trail behind Last-Event-ID, and then what is said now."""
    go_on = asyncio.Event()

    async def in_two_parts(scripted: ScriptedLoop, start: StartTurn) -> None:
        await scripted.begin(start)
        await scripted.words(start, 0, 3)
        await go_on.wait()
        await scripted.words(start, 3)
        await scripted.done(start)

    loop.script = in_two_parts
    async with run_gateway() as first:
        session = await first.session()
        async with first.stream("POST", f"/v1/sessions/{session}/turns", {"content": "Where?"}) as stream:
            seen = [await anext(stream) for _ in range(3)]
    turn_id = loop.started[0].turn_id
    assert loop.cancelled == [], "a native turn goes on without its client"
    async with run_gateway() as second:
        path = f"/v1/sessions/{session}/turns/{turn_id}/events"
        async with second.stream("GET", path, **{"Last-Event-ID": seen[-1].id}) as stream:
            rest = [await anext(stream)]
            go_on.set()
            rest += [event async for event in stream]
        assert [event.id for event in (*seen, *rest)] == ALL_IDS
        async with second.stream("GET", path, **{"Last-Event-ID": rest[-1].id}) as stream:
            assert [event async for event in stream] == [], "a client that has everything gets nothing more"
        status, answer = await second.call("GET", path, **{"Last-Event-ID": "nonsense"})
        assert status == 400 and answer["error"]["param"] == "Last-Event-ID"
        assert (await second.call("GET", path.replace(session, "other")))[0] == 404


async def test_a_turn_of_long_ago_is_told_from_its_session(api: Api, loop: ScriptedLoop) -> None:
    """The trail is kept in memory for an hour; the session's log keeps the answer."""
    session = await api.session()
    turn_id = turn_id_from("default", "0" * 24)
    summary = TurnSummary(
        turn_id=turn_id, status="done", opened_at=1.0, finish_reason=FinishReason.STOP, usage=USAGE, receipt=RECEIPT,
        messages=(
            ChatMessage(role=Role.USER, content="Where?"),
            ChatMessage(role=Role.ASSISTANT, content=TEXT),
        ),
    )  # fmt: skip
    loop.ended(session, summary)
    path = f"/v1/sessions/{session}/turns/{turn_id}/events"
    async with api.stream("GET", path) as stream:
        events = [event async for event in stream]
    assert text_of(events) == TEXT and [event.kind for event in events] == ["text", "done"]
    async with api.stream("GET", path, **{"Last-Event-ID": "0.5.0"}) as stream:
        assert [event.kind async for event in stream] == ["done"]
    async with api.stream("GET", path, **{"Last-Event-ID": "0.3.0"}) as stream:
        assert [event.data["error"]["code"] async for event in stream] == ["lost"]


async def test_a_turn_that_nobody_knows(loop: ScriptedLoop, run_gateway: RunGateway) -> None:
    """The client is told so after a bounded wait."""
    async with run_gateway(gateway_attach_wait_s=0.1) as api:
        session = await api.session()
        status, answer = await api.call("GET", f"/v1/sessions/{session}/turns/tnothing/events")
        assert status == 404 and answer["error"]["param"] == "turn_id"


async def test_the_same_name_is_the_same_turn(api: Api, loop: ScriptedLoop) -> None:
    """A client that did not hear its answer asks again: nothing runs twice, and it gets the whole stream."""
    session = await api.session()
    first, second = [await turn(api, session, turn_id="my turn") for _ in range(2)]
    assert [event.id for event in first] == [event.id for event in second] == ALL_IDS
    assert len(loop.started) == 1


async def test_cancel_on_disconnect_if_asked_for(api: Api, loop: ScriptedLoop) -> None:
    """Ctrl-C in the console: the turn stops, and its blocks are free."""
    loop.script = never_ends
    session = await api.session()
    body = {"content": "Hi", "on_disconnect": "cancel"}
    async with api.stream("POST", f"/v1/sessions/{session}/turns", body) as stream:
        assert (await anext(stream)).kind == "started"
    await loop.until(lambda: loop.cancelled == [loop.started[0].turn_id])


async def test_cancel_by_request(api: Api, loop: ScriptedLoop) -> None:
    """Another process of the caller stops the turn; the stream ends in order."""
    loop.script = never_ends
    session = await api.session()
    async with api.stream("POST", f"/v1/sessions/{session}/turns", {"content": "Hi"}) as stream:
        turn_id = (await anext(stream)).data["turn_id"]
        path = f"/v1/sessions/{session}/turns/{turn_id}/cancel"
        assert await api.call("POST", path) == (202, {"turn_id": turn_id, "status": "cancelling"})
        assert [event async for event in stream][-1].data["finish_reason"] == "cancelled"
    assert (await api.call("POST", "/v1/sessions/nobody/turns/t1/cancel"))[0] == 404


async def test_nats_restarts_in_the_middle(api: Api, loop: ScriptedLoop, nats_server: NatsServer) -> None:
    """The trail in memory is gone; the loop says everything again once NATS is back. The client sees a pause."""
    restarted = asyncio.Event()

    async def over_the_restart(scripted: ScriptedLoop, start: StartTurn) -> None:
        await scripted.begin(start)
        await scripted.words(start, 0, 3)
        await restarted.wait()
        await scripted.begin(start)
        await scripted.words(start)
        await scripted.done(start)

    loop.script = over_the_restart
    is_back = asyncio.Event()
    loop.bus.on_reconnect(is_back.set)
    session = await api.session()
    async with api.stream("POST", f"/v1/sessions/{session}/turns", {"content": "Where?"}) as stream:
        events = [await anext(stream) for _ in range(4)]
        nats_server.kill()
        nats_server.start()
        async with asyncio.timeout(10):
            await is_back.wait()
        restarted.set()
        events += [event async for event in stream]
    assert [event.id for event in events] == ALL_IDS


async def test_sessions_are_shown_and_belong_to_their_tenant(loop: ScriptedLoop, run_gateway: RunGateway) -> None:
    """Keys name tenants; another tenant's session does not exist."""
    async with run_gateway(gateway_api_keys={"ka": "a", "kb": "b"}) as api:
        assert (await api.call("POST", "/v1/sessions", {}))[0] == 401
        status, wrong = await api.call("POST", "/v1/sessions", {}, Authorization="Bearer nope")
        assert status == 401 and wrong["error"]["code"] == "invalid_api_key"
        status, made = await api.call("POST", "/v1/sessions", {"session_id": "s1"}, Authorization="Bearer ka")
        assert status == 201 and made["model"] == "tiny"
        status, shown = await api.call("GET", "/v1/sessions/s1", **{"x-api-key": "ka"})
        assert status == 200 and shown["turns"] == [] and shown["session_id"] == "s1"
        status, hidden = await api.call("GET", "/v1/sessions/s1", Authorization="Bearer kb")
        assert status == 404 and hidden["error"]["param"] == "session_id"
        for path in ("/healthz", "/readyz"):
            assert (await api.call("GET", path))[0] == 200
