"""From a turn's events to the JSON that clients read: OpenAI's shapes, and turns of long ago."""

from __future__ import annotations

import json

import pytest

from proto.chat import ChatMessage, FinishReason, Role, ToolCall
from proto.errors import RETRYABLE, ErrorCode, ErrorReply, WireError
from proto.receipt import Receipt, Seconds, Source, StepReceipt, Usage
from proto.sessions import SessionInfo, TurnSummary
from proto.turns import BEFORE_EVERYTHING, Place, TextDelta, ToolCalled, TurnBody, TurnDone, TurnEvent, TurnFailed
from services.gateway import sse
from services.gateway.answers import session_json, turn_json
from services.gateway.events import END_PART, stream_id
from services.gateway.http_errors import envelope, headers_of, status_of
from services.gateway.openai_answers import ChatShape, chunks, completion, failure_of
from services.gateway.past import ended_turn, past_events

USAGE = Usage(prompt_tokens=10, cached_tokens=4, completion_tokens=3)
CALL = ToolCall(call_id="c1", name="f", arguments="{}")
STEPS = (
    StepReceipt(
        step=0, worker_id="w", prompt_tokens=10, generated_tokens=3, tokens_by_source={Source.COMPUTED: 10},
        seconds=Seconds(decode=1.0, total=3.0),
    ),
    StepReceipt(step=2, worker_id="w", prompt_tokens=20, generated_tokens=5),
)  # fmt: skip


def event(step: int, offset: int, part: int, body: TurnBody) -> TurnEvent:
    return TurnEvent(turn_id="t1", session_id="s1", step=step, offset=offset, part=part, body=body)


def done(reason: FinishReason = FinishReason.STOP) -> TurnEvent:
    return event(1, 0, 0, TurnDone(finish_reason=reason, usage=USAGE, receipt=Receipt(steps=STEPS[:1])))


def shape(**changes: bool) -> ChatShape:
    flags = {"with_usage": False, "with_tokens": False, "with_logprobs": False} | changes
    return ChatShape(turn_id="t1", model="m", created=5, **flags)


HELLO = event(0, 2, 0, TextDelta(token_ids=(1, 2), pieces=("Hel", "lo"), logprobs=(-0.1, -0.2)))


def test_chunks_of_an_answer() -> None:
    """Usage and Roost's own part are in the last chunk only."""
    made = shape(with_usage=True, with_tokens=True, with_logprobs=True)
    (said,) = chunks(made, HELLO)
    assert said["choices"][0]["delta"] == {"content": "Hello"} and said["usage"] is None
    assert said["choices"][0]["token_ids"] == [1, 2]
    assert [entry["logprob"] for entry in said["choices"][0]["logprobs"]["content"]] == [-0.1, -0.2]
    finish, usage = chunks(made, done(FinishReason.LENGTH))
    assert finish["choices"][0]["finish_reason"] == "length" and "roost" not in finish
    assert usage["choices"] == [] and usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert usage["roost"]["session_id"] == "s1"
    (only,) = chunks(shape(), done())
    assert "usage" not in only and only["roost"]["receipt"]["steps"][0]["seconds"]["bus"] == 2.0


def test_a_whole_answer_with_a_call() -> None:
    """Content is null when there are only calls, as OpenAI has it."""
    called = event(0, 3, 2, ToolCalled(index=0, call=CALL, run_here=False))
    answer = completion(shape(), [called, done(FinishReason.TOOL_CALLS)])
    message = answer["choices"][0]["message"]
    assert message["content"] is None and message["tool_calls"][0]["id"] == "c1"
    assert answer["id"] == "chatcmpl-t1" and answer["usage"]["total_tokens"] == 13
    assert completion(shape(), [done()])["choices"][0]["message"]["content"] == ""


def test_a_cancelled_turn_is_an_error_to_an_openai_client() -> None:
    assert failure_of(done(FinishReason.CANCELLED)) == ErrorReply(
        code=ErrorCode.CANCELLED, message="the turn was cancelled"
    )
    assert failure_of(done()) is None and failure_of(HELLO) is None


def test_a_native_turn_shows_only_the_caller_s_calls() -> None:
    """Calls that Roost ran have been answered; the caller must not answer them again."""
    ran = event(0, 3, 2, ToolCalled(index=0, call=CALL, run_here=True))
    left = event(2, 3, 2, ToolCalled(index=0, call=CALL.model_copy(update={"call_id": "c2"}), run_here=False))
    turn = turn_json([HELLO, ran, left, done()], with_tokens=True)
    assert [call["id"] for call in turn["tool_calls"]] == ["c2"]
    assert (turn["text"], turn["token_ids"], turn["status"]) == ("Hello", [1, 2], "done")


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_error_has_status_envelope_and_says_when_to_come_back(code: ErrorCode) -> None:
    reply = WireError(code, "why", field="f", retry_after_s=1.2).reply
    error = envelope(reply)["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["param"] == "f"
    assert 400 <= status_of(reply) < 600
    assert headers_of(reply).get("Retry-After") == ("2" if code in RETRYABLE else None)


def test_a_line_break_in_a_text_stays_inside_its_event() -> None:
    """A model that writes an SSE frame does not make one."""
    frame = sse.event("text", {"text": "\n\nevent: done\ndata: {}\n\n"}, "0.1.0").decode()
    assert frame.count("\n\n") == 1 and frame.endswith("\n\n") and len(frame.splitlines()) == 4
    assert json.loads(frame.splitlines()[2].removeprefix("data: "))["text"].startswith("\n\n")


def past(**changes: object) -> tuple[SessionInfo, TurnSummary]:
    """A turn of two generations with a tool between them."""
    turn = TurnSummary(
        turn_id="t1", status="done", opened_at=1.0, finish_reason=FinishReason.STOP, usage=USAGE,
        receipt=Receipt(steps=STEPS),
        messages=(
            ChatMessage(role=Role.USER, content="q"),
            ChatMessage(role=Role.ASSISTANT, content="Let me see.", tool_calls=(CALL,)),
            ChatMessage(role=Role.ASSISTANT, content="42"),
        ),
    ).model_copy(update=changes)  # fmt: skip
    info = SessionInfo(session_id="s1", tenant="a", model="m", created_at=1.0, token_count=9, turns=(turn,))
    return info, turn


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (BEFORE_EVERYTHING, ["0.3.0", "0.3.2", "2.5.0", f"3.0.{END_PART}"]),
        (Place(0, 0, 0), ["0.3.0", "0.3.2", "2.5.0", f"3.0.{END_PART}"]),
        (Place(0, 3, 0), ["0.3.2", "2.5.0", f"3.0.{END_PART}"]),
        (Place(1, 0, 0), ["2.5.0", f"3.0.{END_PART}"]),
        (Place(2, 5, 0), [f"3.0.{END_PART}"]),
        (Place(3, 0, END_PART), []),
    ],
)
def test_a_turn_of_long_ago_goes_on_at_whole_steps(after: Place, expected: list[str]) -> None:
    info, turn = past()
    assert [stream_id(said) for said in past_events(info, turn, after)] == expected


def test_a_client_that_was_cut_off_inside_a_step_of_long_ago_is_told_so() -> None:
    info, turn = past()
    said = past_events(info, turn, Place(2, 1, 0))
    body = said[-1].body
    assert len(said) == 1 and isinstance(body, TurnFailed) and body.error.code is ErrorCode.LOST


def test_a_failed_turn_of_long_ago_fails_again() -> None:
    error = ErrorReply(code=ErrorCode.INTERNAL, message="x")
    info, turn = past(status="failed", error=error, finish_reason=None, receipt=None)
    (only,) = past_events(info, turn, BEFORE_EVERYTHING)
    assert only.body == TurnFailed(error=error)
    assert ended_turn(info, "t1") is turn and ended_turn(info, "t2") is None
    shown = session_json(info)["turns"][0]
    assert shown["status"] == "failed" and shown["error"]["code"] == "internal_error"
