"""The gateway's API as the terminal client needs it: sessions and streamed turns over plain HTTP."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Any, Final
from urllib.parse import quote, urlsplit

from services.console.errors import ConsoleError

ANSWER_WITHIN_S: Final = 600.0
HTTP_CONFLICT: Final = 409


class GatewayClient:
    """One gateway. Raises ConsoleError with the gateway's own words."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self._url, self._parts = url, urlsplit(url)
        if self._parts.scheme not in ("http", "https") or not self._parts.hostname:
            raise ConsoleError(f"not the URL of a gateway: {url!r}")
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {api_key}"} if api_key else {}
        )

    def open_session(self, session_id: str | None, system: str, tools: tuple[str, ...]) -> str:
        """Open a session and return its id. A named one that is there already is gone on with, as it is."""
        body = {"system": system, "tools": list(tools)} | ({"session_id": session_id} if session_id else {})
        with closing(self._connection()) as connection:
            status, answer = self._post(connection, "/v1/sessions", body)
            content = answer.read()
        if session_id is not None and status == HTTP_CONFLICT:
            return session_id
        return str(_checked(status, content)["session_id"])

    def turn(self, session_id: str, content: str) -> dict[str, Any]:
        """One turn, waited for."""
        with closing(self._connection()) as connection:
            status, answer = self._post(connection, _turns(session_id), {"content": content, "stream": False})
            return _checked(status, answer.read())

    def stream_turn(self, session_id: str, content: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """One turn as (event, data), as they come. Closing the iterator early cancels the turn."""
        with closing(self._connection()) as connection:
            body = {"content": content, "on_disconnect": "cancel"}
            status, answer = self._post(connection, _turns(session_id), body)
            if status >= 400:
                _checked(status, answer.read())
            try:
                yield from parse_events(answer)
            except OSError as failed:
                raise ConsoleError(f"the gateway went away in the middle of the answer ({failed})") from failed

    def _connection(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        return kind(self._parts.hostname or "", self._parts.port, timeout=ANSWER_WITHIN_S)

    def _post(
        self, connection: http.client.HTTPConnection, path: str, body: dict[str, Any]
    ) -> tuple[int, http.client.HTTPResponse]:
        try:
            connection.request("POST", self._parts.path.rstrip("/") + path, json.dumps(body), self._headers)
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as failed:
            raise ConsoleError(f"no answer from the gateway at {self._url} ({failed}); see `roost ps`") from failed
        return answer.status, answer


def _turns(session_id: str) -> str:
    return f"/v1/sessions/{quote(session_id, safe='')}/turns"


def _checked(status: int, content: bytes) -> dict[str, Any]:
    """The object in a good answer. Raises ConsoleError with the words of a bad one."""
    if status >= 400:
        raise ConsoleError(error_text(status, content))
    answer: dict[str, Any] = json.loads(content)
    return answer


def error_text(status: int, body: bytes) -> str:
    """What the gateway said, or at least its status."""
    try:
        error = json.loads(body)["error"]
        field = f" (field {error['param']})" if error.get("param") else ""
        return f"{error['message']}{field}"
    except (ValueError, KeyError, TypeError):
        return f"the gateway answered {status}: {body[:200]!r}"


def parse_events(lines: Iterable[bytes]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Server-sent events with JSON data; comments and the closing [DONE] are left out."""
    kind, data = "message", ""
    for raw in lines:
        line = raw.decode().rstrip("\r\n")
        if not line:
            if data and data != "[DONE]":
                yield kind, json.loads(data)
            kind, data = "message", ""
        elif line.startswith("event:"):
            kind = line[6:].strip()
        elif line.startswith("data:"):
            data += line[5:].strip()
