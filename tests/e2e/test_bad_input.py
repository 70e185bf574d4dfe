"""What a wrong request gets from the whole system: a typed 4xx that names the field, and nothing else is disturbed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shared.settings import DEFAULT_MODEL
from tests.e2e.client import Session
from tests.e2e.system import System, call

USER = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": DEFAULT_MODEL, "messages": USER, **fields}).encode()


CASES: dict[str, tuple[str, str, bytes, int, str | None]] = {
    "malformed JSON": ("POST", CHAT, b'{"model": ', 400, "body"),
    "not an object": ("POST", CHAT, b"[1, 2]", 400, "body"),
    "bad UTF-8": ("POST", CHAT, b'{"model": "\xff\xfe", "messages": []}', 400, "body"),
    "unknown model": ("POST", CHAT, chat(model="nope"), 404, "model"),
    "no messages": ("POST", CHAT, chat(messages=[]), 400, "messages"),
    "message of a wrong type": (
        "POST",
        CHAT,
        chat(messages=[{"role": "user", "content": 5}]),
        400,
        "messages.0.content",
    ),
    "unknown role": ("POST", CHAT, chat(messages=[{"role": "king", "content": "x"}]), 400, "messages.0.role"),
    "temperature as text": ("POST", CHAT, chat(temperature="hot"), 400, "temperature"),
    "temperature too high": ("POST", CHAT, chat(temperature=9), 400, "temperature"),
    "max_tokens zero": ("POST", CHAT, chat(max_tokens=0), 400, "max_tokens"),
    "a message of 1 MB": ("POST", CHAT, chat(messages=[{"role": "user", "content": "w " * 524_288}]), 400, "messages"),
    "a body beyond the bound": (
        "POST",
        CHAT,
        chat(messages=[{"role": "user", "content": "x" * 7_000_000}]),
        413,
        "body",
    ),
    "unknown field, native": ("POST", "/v1/sessions", b'{"sytem": "x"}', 400, "sytem"),
    "session id with a dot": ("POST", "/v1/sessions", b'{"session_id": "a.b"}', 400, "session_id"),
    "session id in the path": ("GET", "/v1/sessions/a.b", b"", 400, "session_id"),
    "unknown session": ("GET", "/v1/sessions/nobody", b"", 404, "session_id"),
    "turn of an unknown session": ("POST", "/v1/sessions/nobody/turns", b'{"content": "x"}', 404, "session_id"),
    "empty document": ("POST", "/v1/documents", b'{"text": ""}', 400, "text"),
}


@pytest.mark.parametrize("case", CASES)
def test_typed_refusal(system: System, case: str) -> None:
    method, path, body, status, field = CASES[case]
    got, answer = call(method, system.url + path, raw=body or None)
    assert got == status, answer
    error = answer["error"]
    assert error["param"] == field and error["message"] and error["type"] and error["code"], error


def test_a_turn_beyond_the_window_leaves_its_session_as_it_was(system: System) -> None:
    """A file was pasted by mistake. The conversation goes on without it."""
    session = Session(system.url)
    session.turn("Hi", max_tokens=5)
    before = session.describe()["token_count"]
    body = json.dumps({"content": "w " * 20_000, "stream": False}).encode()
    status, answer = call("POST", f"{system.url}/v1/sessions/{session.session_id}/turns", raw=body)
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
    assert session.describe()["token_count"] == before
    assert "Paris" in session.turn("What is the capital of France?").text


@pytest.mark.parametrize("choice", ["required", {"name": "python"}], ids=["any", "named"])
def test_a_forced_call_in_a_session_without_tools_is_refused_and_forgotten(system: System, choice: Any) -> None:
    """The session is not locked by it."""
    session = Session(system.url)
    body = json.dumps({"content": "x", "stream": False, "tool_choice": choice}).encode()
    status, answer = call("POST", f"{system.url}/v1/sessions/{session.session_id}/turns", raw=body)
    assert status == 400 and answer["error"]["param"] == "tool_choice"
    assert "Paris" in session.turn("What is the capital of France?").text


def test_nothing_was_disturbed(system: System) -> None:
    """After all of the above the system answers."""
    assert "Paris" in Session(system.url).turn("What is the capital of France?").text
