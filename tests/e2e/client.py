"""A client of the native routes, as a user would write one: sessions, turns as server-sent events, receipts."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx2

from tests.e2e.system import call

TURN_S_MAX = 100.0


@dataclass(slots=True)
class Answer:
    """What one streamed turn said."""

    events: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(event["text"] for _, kind, event in self.events if kind == "text")

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the answer, if the turn asked for them."""
        return [token for _, kind, event in self.events if kind == "text" for token in event["token_ids"]]

    @property
    def done(self) -> dict[str, Any]:
        """The one good terminal event."""
        kinds = [kind for _, kind, _ in self.events]
        assert kinds.count("done") == 1 and kinds[-1] == "done", self.events[-3:]
        return self.events[-1][2]

    @property
    def cached_tokens(self) -> int:
        """As OpenAI counts them."""
        return int(self.done["usage"]["prompt_tokens_details"]["cached_tokens"])

    @property
    def sources(self) -> dict[str, int]:
        """Prompt tokens of the first step by where their KV came from, without zeros."""
        return {name: count for name, count in self.done["receipt"]["steps"][0]["tokens_by_source"].items() if count}


def sse(lines: Iterator[str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(id, event, data) of each event in a stream of lines."""
    fields: dict[str, str] = {}
    for line in lines:
        if line.startswith(":"):
            continue
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif fields:
            yield fields.get("id", ""), fields.get("event", ""), json.loads(fields["data"])
            fields = {}


class Session:
    """One session at a gateway."""

    def __init__(self, url: str, **body: Any) -> None:
        self.url = url
        # One client for all turns: making one reads the certificates anew (20 ms).
        self._http = httpx2.Client(timeout=TURN_S_MAX)
        status, made = call("POST", f"{url}/v1/sessions", body)
        assert status in (200, 201), made
        self.session_id = made["session_id"]

    def turn(self, content: str, *, on_event: Callable[[Answer], None] | None = None, **options: Any) -> Answer:
        """Send one turn and read its stream to the end. `on_event` is called after each event."""
        body = {"content": content, "max_tokens": 32, "temperature": 0, "return_token_ids": True, **options}
        answer = Answer()
        url = f"{self.url}/v1/sessions/{self.session_id}/turns"
        with self._http.stream("POST", url, json=body) as response:
            if response.status_code != 200:
                raise AssertionError(f"{response.status_code}: {response.read().decode()}")
            for event in sse(response.iter_lines()):
                answer.events.append(event)
                if on_event is not None:
                    on_event(answer)
        return answer

    def describe(self) -> dict[str, Any]:
        """GET the session."""
        status, session = call("GET", f"{self.url}/v1/sessions/{self.session_id}")
        assert status == 200, session
        return dict(session)


class Once:
    """Call something in a thread of its own when an answer has this many text events; then wait for it with `join`."""

    def __init__(self, after_texts: int, action: Callable[[], None]) -> None:
        self._after, self._action = after_texts, action
        self._thread: threading.Thread | None = None

    def __call__(self, answer: Answer) -> None:
        texts = sum(1 for _, kind, _ in answer.events if kind == "text")
        if self._thread is None and texts >= self._after:
            self._thread = threading.Thread(target=self._action)
            self._thread.start()

    def join(self) -> None:
        """Raises if it never began."""
        assert self._thread is not None, "the answer ended before the moment came"
        self._thread.join(timeout=TURN_S_MAX)
        assert not self._thread.is_alive()
