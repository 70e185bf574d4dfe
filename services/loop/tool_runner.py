"""Runs the calls of one step at the tools service, all at once, and makes a result of whatever happens to each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from proto.chat import ToolCall
from proto.errors import RETRYABLE, WireError
from proto.sessions import SessionOpened, TurnOpened
from proto.subjects import RUN_TOOL
from proto.tools import RunTool, ToolOutcome, ToolResult
from services.loop.tool_parsing import MALFORMED
from shared.bus import Bus
from shared.clock import Clock

RETRY_S: Final = 0.5
# A call may use what is left of the turn's deadline, but an answer that takes longer than this is asked for again: the
# claim at the tools service makes that safe, and a killed replica is noticed.
ANSWER_S_MAX: Final = 60.0


def interrupted(calls: Sequence[ToolCall], reason: str) -> tuple[ToolResult, ...]:
    """Results that say what is known of calls that were given up: nothing (F-RST-01)."""
    return tuple(
        ToolResult(
            call_id=call.call_id,
            name=call.name,
            outcome=ToolOutcome.UNKNOWN,
            content=f"The call was interrupted ({reason}); whether it had an effect is not known.",
            seconds=0.0,
        )
        for call in calls
    )


class ToolRunner:
    """Holds nothing between steps."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus, self._clock = bus, clock

    async def run(self, opened: SessionOpened, turn: TurnOpened, calls: Sequence[ToolCall]) -> tuple[ToolResult, ...]:
        """Results in call order. Raises nothing but cancellation."""
        return tuple(await asyncio.gather(*(self._one(opened, turn, call) for call in calls)))

    async def _one(self, opened: SessionOpened, turn: TurnOpened, call: ToolCall) -> ToolResult:
        if call.name == MALFORMED:
            return _bad_call(call, 'not a JSON object of the form {"name": ..., "arguments": {...}}')
        if call.name not in opened.server_tools:
            return _bad_call(
                call, f"there is no tool {call.name!r}; there are: {', '.join(opened.server_tools) or 'none'}"
            )
        request = RunTool(
            session_id=opened.session_id,
            turn_id=turn.turn_id,
            request_id=turn.request_id,
            call_id=call.call_id,
            tenant=opened.tenant,
            name=call.name,
            arguments=call.arguments,
            deadline_at=turn.deadline_at,
        )
        while True:
            left_s = turn.deadline_at - self._clock.now()
            try:
                return await self._bus.request(
                    RUN_TOOL, request, ToolResult, timeout_s=max(0.5, min(left_s, ANSWER_S_MAX))
                )
            except WireError as failed:
                if failed.code not in RETRYABLE or left_s <= RETRY_S:
                    return interrupted([call], str(failed))[0]
                await self._clock.sleep(failed.reply.retry_after_s or RETRY_S)


def _bad_call(call: ToolCall, problem: str) -> ToolResult:
    return ToolResult(
        call_id=call.call_id, name=call.name, outcome=ToolOutcome.BAD_CALL, content=f"Bad call: {problem}.", seconds=0.0
    )
