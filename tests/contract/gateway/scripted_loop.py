"""Stands in for loop and worker: takes turns from the real queue and says what a script says, on the real trail."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from proto.chat import FinishReason, ToolCall
from proto.errors import ErrorCode, ErrorReply, WireError
from proto.fleet import Heartbeat, ModelCard, ServiceState
from proto.receipt import Receipt, Seconds, Source, StepReceipt, Usage
from proto.sessions import CreateSession, GetSession, SessionInfo, TurnSummary
from proto.subjects import CANCEL_TURN, CREATE_SESSION, GET_SESSION, HEARTBEAT, START_TURN, TURN_EVENT
from proto.turns import (
    CancelTurn,
    StartTurn,
    TextDelta,
    ToolCalled,
    ToolReturned,
    TurnBody,
    TurnDone,
    TurnEvent,
    TurnFailed,
    TurnStarted,
)
from shared.bus import Bus, WorkItem

MODEL = "tiny"
WORDS = ("Paris", " is", " the", " capital", ".")
RECEIPT = Receipt(
    steps=(
        StepReceipt(
            step=0, worker_id="decode-0", prompt_tokens=40, generated_tokens=len(WORDS),
            tokens_by_source={Source.RESIDENT: 32, Source.COMPUTED: 8}, seconds=Seconds(decode=0.1, total=0.3),
        ),
    ),
    seconds=Seconds(decode=0.1, total=0.3),
    tokens_by_source={Source.RESIDENT: 32, Source.COMPUTED: 8},
)  # fmt: skip
USAGE = Usage(prompt_tokens=40, cached_tokens=32, completion_tokens=len(WORDS))

Script = Callable[["ScriptedLoop", StartTurn], Awaitable[None]]


class ScriptedLoop:
    """One loop and the card of one worker. `script` plays every turn; by default it says WORDS and ends."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.started: list[StartTurn] = []
        self.cancelled: list[str] = []
        self.heard = asyncio.Event()
        self.sessions: dict[str, SessionInfo] = {}
        self.script: Script = answer

    async def start(self) -> None:
        await self.bus.subscribe(CANCEL_TURN, CancelTurn, self._cancel)
        await self.bus.serve(CREATE_SESSION, CreateSession, self._create)
        await self.bus.serve(GET_SESSION, GetSession, self._get)
        await self.bus.work(START_TURN, StartTurn, self._take, limit=1_000)
        self.bus.spawn(self._beats())

    async def _beats(self) -> None:
        card = ModelCard(
            worker_id="decode-0", epoch=1, model=MODEL, fingerprint="f", tokenizer_digest="t", kv_dtype="float32",
            layout_version=1, block_tokens=16, context_tokens=512, block_bytes=1024,
        )  # fmt: skip
        while True:
            for service, shown in (("loop", None), ("decode", card)):
                beat = Heartbeat(
                    service=service, instance_id=f"{service}-0", epoch=1, state=ServiceState.READY, host="h", pid=1,
                    metrics_port=0, started_at=0.0, sent_at=0.0, model_card=shown,
                )  # fmt: skip
                with suppress(WireError):
                    await self.bus.publish(HEARTBEAT, beat, service=service)
            await asyncio.sleep(0.1)

    def _cancel(self, cancel: CancelTurn) -> None:
        self.cancelled.append(cancel.turn_id)
        self.heard.set()

    async def _create(self, create: CreateSession) -> SessionInfo:
        info = SessionInfo(
            session_id=create.session_id, tenant=create.tenant, model=create.model, created_at=1.0, token_count=0,
            tools=tuple(tool.name for tool in create.tools),
        )  # fmt: skip
        return self.sessions.setdefault(create.session_id, info)

    async def _get(self, get: GetSession) -> SessionInfo:
        info = self.sessions.get(get.session_id)
        if info is None or info.tenant != get.tenant:
            raise WireError(ErrorCode.NOT_FOUND, "no such session", field="session_id")
        return info

    async def _take(self, start: StartTurn, item: WorkItem) -> None:
        self.started.append(start)
        self.heard.set()
        await self.script(self, start)

    async def until(self, happened: Callable[[], object]) -> None:
        """Until something that this loop hears made it true."""
        async with asyncio.timeout(10):
            while not happened():
                self.heard.clear()
                await self.heard.wait()

    def ended(self, session_id: str, summary: TurnSummary) -> None:
        """The session's log shows this turn as over."""
        info = self.sessions[session_id]
        self.sessions[session_id] = info.model_copy(update={"turns": (*info.turns, summary)})

    # -- what scripts say

    async def say(self, start: StartTurn, place: tuple[int, int, int], body: TurnBody) -> None:
        event = TurnEvent(
            turn_id=start.turn_id, session_id=start.session_id, step=place[0], offset=place[1], part=place[2], body=body
        )
        await self.bus.publish(TURN_EVENT, event, turn_id=start.turn_id)

    async def begin(self, start: StartTurn) -> None:
        await self.say(start, (0, 0, 0), TurnStarted(model=MODEL, prompt_tokens=40))

    async def words(self, start: StartTurn, first: int = 0, last: int = len(WORDS)) -> None:
        for index in range(first, last):
            logprobs = None if start.sampling.logprobs is None else (-0.5,)
            delta = TextDelta(token_ids=(100 + index,), pieces=(WORDS[index],), logprobs=logprobs)
            await self.say(start, (0, index + 1, 0), delta)

    async def done(self, start: StartTurn, reason: FinishReason = FinishReason.STOP) -> None:
        await self.say(start, (1, 0, 0), TurnDone(finish_reason=reason, usage=USAGE, receipt=RECEIPT))

    async def fail(self, start: StartTurn, code: ErrorCode, field: str | None = None) -> None:
        error = ErrorReply(code=code, message="it went wrong", field=field)
        await self.say(start, (0, 0, 0), TurnFailed(error=error))


async def answer(loop: ScriptedLoop, start: StartTurn) -> None:
    """An ordinary turn."""
    await loop.begin(start)
    await loop.words(start)
    await loop.done(start)


async def call_of_caller(loop: ScriptedLoop, start: StartTurn) -> None:
    """The model calls a tool of the caller."""
    await loop.begin(start)
    call = ToolCall(call_id="call_1", name="get_weather", arguments='{"city":"Paris"}')
    await loop.say(start, (0, 0, 2), ToolCalled(index=0, call=call, run_here=False))
    await loop.done(start, FinishReason.TOOL_CALLS)


async def call_run_here(loop: ScriptedLoop, start: StartTurn) -> None:
    """The model calls a tool that Roost runs, then answers."""
    await loop.begin(start)
    call = ToolCall(call_id="call_1", name="python", arguments="{}")
    await loop.say(start, (0, 0, 2), ToolCalled(index=0, call=call, run_here=True))
    result = ToolReturned(call_id="call_1", name="python", outcome="ok", content="42", seconds=0.1)
    await loop.say(start, (1, 0, 0), result)
    await loop.say(start, (2, 1, 0), TextDelta(token_ids=(7,), pieces=("42",)))
    await loop.say(start, (3, 0, 0), TurnDone(finish_reason=FinishReason.STOP, usage=USAGE, receipt=RECEIPT))


async def never_ends(loop: ScriptedLoop, start: StartTurn) -> None:
    """Two words, then silence until somebody cancels it."""
    await loop.begin(start)
    await loop.words(start, 0, 2)
    await loop.until(lambda: start.turn_id in loop.cancelled)
    await loop.done(start, FinishReason.CANCELLED)
