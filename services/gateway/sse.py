"""Pure: the bytes of server-sent events."""

from __future__ import annotations

import json
from typing import Any, Final

DONE: Final = b"data: [DONE]\n\n"
HEARTBEAT: Final = b": still here\n\n"
HEADERS: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # Tells nginx and its kin to pass each event on at once.
    "X-Accel-Buffering": "no",
}


def to_json(value: Any) -> str:
    """Compact JSON on one line."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def data(value: Any) -> bytes:
    """An event with nothing but data, as OpenAI streams have it."""
    return f"data: {to_json(value)}\n\n".encode()


def event(kind: str, value: Any, event_id: str) -> bytes:
    """A named event with an id, by which a client can go on where it was cut off."""
    assert "\n" not in kind and "\n" not in event_id
    return f"id: {event_id}\nevent: {kind}\ndata: {to_json(value)}\n\n".encode()
