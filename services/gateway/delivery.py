"""From a turn's events to an HTTP answer: a stream or one object. An error that comes first is an error status.

The first events decide: until something but `started` is heard nothing is sent, for a short while, so that a turn which is
refused at once (no such session, prompt too long) is an HTTP error and not a stream that fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from aiohttp import web

from proto.errors import ErrorReply
from proto.turns import TextDelta, ToolCalled, TurnEvent, TurnStarted
from services.gateway import sse
from services.gateway.metrics import CLIENTS_GONE, TTFT_SECONDS, TURN_SECONDS
from services.gateway.turns import Events
from services.gateway.web import BEGAN_AT, Kit, error_response
from services.gateway.writer import ClientGone, SseWriter
from shared.log import get_logger

# After `started` the loop's refusal follows within milliseconds, and its first token after a prefill.
REFUSAL_WAIT_S: Final = 1.0

ToBytes = Callable[[TurnEvent], bytes]
FailureOf = Callable[[TurnEvent], ErrorReply | None]

log = get_logger()


class Delivery:
    """One answer to one request."""

    def __init__(self, kit: Kit, request: web.Request, turn_id: str, failure_of: FailureOf) -> None:
        self._kit, self._request, self._turn_id, self._failure_of = kit, request, turn_id, failure_of
        self._began_at: float = request[BEGAN_AT]
        self._has_text = False

    async def whole(self, events: Events, to_response: Callable[[Sequence[TurnEvent]], web.Response]) -> web.Response:
        """Wait for the end and answer with one object, or with the error that the turn ended in."""
        said: list[TurnEvent] = []
        while not events.is_over:
            event = await self._next(events, self._later())
            if event is None:
                continue
            failure = self._failure_of(event)
            if failure is not None:
                return error_response(failure, self._headers(event.session_id))
            said.append(event)
        assert said, "a turn has a terminal event"
        response = to_response(said)
        response.headers.update(self._headers(said[-1].session_id))
        return response

    async def stream(
        self, events: Events, to_bytes: ToBytes, *, head: bytes = b"", tail: bytes = b""
    ) -> web.StreamResponse:
        """Pass events on as they come. `head` is sent first, `tail` after an end that is no failure."""
        first, failure = await self._first(events)
        session_id = first[-1].session_id if first else ""
        if failure is not None:
            return error_response(failure, self._headers(session_id))
        writer = SseWriter(self._request, self._headers(session_id), self._kit.settings.gateway_stall_s)
        try:
            await writer.open()
            await writer.write(head + b"".join(map(to_bytes, first)))
            is_good = await self._rest(events, writer, to_bytes, bool(first) and first[-1].is_terminal)
            if is_good and tail:
                await writer.write(tail)
            await writer.close()
        except ClientGone as gone:
            CLIENTS_GONE.labels(why=gone.why).inc()
            log.info("client_gone", turn=self._turn_id, why=gone.why)
        return writer.response

    async def _first(self, events: Events) -> tuple[list[TurnEvent], ErrorReply | None]:
        """The events that came before the answer had to begin, and the failure that is the whole answer, if there is one."""
        first: list[TurnEvent] = []
        until = self._later()
        while not events.is_over:
            event = await self._next(events, until)
            if event is None:
                break
            failure = self._failure_of(event)
            if failure is not None and all(isinstance(earlier.body, TurnStarted) for earlier in first):
                return [event], failure
            first.append(event)
            if not isinstance(event.body, TurnStarted):
                break
            until = self._kit.clock.monotonic() + REFUSAL_WAIT_S
        return first, None

    async def _rest(self, events: Events, writer: SseWriter, to_bytes: ToBytes, is_good: bool) -> bool:
        while not events.is_over:
            event = await self._next(events, self._later())
            if event is not None:
                is_good = event.is_terminal and self._failure_of(event) is None
                await writer.write(to_bytes(event))
            elif not events.is_over:
                await writer.write(sse.HEARTBEAT)
        return is_good

    async def _next(self, events: Events, until: float) -> TurnEvent | None:
        event = await events.next(until)
        if event is not None:
            took_s = self._kit.clock.monotonic() - self._began_at
            if not self._has_text and isinstance(event.body, TextDelta | ToolCalled):
                self._has_text = True
                TTFT_SECONDS.observe(took_s)
            if event.is_terminal:
                TURN_SECONDS.observe(took_s)
        return event

    def _later(self) -> float:
        return self._kit.clock.monotonic() + self._kit.settings.gateway_heartbeat_s

    def _headers(self, session_id: str) -> dict[str, str]:
        headers = {"X-Roost-Turn-Id": self._turn_id}
        return headers | ({"X-Roost-Session-Id": session_id} if session_id else {})
