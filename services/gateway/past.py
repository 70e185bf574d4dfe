"""Pure: the events of a turn that ended, made again from its session's summary when its trail is gone.

A summary has the text of each step, not its tokens. So a step is said as a whole: a client that had none of it gets it
all, one that had all of it gets nothing, and one that was cut off inside it cannot go on: that part of its stream is lost.
"""

from __future__ import annotations

from proto.chat import ChatMessage, FinishReason, Role
from proto.errors import ErrorCode, ErrorReply
from proto.receipt import Receipt, StepReceipt
from proto.sessions import SessionInfo, TurnSummary
from proto.turns import Place, TextDelta, ToolCalled, TurnBody, TurnDone, TurnEvent, TurnFailed
from services.gateway.events import END_PART

# Parts of a place, as the loop gives them out: the calls of a step follow its text.
PART_CALLS = 2


def ended_turn(info: SessionInfo, turn_id: str) -> TurnSummary | None:
    """The turn in its session, if it is there and over."""
    for turn in info.turns:
        if turn.turn_id == turn_id and turn.status != "running":
            return turn
    return None


def past_events(info: SessionInfo, turn: TurnSummary, after: Place) -> tuple[TurnEvent, ...]:
    """What a client that has everything up to `after` still lacks. Ends with a terminal event, unless it has that too."""
    if after.part == END_PART:
        return ()
    receipt = turn.receipt or Receipt()
    events: list[TurnEvent] = []
    answers = [message for message in turn.messages if message.role is Role.ASSISTANT]
    # The messages of a turn begin with the caller's own, which may hold older answers; the steps are the last ones.
    answers = answers[len(answers) - len(receipt.steps) :] if receipt.steps else []
    for message, step in zip(answers, receipt.steps, strict=False):
        said = after.offset if after.step == step.step else 0
        if after.step > step.step:
            continue
        if 0 < said < step.generated_tokens:
            lost = ErrorReply(code=ErrorCode.LOST, message="this part of the stream is no longer kept; GET the session")
            return (*events, _event(info, turn, Place(step.step, said, 0), TurnFailed(error=lost)))
        events.extend(
            event
            for event in _step(info, turn, step, message)
            if event.place > after and not (said and isinstance(event.body, TextDelta))
        )
    end = receipt.steps[-1].step + 1 if receipt.steps else 0
    return (*events, _event(info, turn, Place(end, 0, 0), _end(turn, receipt)))


def _step(info: SessionInfo, turn: TurnSummary, step: StepReceipt, message: ChatMessage) -> list[TurnEvent]:
    events = []
    if message.content:
        text = TextDelta(token_ids=(), pieces=(message.content,))
        events.append(_event(info, turn, Place(step.step, step.generated_tokens, 0), text))
    # A turn that ended in calls left those of its last step to the caller; all others were run here.
    assert turn.receipt is not None
    run_here = turn.finish_reason is not FinishReason.TOOL_CALLS or step is not turn.receipt.steps[-1]
    for index, call in enumerate(message.tool_calls):
        body = ToolCalled(index=index, call=call, run_here=run_here)
        events.append(_event(info, turn, Place(step.step, step.generated_tokens, PART_CALLS + index), body))
    return events


def _end(turn: TurnSummary, receipt: Receipt) -> TurnBody:
    if turn.error is not None:
        return TurnFailed(error=turn.error)
    assert turn.finish_reason is not None, "a turn that ended well says why"
    return TurnDone(finish_reason=turn.finish_reason, usage=turn.usage, receipt=receipt)


def _event(info: SessionInfo, turn: TurnSummary, place: Place, body: TurnBody) -> TurnEvent:
    return TurnEvent(
        turn_id=turn.turn_id,
        session_id=info.session_id,
        step=place.step,
        offset=place.offset,
        part=place.part,
        body=body,
    )
