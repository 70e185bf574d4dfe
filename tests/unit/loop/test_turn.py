"""The turn's state machine in the situations that break agent loops."""

from __future__ import annotations

import pytest

from proto.chat import FinishReason, Sampling, ToolChoice
from proto.errors import ErrorCode, ErrorReply
from proto.generate import GenerateFailed, Queued, TokensOut, Working
from proto.receipt import Source
from proto.sessions import StepGenerated, ToolsAnswered, TurnClosed
from proto.turns import TurnDone, TurnFailed
from services.loop.turn_events import (
    Append,
    BusRestored,
    Cancelled,
    Confirm,
    Emit,
    GiveUpTools,
    Revoke,
    RunTools,
    Submit,
    SubmitFailed,
    Ticked,
)
from tests.unit.loop.drive import Drive, Log, opened_log, read, tokens_of, turn_opened

CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "1"}}\n</tool_call>'
THEIRS = '<tool_call>\n{"name": "theirs", "arguments": {}}\n</tool_call>'


def lost() -> GenerateFailed:
    return GenerateFailed(error=ErrorReply(code=ErrorCode.LOST, message="worker died"))


def done_of(drive: Drive) -> TurnDone:
    body = drive.events[-1].body
    assert isinstance(body, TurnDone), body
    return body


def test_a_plain_turn_is_recorded_before_its_end_is_shown() -> None:
    """Text streams; the terminal event comes only after step and end are in the log, in one record."""
    drive = Drive(opened_log())
    drive.appends_at_once = False
    drive.stream("Hi", ended=True)
    drive.finish(3)
    body = drive.pending[0].body
    assert not drive.events[-1].is_terminal and isinstance(body, TurnClosed) and body.final is not None
    assert len(body.final.tokens) == 3 and body.receipt.steps == (body.final.receipt,)
    drive.append(1.0)
    assert done_of(drive).finish_reason is FinishReason.STOP
    assert done_of(drive).usage.prompt_tokens == 1 and done_of(drive).usage.completion_tokens == 3
    assert read(drive.events)[0] == "Hi" and drive.is_over


def test_the_next_prompt_begins_with_this_prompt_and_answer() -> None:
    """Invariant 3: turn N's prompt and generated ids are a prefix of turn N+1's prompt."""
    first = Drive(opened_log())
    first.answer("Hello")
    before = first.request.tokens + tokens_of("Hello")
    log = first.log
    log.append(turn_opened("t2", "again"))
    second = Drive(log)
    assert second.request.tokens[: len(before)] == before
    assert second.request.tokens[len(before) :] == tokens_of("again", ended=False)


def test_a_lost_worker_costs_one_attempt_and_no_token() -> None:
    """kill -9 of decode: the next attempt gets prompt + emitted and goes on; every token once."""
    drive = Drive(opened_log())
    drive.stream("He")
    drive.say(lost())
    assert drive.request.attempt == 1_002 and drive.request.emitted == 2
    assert drive.request.tokens == (ord("Q"), *tokens_of("He", ended=False))
    drive.stream("llo", ended=True)
    drive.finish(6)
    assert read(drive.events)[0] == "Hello"
    assert done_of(drive).receipt.steps[0].attempts == 2


def test_a_token_of_an_old_attempt_is_dropped() -> None:
    """F-CAN-05: the worker that was given up wakes and goes on talking; nobody listens."""
    drive = Drive(opened_log())
    drive.say(lost())
    drive.say(TokensOut(first=0, token_ids=tokens_of("x", ended=False)), attempt=drive.request.attempt - 1)
    drive.answer("y")
    assert read(drive.events)[0] == "y"


def test_silence_is_noticed_and_signs_of_life_are_not_silence() -> None:
    """F-NAT-03: nobody says anything for 3.5 s: it is revoked and placed again; Queued and Working count as life."""
    drive = Drive(opened_log())
    for second in (1.0, 2.0, 3.0, 4.0):
        drive.say(Queued(depth=1) if second < 3 else Working(worker_id="w1"), now=second)
        drive.feed(Ticked(second + 0.9))
    assert len(drive.told_of(Submit)) == 1
    drive.feed(Ticked(8.0))
    assert [type(told) for told in drive.told[-3:]] == [Revoke, Confirm, Submit]


def test_a_hole_in_the_tokens_is_asked_for_again() -> None:
    """A message was lost on the bus: what follows the hole is not shown; the rest is generated again from the hole."""
    drive = Drive(opened_log())
    drive.stream("ab")
    drive.stream("e", first=4)
    assert drive.request.emitted == 2
    drive.stream("cde", ended=True)
    drive.finish(6)
    assert read(drive.events)[0] == "abcde"


def test_a_step_that_ended_is_not_asked_for_again() -> None:
    """All tokens came, the worker died before it could say so: the end-of-sequence token itself says it."""
    drive = Drive(opened_log())
    drive.say(Working(worker_id="w1", tokens_by_source={Source.NVME: 1}))
    drive.stream("ok", ended=True)
    drive.say(lost())
    assert done_of(drive).finish_reason is FinishReason.STOP
    assert len(drive.told_of(Submit)) == 1
    assert done_of(drive).usage.cached_tokens == 1


@pytest.mark.parametrize("code", [ErrorCode.OVERLOADED, ErrorCode.UNAVAILABLE])
def test_a_router_that_is_away_is_asked_again_after_a_while(code: ErrorCode) -> None:
    """kill -9 of the router: no responders for a second, then it is back."""
    drive = Drive(opened_log())
    drive.feed(SubmitFailed(1.0, ErrorReply(code=code, message="away", retry_after_s=1.0)))
    drive.feed(Ticked(1.5))
    assert len(drive.told_of(Submit)) == 1
    drive.feed(Ticked(2.1))
    drive.answer("ok")
    assert read(drive.events)[0] == "ok"


def test_an_error_that_repeating_cannot_mend_fails_the_turn_with_its_field() -> None:
    """A grammar that does not compile: the turn fails at once with the worker's own words."""
    drive = Drive(opened_log())
    drive.say(GenerateFailed(error=ErrorReply(code=ErrorCode.BAD_GRAMMAR, message="no", field="response_format")))
    body = drive.events[-1].body
    assert isinstance(body, TurnFailed) and body.error.field == "response_format"
    assert drive.log.fold().closed["t1"].error == body.error


def test_a_prompt_beyond_the_window_is_refused_with_the_numbers() -> None:
    """F-CTX-01: window 5; 5 prompt tokens leave no room, 4 leave one."""
    refused = Drive(opened_log(prompt="12345"), context_tokens=5)
    body = refused.events[-1].body
    assert isinstance(body, TurnFailed) and body.error.code is ErrorCode.CONTEXT_LENGTH
    assert "5 tokens" in body.error.message and not refused.told_of(Submit)
    assert Drive(opened_log(prompt="1234"), context_tokens=5).request.sampling.max_tokens == 1


def test_a_turn_that_failed_before_its_answer_leaves_the_session_as_it_was() -> None:
    """A paste too long for the window: the next message is not refused because of it, and it is not in the prompt."""
    first = Drive(opened_log(prompt="12"), context_tokens=20)
    first.answer("Hello")
    before = first.log.fold().tokens
    log = first.log
    log.append(turn_opened("t2", "x" * 30))
    refused = Drive(log, context_tokens=20)
    assert isinstance(refused.events[-1].body, TurnFailed)
    session = log.fold()
    assert session.tokens == before and session.describe().turns[-1].status == "failed"
    log.append(turn_opened("t3", "short"))
    assert list(Drive(log, context_tokens=20).request.tokens) == [*before, *tokens_of("short", ended=False)]


def test_a_forced_call_without_its_tool_fails_the_turn_and_frees_the_session() -> None:
    """The refusal is on the log, so the next turn is not kept waiting by one that never ended."""
    drive = Drive(opened_log(tool_choice=ToolChoice(mode="named", name="nosuch")))
    body = drive.events[-1].body
    assert isinstance(body, TurnFailed) and body.error.code is ErrorCode.BAD_REQUEST
    assert body.error.field == "tool_choice.name" and not drive.told_of(Submit)
    session = drive.log.fold()
    assert session.turn is None and session.tokens == []


def test_a_turn_that_failed_in_its_answer_keeps_what_was_said() -> None:
    """What the caller has seen is part of the session, and so is the question."""
    drive = Drive(opened_log())
    drive.stream("Hel")
    drive.say(GenerateFailed(error=ErrorReply(code=ErrorCode.BAD_GRAMMAR, message="no")))
    assert drive.log.fold().tokens == [*tokens_of("Q", ended=False), *tokens_of("Hel", ended=False)]


def test_a_tool_is_run_once_and_its_result_goes_on_the_log() -> None:
    """The call is recorded before it is run, the result before the model sees it."""
    drive = Drive(opened_log())
    drive.answer(CALL)
    runs = drive.told_of(RunTools)
    assert len(runs) == 1 and isinstance(drive.log.records[-1].body, StepGenerated)
    drive.tools_return("42")
    assert isinstance(drive.log.records[-1].body, ToolsAnswered)
    assert drive.request.tokens[-2:] == (ord("4"), ord("2"))
    drive.answer("It is 42.")
    text, kinds, _ = read(drive.events)
    assert (text, kinds) == ("It is 42.", ["started", "tool_call", "tool_result", "done"])
    assert done_of(drive).receipt.tool_calls == 1 and done_of(drive).receipt.seconds.tool == 0.5


def test_a_callers_tool_ends_the_turn() -> None:
    """OpenAI clients run their own tools: finish_reason tool_calls, and the call with an id."""
    drive = Drive(opened_log())
    drive.answer(THEIRS)
    assert done_of(drive).finish_reason is FinishReason.TOOL_CALLS
    assert not drive.told_of(RunTools)


def test_the_bound_on_steps_ends_a_model_that_only_calls() -> None:
    """Three rounds of calls with max_steps 3: the last calls are answered, then the turn ends with `length`."""
    drive = Drive(opened_log(max_steps=3))
    for _ in range(3):
        drive.answer(CALL)
        drive.tools_return("again")
    assert done_of(drive).finish_reason is FinishReason.LENGTH
    assert len(drive.told_of(Submit)) == 3


def test_cancel_keeps_what_was_delivered() -> None:
    """F-CAN-02: stop in the middle; the session holds the tokens the caller saw, and the next turn follows them."""
    drive = Drive(opened_log())
    drive.stream("Hel")
    drive.feed(Cancelled(1.0, "stop"))
    drive.stream("lo", first=3)
    assert done_of(drive).finish_reason is FinishReason.CANCELLED
    assert isinstance(drive.told_of(Revoke)[0], Revoke)
    assert drive.log.fold().tokens == [ord("Q"), *tokens_of("Hel", ended=False)]


def test_cancel_while_a_tool_runs_leaves_no_call_without_an_answer() -> None:
    """F-RST-01: the call gets a durable 'not known' before the turn ends."""
    drive = Drive(opened_log())
    drive.answer(CALL)
    drive.feed(Cancelled(1.0, "stop"))
    assert len(drive.told_of(GiveUpTools)) == 1
    drive.tools_return("interrupted")
    assert done_of(drive).finish_reason is FinishReason.CANCELLED
    assert isinstance(drive.log.records[-2].body, ToolsAnswered)


def test_cancel_during_an_append_waits_for_it() -> None:
    """The record is on its way to the log; the cancel takes effect behind it. A turn that was complete stays so."""
    drive = Drive(opened_log())
    drive.appends_at_once = False
    drive.stream(CALL, ended=True)
    drive.finish(len(CALL) + 1)
    drive.feed(Cancelled(1.0, "stop"))
    drive.appends_at_once = True
    drive.append(1.0)
    assert not drive.told_of(RunTools) and drive.told_of(GiveUpTools)
    drive.tools_return("interrupted")
    assert done_of(drive).finish_reason is FinishReason.CANCELLED
    late = Drive(opened_log())
    late.appends_at_once = False
    late.stream("ok", ended=True)
    late.finish(3)
    late.feed(Cancelled(1.0, "stop"))
    late.append(1.0)
    assert done_of(late).finish_reason is FinishReason.STOP


def test_the_deadline_ends_a_turn_wherever_it_stands() -> None:
    """Decode hangs, or a tool does: the caller gets a typed error at the deadline."""
    hanging = Drive(opened_log())
    hanging.stream("a", now=99.0)
    hanging.feed(Ticked(100.0))
    body = hanging.events[-1].body
    assert isinstance(body, TurnFailed) and body.error.code is ErrorCode.DEADLINE
    tool = Drive(opened_log())
    tool.answer(CALL)
    tool.feed(Ticked(100.0))
    tool.tools_return("interrupted")
    assert isinstance(tool.events[-1].body, TurnFailed)


def test_a_stop_string_revokes_the_rest() -> None:
    """The loop sees text, workers see tokens: the loop ends the step and the worker is told to stop."""
    drive = Drive(opened_log(sampling=Sampling(max_tokens=50, stop=("\nUser:",))))
    drive.stream("Hi\nUser: what")
    assert done_of(drive).finish_reason is FinishReason.STOP
    assert read(drive.events)[0] == "Hi" and len(drive.told_of(Revoke)) == 1


def test_a_broker_that_lost_its_memory_hears_everything_again() -> None:
    """NATS restarts in the middle: the turn's events are said again and a reader that saw them drops them."""
    drive = Drive(opened_log())
    drive.stream("Hel")
    before = list(drive.events)
    drive.feed(BusRestored(1.0))
    drive.stream("lo", first=3, ended=True)
    drive.finish(6)
    assert read(before, drive.events)[0] == "Hello"


def test_a_forced_choice_constrains_the_first_step_only() -> None:
    """tool_choice names python: the first generation carries its grammar, the one after the result is free."""
    drive = Drive(opened_log(tool_choice=ToolChoice(mode="named", name="python")))
    assert drive.request.grammar is not None and "python" in drive.request.grammar.text
    drive.answer(CALL)
    drive.tools_return("1")
    assert drive.request.grammar is None


def run_to_end(log: Log, **life: object) -> Drive:
    """A life that meets no trouble: the model calls a tool, then answers."""
    drive = Drive(log, **life)  # type: ignore[arg-type]
    while not drive.is_over:
        if drive.told and isinstance(drive.told[-1], RunTools):
            drive.tools_return("42")
            continue
        whole = CALL if not drive.session.turn or not drive.session.turn.steps else "It is 42."
        rest = whole[drive.request.emitted :]
        drive.stream(rest, ended=True)
        if not drive.is_over and not isinstance(drive.told[-1], RunTools | Submit):
            drive.finish(len(whole) + 1)
    return drive


def test_a_loop_killed_after_any_record_says_the_same_turn() -> None:
    """kill -9 of the loop at every record, with its events on the trail: every token once, one end."""
    unfaulted = run_to_end(opened_log())
    expected = read(unfaulted.events)
    for kept in range(2, len(unfaulted.log.records) + 1):
        log = Log(unfaulted.log.records[:kept])
        if log.fold().turn is None:
            continue
        # A terminal event follows its record, so a life that did not write that record has not said it.
        first_life = [event for event in unfaulted.events if event.step < kept - 1 and not event.is_terminal]
        second = run_to_end(log, delivery=2)
        text, kinds, terminal = read(first_life, second.events)
        assert (text, kinds) == expected[:2] and len(terminal) == 1


@pytest.mark.parametrize("cut", range(9))
def test_a_loop_killed_after_any_token_says_the_same_turn(cut: int) -> None:
    """Tokens on the trail that no record holds yet are taken over as emitted, not generated again."""
    log = opened_log()
    first = Drive(log)
    first.stream("It is 42."[:cut])
    second = Drive(log, delivery=2, seen=tokens_of("It is 42."[:cut], ended=False))
    assert second.request.emitted == cut and second.request.attempt > first.request.attempt
    second.stream("It is 42."[cut:], ended=True)
    second.finish(10)
    assert read(first.events, second.events)[0] == "It is 42."


def test_a_loop_killed_after_the_last_token_does_not_generate_beyond_it() -> None:
    """The trail holds the end-of-sequence token: the step is recorded without asking any worker."""
    log = opened_log()
    second = Drive(log, delivery=2, seen=tokens_of("ok"))
    assert not second.told_of(Submit) and done_of(second).finish_reason is FinishReason.STOP


def test_nothing_follows_the_end() -> None:
    """Invariant 9: one terminal event, whatever comes late."""
    drive = Drive(opened_log())
    drive.answer("ok")
    count = len(drive.told)
    for event in (Cancelled(2.0, "late"), Ticked(200.0), BusRestored(2.0)):
        assert drive.feed(event) == []
    assert len(drive.told) == count and sum(event.is_terminal for event in drive.events) == 1
    assert isinstance(drive.told_of(Append)[-1], Append) and isinstance(drive.told_of(Emit)[-1], Emit)
