"""What an assignment waits for: the engine's claim, the kvstore's blocks, the kvstore's word. One task an assignment.

    claim -> ClaimAnswered     fetch -> FetchEnded     start -> nothing, or the engine's refusal     flush -> FlushEnded

`cancel` ends the task and then cancels the request in the engine, so nothing that the task began outlives it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from proto.errors import ErrorReply, WireError
from proto.ids import ROOT_KEY
from proto.receipt import Source
from shared.clock import Clock
from shared.engine.protocol import BadGrammar, BadLoad, Claim, EngineRequest, NeverFits, PoolFull, RequestFailed
from shared.engine.thread import EngineThread
from shared.kv_client import KvClient
from shared.kv_reader import WantedBlock
from shared.worker.admission import claim_refusal
from shared.worker.events import (
    ClaimAnswered,
    EngineTold,
    Event,
    FetchBlocks,
    Fetched,
    FetchEnded,
    FlushEnded,
    FlushPuts,
)
from shared.worker.puts import PutQueue

# Loads that wait for the engine's step in progress: each holds a body, and is a place in the engine's queue of commands.
LOADS_COUNT_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class Parts:
    """What jobs use."""

    thread: EngineThread
    kv: KvClient
    puts: PutQueue
    clock: Clock
    block_tokens: int


class Jobs:
    """Owns the tasks. Every outcome goes to `tell`; `spawn` runs a task whose bug ends the process."""

    def __init__(
        self,
        parts: Parts,
        *,
        tell: Callable[[Event], None],
        spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
    ) -> None:
        self._thread, self._kv, self._puts, self._clock = parts.thread, parts.kv, parts.puts, parts.clock
        self._block_tokens = parts.block_tokens
        self._tell, self._spawn = tell, spawn
        self._tasks: dict[str, asyncio.Task[Any]] = {}

    def claim(self, request: EngineRequest) -> None:
        """Have the engine admit it."""
        self._begin(request.request_id, self._claim(request))

    def fetch(self, ask: FetchBlocks) -> None:
        """Load what there is."""
        self._begin(ask.assignment_id, self._fetch(ask))

    def start(self, assignment_id: str) -> None:
        """Compute the rest."""
        self._begin(assignment_id, self._start(assignment_id))

    def flush(self, ask: FlushPuts) -> None:
        """Wait for the kvstore."""
        self._begin(ask.assignment_id, self._flush(ask))

    def cancel(self, assignment_id: str) -> None:
        """Stop all of it and give the engine's blocks back."""
        task = self._tasks.pop(assignment_id, None)
        if task is not None:
            task.cancel()
        self._thread.cancel(assignment_id)

    def _begin(self, assignment_id: str, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks[assignment_id] = self._spawn(work)

        def ended(_: asyncio.Task[Any]) -> None:
            # The next phase's task may have taken its place.
            if self._tasks.get(assignment_id) is task:
                del self._tasks[assignment_id]

        task.add_done_callback(ended)

    async def _claim(self, request: EngineRequest) -> None:
        answer: Claim | ErrorReply
        try:
            answer = await self._thread.claim(request)
        except (PoolFull, NeverFits, BadGrammar, ValueError, WireError) as trouble:
            answer = claim_refusal(trouble)
        self._tell(ClaimAnswered(self._clock.monotonic(), request.request_id, answer))

    async def _start(self, assignment_id: str) -> None:
        try:
            await self._thread.start(assignment_id)
        except WireError as refused:
            failed = RequestFailed(assignment_id, refused.reply.message)
            self._tell(EngineTold(self._clock.monotonic(), (failed,)))

    async def _flush(self, ask: FlushPuts) -> None:
        is_stored = False
        ends_at = self._clock.monotonic() + ask.within_s
        try:
            await asyncio.wait_for(self._puts.handed_over(), ask.within_s)
            is_stored = self._kv.is_connected and await self._kv.flush(max(ends_at - self._clock.monotonic(), 0.0))
        except TimeoutError:
            is_stored = False
        self._tell(FlushEnded(self._clock.monotonic(), ask.assignment_id, is_stored))

    # -- fetch

    async def _fetch(self, ask: FetchBlocks) -> None:
        fetched = await self._load(ask)
        self._tell(FetchEnded(self._clock.monotonic(), ask.assignment_id, fetched))

    async def _load(self, ask: FetchBlocks) -> Fetched:
        """Blocks go to the engine as they come; what counts is what the engine took."""
        fetch = self._kv.fetch(ask.namespace, ask.keys[0], _wanted(ask, self._block_tokens))
        loads: list[asyncio.Future[None]] = []
        sources: list[Source] = []
        cut: str | None = f"loading was cut after {ask.within_s:.2f} s"
        ends_at = self._clock.monotonic() + ask.within_s
        blocks = aiter(fetch)
        try:
            while (left_s := ends_at - self._clock.monotonic()) > 0:
                async with asyncio.timeout(min(left_s, ask.stall_s)):
                    block = await anext(blocks, None)
                if block is None:
                    cut = None
                    break
                load = self._thread.load(ask.assignment_id, ask.first + len(loads), block.body)
                load.add_done_callback(_expect)
                loads.append(load)
                sources.append(block.source)
                if len(loads) >= LOADS_COUNT_MAX:
                    await asyncio.wait([loads[-LOADS_COUNT_MAX]])
        except TimeoutError:
            cut = f"no block came within {min(ask.stall_s, ask.within_s):.2f} s"
        finally:
            await fetch.close()
        if loads:
            await asyncio.wait(loads)
        taken = 0
        for load in loads:
            failed = load.exception()
            if failed is not None:
                # The engine takes blocks in order, so those after it were refused too.
                if not isinstance(failed, WireError | BadLoad):
                    raise failed
                cut = f"the engine did not take a block: {failed}"
                break
            taken += 1
        return Fetched(
            blocks=Counter(sources[:taken]),
            bytes_moved=fetch.bytes_moved,
            rejected=fetch.rejected,
            fallback=fetch.fallback or cut,
        )


def _wanted(ask: FetchBlocks, block_tokens: int) -> list[WantedBlock]:
    """The blocks as their frames must describe them."""
    return [
        WantedBlock(
            key=ask.keys[index],
            parent=ask.keys[index - 1] if index else ROOT_KEY,
            tokens=ask.tokens[index * block_tokens : (index + 1) * block_tokens],
        )
        for index in range(ask.first, ask.last)
    ]


def _expect(load: asyncio.Future[None]) -> None:
    """A failure of this future may go unseen, when its waiter was cancelled."""
    if not load.cancelled():
        load.exception()
