"""Pure: the JSON of the native routes: a turn's events, whole turns, sessions. README.md beside this file shows each shape.

Tokens are counted as OpenAI counts them. A receipt is as the loop wrote it, with `bus` worked out for each set of seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, assert_never

from proto.chat import ChatMessage, ToolCall
from proto.errors import ErrorReply
from proto.receipt import Receipt, Seconds, Usage
from proto.sessions import SessionInfo, TurnSummary
from proto.turns import TextDelta, ToolCalled, ToolReturned, TurnDone, TurnEvent, TurnFailed, TurnStarted
from services.gateway.http_errors import envelope


def usage_json(usage: Usage) -> dict[str, Any]:
    """Usage in OpenAI's shape."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def receipt_json(receipt: Receipt) -> dict[str, Any]:
    """What the turn cost and where its KV came from."""
    shown = receipt.model_dump(mode="json")
    shown["seconds"] = _seconds(receipt.seconds)
    for step, step_shown in zip(receipt.steps, shown["steps"], strict=True):
        step_shown["seconds"] = _seconds(step.seconds)
    return shown


def _seconds(seconds: Seconds) -> dict[str, float]:
    return {**seconds.model_dump(mode="json"), "bus": seconds.bus}


def call_json(call: ToolCall) -> dict[str, Any]:
    """A call in OpenAI's shape."""
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def event_json(event: TurnEvent, *, with_tokens: bool) -> dict[str, Any]:
    """The data of one event in a native stream."""
    return {"turn_id": event.turn_id, "session_id": event.session_id, "step": event.step} | _body(event, with_tokens)


def _body(event: TurnEvent, with_tokens: bool) -> dict[str, Any]:
    body = event.body
    match body:
        case TurnStarted():
            return {"model": body.model, "prompt_tokens": body.prompt_tokens}
        case TextDelta():
            shown: dict[str, Any] = {"text": "".join(body.pieces)}
            if with_tokens:
                shown["token_ids"] = list(body.token_ids)
            if body.logprobs is not None:
                shown["logprobs"] = list(body.logprobs)
            return shown
        case ToolCalled():
            call = body.call
            return {
                "index": body.index,
                "call_id": call.call_id,
                "name": call.name,
                "arguments": call.arguments,
                "run_here": body.run_here,
            }
        case ToolReturned():
            return body.model_dump(mode="json", exclude={"kind"})
        case TurnDone():
            return {
                "finish_reason": body.finish_reason.value,
                "usage": usage_json(body.usage),
                "receipt": receipt_json(body.receipt),
            }
        case TurnFailed():
            return envelope(body.error)
        case _:
            assert_never(body)


def turn_json(events: Iterable[TurnEvent], *, with_tokens: bool) -> dict[str, Any]:
    """A whole turn that ended well, as one object. `text` is that of all steps, `tool_calls` those left to the caller."""
    turn: dict[str, Any] = {"status": "done", "text": "", "tool_calls": [], "tool_results": []}
    tokens: list[int] = []
    for event in events:
        body = event.body
        turn["turn_id"], turn["session_id"] = event.turn_id, event.session_id
        match body:
            case TurnStarted():
                turn["model"] = body.model
            case TextDelta():
                turn["text"] += "".join(body.pieces)
                tokens.extend(body.token_ids)
            case ToolCalled():
                if not body.run_here:
                    turn["tool_calls"].append(call_json(body.call))
            case ToolReturned():
                turn["tool_results"].append({"step": event.step, **body.model_dump(mode="json", exclude={"kind"})})
            case TurnDone():
                turn |= _body(event, with_tokens)
            case TurnFailed():
                raise AssertionError("a failed turn is answered with its error")
            case _:
                assert_never(body)
    assert "finish_reason" in turn, "a turn is shown when it has ended"
    if with_tokens:
        turn["token_ids"] = tokens
    return turn


def session_json(info: SessionInfo) -> dict[str, Any]:
    """`GET /v1/sessions/{id}`."""
    return {
        "session_id": info.session_id,
        "model": info.model,
        "created_at": info.created_at,
        "token_count": info.token_count,
        "tools": list(info.tools),
        "parent": info.parent,
        "turns": [_summary(turn) for turn in info.turns],
    }


def _summary(turn: TurnSummary) -> dict[str, Any]:
    return {
        "turn_id": turn.turn_id,
        "status": turn.status,
        "opened_at": turn.opened_at,
        "messages": [message_json(message) for message in turn.messages],
        "finish_reason": turn.finish_reason.value if turn.finish_reason else None,
        "error": _error(turn.error),
        "usage": usage_json(turn.usage),
        "receipt": receipt_json(turn.receipt) if turn.receipt else None,
    }


def _error(error: ErrorReply | None) -> Any:
    return envelope(error)["error"] if error else None


def message_json(message: ChatMessage) -> dict[str, Any]:
    """A message in OpenAI's shape."""
    shown: dict[str, Any] = {"role": message.role.value, "content": message.content}
    if message.tool_calls:
        shown["tool_calls"] = [call_json(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    return shown
