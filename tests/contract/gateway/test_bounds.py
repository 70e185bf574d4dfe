"""Wrong input, too much of it, slow clients, an end in order: what the gateway refuses and how it says so."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from proto.chat import FinishReason
from proto.retrieval import DocumentOp
from proto.subjects import DOCUMENTS, START_TURN
from proto.turns import StartTurn, TextDelta
from shared.bus import Bus
from shared.streams import stream_of
from tests.contract.gateway.conftest import Api, RunGateway
from tests.contract.gateway.scripted_loop import MODEL, ScriptedLoop, never_ends

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]
SESSIONS = "/v1/sessions"
TURN = "/v1/sessions/s1/turns"


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": USER, **fields}).encode()


# path, body, status, field
REFUSED: dict[str, tuple[str, bytes, int, str | None]] = {
    "malformed JSON": (CHAT, b'{"model": ', 400, "body"),
    "no body": (CHAT, b"", 400, "body"),
    "a list": (CHAT, b"[1, 2]", 400, "body"),
    "bad UTF-8": (CHAT, b'{"model": "\xff\xfe", "messages": []}', 400, "body"),
    "half a surrogate pair": (CHAT, b'{"model": "\\ud800", "messages": []}', 400, "body"),
    "endless nesting": (CHAT, b"[" * 100_000, 400, "body"),
    "no model": (CHAT, b'{"messages": [{"role": "user", "content": "x"}]}', 400, "model"),
    "unknown model": (CHAT, chat(model="nope"), 404, "model"),
    "no messages": (CHAT, chat(messages=[]), 400, "messages"),
    "wrong type": (CHAT, chat(messages=[{"role": "user", "content": 5}]), 400, "messages.0.content"),
    "unknown role": (CHAT, chat(messages=[{"role": "king", "content": "x"}]), 400, "messages.0.role"),
    "a picture": (
        CHAT,
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        400,
        "messages.0.content.0.type",
    ),
    "temperature as text": (CHAT, chat(temperature="hot"), 400, "temperature"),
    "temperature too high": (CHAT, chat(temperature=9), 400, "temperature"),
    "temperature not a number": (CHAT, chat()[:-1] + b', "temperature": NaN}', 400, "temperature"),
    "max_tokens zero": (CHAT, chat(max_tokens=0), 400, "max_tokens"),
    "max_tokens as a fraction": (CHAT, chat(max_tokens=1.5), 400, "max_tokens"),
    "two choices": (CHAT, chat(n=2), 400, "n"),
    "logit bias": (CHAT, chat(logit_bias={"5": 1}), 400, "logit_bias"),
    "two tools of one name": (
        CHAT,
        chat(tools=[{"type": "function", "function": {"name": "a"}}] * 2),
        400,
        "tools.1.function.name",
    ),
    "a tool that is not there": (
        CHAT,
        chat(tool_choice={"type": "function", "function": {"name": "a"}}),
        400,
        "tool_choice",
    ),
    "an answer to no call": (CHAT, chat(messages=[{"role": "tool", "content": "x"}]), 400, "messages.0.tool_call_id"),
    "too large": (CHAT, chat(messages=[{"role": "user", "content": "x" * 7_000_000}]), 413, "body"),
    "unknown field": (SESSIONS, b'{"sytem": "x"}', 400, "sytem"),
    "session id with a dot": (SESSIONS, b'{"session_id": "a.b"}', 400, "session_id"),
    "session id in the path": ("/v1/sessions/a.b/turns", b'{"content": "x"}', 400, "session_id"),
    "neither content nor messages": (TURN, b"{}", 400, "messages"),
    "unknown field of a turn": (TURN, b'{"content": "x", "contnet": 1}', 400, "contnet"),
    "deadline of no time": (TURN, b'{"content": "x", "deadline_ms": 0}', 400, "deadline_ms"),
    "bad regular expression": (
        TURN,
        b'{"content": "x", "grammar": {"kind": "regex", "text": "("}}',
        400,
        "grammar.text",
    ),
    "empty document": ("/v1/documents", b'{"text": ""}', 400, "text"),
    "document id with a star": ("/v1/documents", b'{"text": "x", "document_id": "*"}', 400, "document_id"),
    "no such route": ("/v1/nothing", b"{}", 404, None),
    "wrong method": ("/v1/models", b"{}", 405, None),
}


async def test_every_refusal_is_typed_and_names_the_field(api: Api, loop: ScriptedLoop) -> None:
    """Nothing of all this reaches the loop, and the next request is answered as ever."""
    for case, (path, body, status, field) in REFUSED.items():
        got, answer = await api.call("POST", path, body)
        assert got == status, (case, answer)
        error = answer["error"]
        assert error["param"] == field, (case, error)
        assert error["message"] and error["type"] and error["code"], (case, error)
    assert loop.started == []
    assert (await api.call("POST", CHAT, chat()))[0] == 200


async def test_unknown_fields_of_an_openai_request_are_warnings(api: Api) -> None:
    """A client of another server may say more than we know; it is answered, and told."""
    status, answer = await api.call("POST", CHAT, chat(thinking_style="deep", user="me"))
    assert status == 200
    assert answer["roost"]["warnings"] == ["thinking_style: unknown field, ignored"]


async def test_full_gateway(loop: ScriptedLoop, run_gateway: RunGateway) -> None:
    """One more turn than this replica takes: 429 with Retry-After at once; the running stream is not disturbed."""
    loop.script = never_ends
    async with run_gateway(gateway_turns_max=1) as api:
        session = await api.session()
        async with api.stream("POST", f"/v1/sessions/{session}/turns", {"content": "Hi"}) as stream:
            await anext(stream)
            async with api.http.post(api.url + CHAT, data=chat()) as refused:
                assert refused.status == 429 and int(refused.headers["Retry-After"]) >= 1
                assert (await refused.json())["error"]["code"] == "overloaded"
            await api.call("POST", f"/v1/sessions/{session}/turns/{loop.started[0].turn_id}/cancel")
            assert [event async for event in stream][-1].kind == "done"


async def test_full_queue(bus: Bus, loop: ScriptedLoop, run_gateway: RunGateway) -> None:
    """The queue of turns is at its bound: 429 with Retry-After, and the refused turn is neither counted nor cancelled."""
    loop.script = never_ends
    async with run_gateway() as api:
        manager = bus._client.jsm()
        config = (await manager.stream_info(stream_of(START_TURN).name)).config
        # The real stream with a smaller bound, which is quicker than a thousand turns.
        config.max_msgs = 1
        await manager.update_stream(config)
        session = await api.session()
        async with api.stream("POST", f"/v1/sessions/{session}/turns", {"content": "Hi"}) as stream:
            await anext(stream)
            async with api.http.post(api.url + CHAT, data=chat()) as refused:
                assert refused.status == 429 and int(refused.headers["Retry-After"]) >= 1
            assert api.service._turns.count == 1 and loop.cancelled == []
            await api.call("POST", f"/v1/sessions/{session}/turns/{loop.started[0].turn_id}/cancel")
            assert [event async for event in stream][-1].kind == "done"


async def test_request_ids_come_back(api: Api) -> None:
    """On answers and on refusals, so that a user's report can be found in the logs."""
    for path, given, expected in (("/v1/models", "abc-1", "abc-1"), ("/v1/none", "abc-2", "abc-2")):
        async with api.http.get(api.url + path, headers={"X-Request-Id": given}) as response:
            assert response.headers["X-Request-Id"] == expected
    async with api.http.get(api.url + "/v1/models") as response:
        assert response.headers["X-Request-Id"].startswith("r")


async def test_documents_are_appended_to_the_durable_log(api: Api, bus: Bus) -> None:
    status, put = await api.call("POST", "/v1/documents", {"document_id": "d1", "title": "T", "text": "Hello"})
    assert status == 202 and put["document_id"] == "d1"
    assert (await api.call("DELETE", "/v1/documents/d1"))[0] == 202
    log = [entry.record for entry in await bus.read_log(DOCUMENTS, DocumentOp)]
    assert log[0].put is not None and (log[0].put.text, log[0].put.tenant) == ("Hello", "default")
    assert log[1].delete is not None and log[1].delete.document_id == "d1"


async def test_not_ready_while_nobody_is_heard(run_gateway: RunGateway) -> None:
    """The gateway came first: it says what it waits for, and a chat is told to ask again."""
    async with run_gateway(is_ready=False) as api:
        status, health = await api.call("GET", "/readyz")
        assert status == 503 and health["reasons"] == ["no loop is heard", "no worker is heard"]
        assert (await api.call("GET", "/healthz"))[0] == 200
        status, answer = await api.call("POST", CHAT, chat())
        assert status == 503 and answer["error"]["code"] == "unavailable"
        assert (await api.call("POST", SESSIONS, {"session_id": "a"}))[0] == 503


async def test_drain_refuses_new_turns_and_lets_streams_end(loop: ScriptedLoop, run_gateway: RunGateway) -> None:
    """A rolling restart: the running stream is read to its end, new turns go elsewhere."""
    loop.script = never_ends
    async with run_gateway() as api:
        session = await api.session()
        async with api.stream("POST", f"/v1/sessions/{session}/turns", {"content": "Hi"}) as stream:
            await anext(stream)
            api.service.request_stop()
            async with asyncio.timeout(5):
                while (await api.call("GET", "/readyz"))[0] == 200:
                    await asyncio.sleep(0.01)
            async with api.http.post(api.url + CHAT, data=chat()) as refused:
                assert refused.status == 503 and "Retry-After" in refused.headers
                assert (await refused.json())["error"]["code"] == "draining"
            await api.call("POST", f"/v1/sessions/{session}/turns/{loop.started[0].turn_id}/cancel")
            assert [event async for event in stream][-1].kind == "done"


async def test_a_silent_stream_shows_signs_of_life(loop: ScriptedLoop, run_gateway: RunGateway) -> None:
    """A long prefill behind a proxy that cuts silent streams."""
    loop.script = never_ends
    async with run_gateway(gateway_heartbeat_s=0.1) as api:
        body = {"model": MODEL, "messages": USER, "stream": True}
        async with api.http.post(api.url + CHAT, json=body) as response:
            async for line in response.content:
                if line.startswith(b":"):
                    break


async def test_a_client_that_takes_nothing_is_cut_off_and_delays_nobody(
    loop: ScriptedLoop, run_gateway: RunGateway
) -> None:
    """It stops reading in the middle of a flood. Others get their answers meanwhile; its own turn is cancelled."""

    async def flood(scripted: ScriptedLoop, start: StartTurn) -> None:
        if start.sampling.max_tokens == 1:
            await scripted.words(start)
            await scripted.done(start)
            return
        piece = "x" * 10_000
        for offset in range(1, 2_000):
            if start.turn_id in scripted.cancelled:
                break
            await scripted.say(start, (0, offset, 0), TextDelta(token_ids=(1,), pieces=(piece,)))
        await scripted.done(start, FinishReason.CANCELLED)

    loop.script = flood
    async with run_gateway(gateway_stall_s=0.5) as api:
        reader, writer = await asyncio.open_connection("127.0.0.1", api.service.port, limit=2**12)
        body = chat(stream=True, max_tokens=100)
        writer.write(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(body)) + body)
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        for _ in range(5):
            assert (await api.call("POST", CHAT, chat(max_tokens=1)))[0] == 200
        await loop.until(lambda: loop.cancelled)
        assert loop.cancelled == [loop.started[0].turn_id]
        writer.close()


async def test_a_request_that_does_not_arrive_is_given_up(loop: ScriptedLoop, run_gateway: RunGateway) -> None:
    """Half a body, then silence: an answer that says so, and the connection is closed."""
    async with run_gateway(gateway_stall_s=0.3) as api:
        reader, writer = await asyncio.open_connection("127.0.0.1", api.service.port)
        writer.write(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{" % CHAT.encode())
        answer = await asyncio.wait_for(reader.read(), 20.0)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 408 ") and b"did not arrive in time" in answer
    assert not loop.started


async def test_metrics(api: Api) -> None:
    """The same registry as on the metrics port."""
    await api.call("POST", CHAT, chat())
    async with api.http.get(api.url + "/metrics") as response:
        text = await response.text()
    assert f'roost_gateway_http_requests_total{{route="{CHAT}",status_class="2xx"}}' in text
    assert "roost_gateway_turns_in_flight 0.0" in text
    assert "roost_gateway_ttft_seconds_count" in text and "roost_gateway_turn_seconds_count" in text
