"""Pure: what a turn shows its caller, each thing at its place, remembered so that it can be said again."""

from __future__ import annotations

from proto.sessions import StepGenerated, TurnClosed
from proto.tools import ToolResult
from proto.turns import TextDelta, ToolCalled, ToolReturned, TurnBody, TurnDone, TurnEvent, TurnFailed
from services.loop.turn_events import Emit

# Part of an event's place: 0 is text by tokens, 1 the text that was still held at a step's end, then the calls.
PART_TEXT, PART_HELD, PART_CALLS = 0, 1, 2


class Trail:
    """The events of one turn, in the order of their places. Bounded by the turn's tokens and steps."""

    def __init__(self, turn_id: str, session_id: str) -> None:
        self._turn_id, self._session_id = turn_id, session_id
        self._said: list[TurnEvent] = []

    def again(self) -> list[Emit]:
        """Everything said so far; readers drop what they have seen."""
        return [Emit(event) for event in self._said]

    def emit(self, step: int, offset: int, part: int, body: TurnBody) -> Emit:
        """Say it, and remember it."""
        event = TurnEvent(
            turn_id=self._turn_id, session_id=self._session_id, step=step, offset=offset, part=part, body=body
        )
        self._said.append(event)
        return Emit(event)

    def text(self, step: int, offset: int, delta: TextDelta) -> Emit:
        """Tokens and their text; `offset` counts the step's tokens after them."""
        return self.emit(step, offset, PART_TEXT, delta)

    def held(self, step: int, offset: int, text: str) -> list[Emit]:
        """Text that was held back when the step ended."""
        return [self.emit(step, offset, PART_HELD, TextDelta(token_ids=(), pieces=(text,)))] if text else []

    def calls(self, step: StepGenerated, *, run_here: bool) -> list[Emit]:
        """The calls of a recorded step."""
        return [
            self.emit(
                step.step, len(step.tokens), PART_CALLS + index, ToolCalled(index=index, call=call, run_here=run_here)
            )
            for index, call in enumerate(step.calls)
        ]

    def results(self, step: int, results: tuple[ToolResult, ...]) -> list[Emit]:
        """The results of a recorded answer."""
        return [
            self.emit(
                step,
                index,
                PART_TEXT,
                ToolReturned(
                    call_id=result.call_id,
                    name=result.name,
                    outcome=result.outcome.value,
                    content=result.content,
                    seconds=result.seconds,
                ),
            )
            for index, result in enumerate(results)
        ]

    def check_integrity(self) -> None:
        """Assert the order that readers rely on."""
        places = [event.place for event in self._said]
        assert places == sorted(places), "events are said in the order of their places"


def terminal_event(session_id: str, closed: TurnClosed) -> TurnEvent:
    """The one event that ends a turn, made from its last record, so that it can be said again at any time."""
    body: TurnBody
    if closed.error is not None:
        body = TurnFailed(error=closed.error)
    else:
        assert closed.finish_reason is not None
        body = TurnDone(finish_reason=closed.finish_reason, usage=closed.usage, receipt=closed.receipt)
    return TurnEvent(turn_id=closed.turn_id, session_id=session_id, step=closed.steps, offset=0, part=0, body=body)
