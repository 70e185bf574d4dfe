"""Pure: a turn's events as OpenAI's chat completion: one object, or a stream of chunks.

    role chunk, then one chunk an event, the chunk with the finish reason, the usage chunk if asked for, [DONE]

What is Roost's own (ids, receipt, warnings) is in the field `roost` of the whole object, and of the stream's last chunk.
A turn that somebody cancelled has no OpenAI finish reason; it is the error `cancelled`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from proto.chat import FinishReason
from proto.errors import ErrorCode, ErrorReply
from proto.turns import TextDelta, ToolCalled, TurnDone, TurnEvent, TurnFailed
from services.gateway.answers import call_json, receipt_json, usage_json


@dataclass(frozen=True, slots=True)
class ChatShape:
    """What all chunks of one answer share, and what the caller wants to see."""

    turn_id: str
    model: str
    created: int
    with_usage: bool
    with_tokens: bool
    with_logprobs: bool
    warnings: Sequence[str] = ()

    def head(self, kind: str) -> dict[str, Any]:
        """The fields that every object begins with."""
        return {"id": f"chatcmpl-{self.turn_id}", "object": kind, "created": self.created, "model": self.model}

    def roost(self, event: TurnEvent, done: TurnDone) -> dict[str, Any]:
        """Roost's own part."""
        own: dict[str, Any] = {
            "turn_id": self.turn_id,
            "session_id": event.session_id,
            "receipt": receipt_json(done.receipt),
        }
        if self.warnings:
            own["warnings"] = list(self.warnings)
        return own


def failure_of(event: TurnEvent) -> ErrorReply | None:
    """The error that this event is to an OpenAI client, if it is one."""
    body = event.body
    if isinstance(body, TurnFailed):
        return body.error
    if isinstance(body, TurnDone) and body.finish_reason is FinishReason.CANCELLED:
        return ErrorReply(code=ErrorCode.CANCELLED, message="the turn was cancelled")
    return None


def role_chunk(shape: ChatShape) -> dict[str, Any]:
    """The first chunk."""
    return _chunk(shape, {"role": "assistant", "content": ""})


def chunks(shape: ChatShape, event: TurnEvent) -> list[dict[str, Any]]:
    """The chunks of one event that is no failure."""
    body = event.body
    match body:
        case TextDelta():
            return [_text_chunk(shape, body)]
        case ToolCalled():
            return [_chunk(shape, {"tool_calls": [{"index": body.index, **call_json(body.call)}]})]
        case TurnDone():
            return _last_chunks(shape, event, body)
        case _:
            return []


def _chunk(shape: ChatShape, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    chunk = {**shape.head("chat.completion.chunk"), "choices": [choice]}
    # With usage asked for, every chunk has the field and only the last one a value.
    return chunk | ({"usage": None} if shape.with_usage else {})


def _text_chunk(shape: ChatShape, body: TextDelta) -> dict[str, Any]:
    chunk = _chunk(shape, {"content": "".join(body.pieces)})
    choice = chunk["choices"][0]
    if shape.with_logprobs and body.logprobs is not None:
        choice["logprobs"] = {"content": _logprobs(body), "refusal": None}
    if shape.with_tokens:
        choice["token_ids"] = list(body.token_ids)
    return chunk


def _last_chunks(shape: ChatShape, event: TurnEvent, done: TurnDone) -> list[dict[str, Any]]:
    last = [_chunk(shape, {}, done.finish_reason.value)]
    if shape.with_usage:
        last.append({**shape.head("chat.completion.chunk"), "choices": [], "usage": usage_json(done.usage)})
    last[-1]["roost"] = shape.roost(event, done)
    return last


def _logprobs(body: TextDelta) -> list[dict[str, Any]]:
    assert body.logprobs is not None
    return [
        {"token": piece, "logprob": value, "bytes": list(piece.encode()), "top_logprobs": []}
        for piece, value in zip(body.pieces, body.logprobs, strict=False)
    ]


def completion(shape: ChatShape, events: Iterable[TurnEvent]) -> dict[str, Any]:
    """The whole answer as one object. The events end with a TurnDone that is no failure."""
    text: list[str] = []
    tokens: list[int] = []
    calls: list[dict[str, Any]] = []
    logprobs: list[dict[str, Any]] = []
    last: TurnEvent | None = None
    for event in events:
        last = event
        if isinstance(event.body, TextDelta):
            text.extend(event.body.pieces)
            tokens.extend(event.body.token_ids)
            logprobs.extend(_logprobs(event.body) if event.body.logprobs is not None else ())
        elif isinstance(event.body, ToolCalled):
            calls.append(call_json(event.body.call))
    assert last is not None and isinstance(last.body, TurnDone) and failure_of(last) is None
    message: dict[str, Any] = {
        "role": "assistant",
        "content": "".join(text) or (None if calls else ""),
        "refusal": None,
    }
    if calls:
        message["tool_calls"] = calls
    choice: dict[str, Any] = {
        "index": 0,
        "message": message,
        "logprobs": {"content": logprobs, "refusal": None} if shape.with_logprobs and logprobs else None,
        "finish_reason": last.body.finish_reason.value,
    }
    if shape.with_tokens:
        choice["token_ids"] = tokens
    return {
        **shape.head("chat.completion"),
        "choices": [choice],
        "usage": usage_json(last.body.usage),
        "roost": shape.roost(last, last.body),
    }
