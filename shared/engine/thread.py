"""One named thread that owns an engine. The event loop asks it things and is told its events; it never computes itself.

    loop:    claim / load / start / ... -> command queue -> thread, between two steps, in order
    thread:  step() -> list of events -> loop.call_soon_threadsafe(on_events)

The thread sleeps on a condition while there is neither a command nor work. `run` is its life: it ends when `stop` was
called, and raises what the engine or `on_events` raised, so a service that spawns it ends with it.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from proto.errors import ErrorCode, WireError
from proto.ids import BlockKey
from shared.engine.protocol import (
    BadGrammar,
    BadLoad,
    Buffer,
    Claim,
    Engine,
    EngineEvent,
    EngineInfo,
    EngineRequest,
    EngineStats,
    NeverFits,
    PoolFull,
    SealedBlock,
)

# Commands that may wait for the step in progress. A worker has some tens of requests and loads block by block.
COMMANDS_COUNT_MAX: Final = 4_096
# Event lists the loop has not taken yet; the thread waits beyond this rather than fill memory.
UNDELIVERED_COUNT_MAX: Final = 256

# What a command may raise for its caller to handle; anything else is a bug and ends the thread.
_ANSWERS: Final = (PoolFull, NeverFits, BadGrammar, BadLoad, ValueError)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Command:
    """What to do with the engine, and who waits for the answer."""

    action: Callable[[Engine], Any]
    answer: asyncio.Future[Any]


class _ClaimAnswer(asyncio.Future[Claim]):
    """Queues the undoing in the moment it is cancelled: before any later command, so it never hits a later claim."""

    undo: Callable[[], object] | None = None

    def cancel(self, msg: Any | None = None) -> bool:
        cancelled = super().cancel(msg)
        if cancelled and self.undo is not None:
            self.undo()
        return cancelled


class EngineThread:
    """Owns the thread and, on it, the engine. Use it from the event loop that it was made on."""

    def __init__(self, make: Callable[[], Engine], on_events: Callable[[list[EngineEvent]], None]) -> None:
        self._make = make
        self._on_events = on_events
        self._loop = asyncio.get_running_loop()
        self._info: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._changed = threading.Condition()
        # Below: changed under `_changed`. The thread alone takes commands out, so it may look without the lock.
        self._commands: deque[_Command] = deque()
        self._undelivered = 0
        self._stopping = False
        # No thread runs: not yet, or not any more.
        self._idle = True
        # What `on_events` raised.
        self._bug: BaseException | None = None
        self._info.add_done_callback(_expect)

    async def run(self) -> None:
        """The thread's life, once; raises what ended it other than `stop`. Cancelling it stops the thread after its step."""
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        with self._changed:
            if self._stopping:
                _settle(self._info, partial(self._info.set_exception, _ended()))
                return
            self._idle = False
        living = self._loop.run_in_executor(pool, self._live)
        living.add_done_callback(self._settle_info)
        try:
            await living
            if self._bug is not None:
                raise self._bug
        finally:
            self._ask_to_stop()
            pool.shutdown(wait=False)

    async def ready(self) -> EngineInfo:
        """Wait until the engine is made. Raises what went wrong, or WireError(UNAVAILABLE) if it was stopped."""
        return await asyncio.shield(self._info)

    async def stop(self) -> None:
        """End the thread after the step in progress and wait for it. Commands that still wait are refused."""
        self._ask_to_stop()
        await asyncio.to_thread(self._wait_for_end)

    def claim(self, request: EngineRequest) -> asyncio.Future[Claim]:
        """See Engine. If the future is cancelled before it is done, nothing is held by it."""
        answer = _ClaimAnswer(loop=self._loop)
        claimed = False

        def claim(engine: Engine) -> Claim:
            nonlocal claimed
            result = engine.claim(request)
            claimed = True
            return result

        def undo(engine: Engine) -> None:
            # Only what this very claim has taken: another one with its id may be here.
            if claimed:
                engine.cancel(request.request_id)

        answer.undo = lambda: self._submit(undo, bounded=False).add_done_callback(_expect)
        return self._submit(claim, answer=answer)

    def load(self, request_id: str, block_index: int, body: Buffer) -> asyncio.Future[None]:
        """See Engine. `body` must stay as it is until this is done."""
        return self._submit(lambda engine: engine.load(request_id, block_index, body))

    def start(self, request_id: str) -> asyncio.Future[None]:
        """See Engine."""
        return self._submit(lambda engine: engine.start(request_id))

    def cancel(self, request_id: str) -> asyncio.Future[None]:
        """See Engine. Never refused for want of room; nobody needs to wait for it."""
        answer = self._submit(lambda engine: engine.cancel(request_id), bounded=False)
        answer.add_done_callback(_expect)
        return answer

    def export(self, key: BlockKey) -> asyncio.Future[bytes | None]:
        """See Engine."""
        return self._submit(lambda engine: engine.export(key))

    def resident(self) -> asyncio.Future[Sequence[SealedBlock]]:
        """See Engine."""
        return self._submit(lambda engine: tuple(engine.resident()))

    def stats(self) -> asyncio.Future[EngineStats]:
        """See Engine."""
        return self._submit(lambda engine: engine.stats())

    def check_integrity(self) -> asyncio.Future[None]:
        """See Engine."""
        return self._submit(lambda engine: engine.check_integrity())

    def _submit(
        self,
        action: Callable[[Engine], T],
        *,
        answer: asyncio.Future[T] | None = None,
        bounded: bool = True,
    ) -> asyncio.Future[T]:
        """Queue a command. The future fails with WireError when the queue is full or the thread is ending."""
        answer = self._loop.create_future() if answer is None else answer
        with self._changed:
            if self._stopping:
                answer.set_exception(_ended())
            elif bounded and len(self._commands) >= COMMANDS_COUNT_MAX:
                answer.set_exception(
                    WireError(ErrorCode.OVERLOADED, f"{COMMANDS_COUNT_MAX} engine commands are waiting")
                )
            else:
                self._commands.append(_Command(action, answer))
                self._changed.notify_all()
        return answer

    def _ask_to_stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def _wait_for_end(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._idle)

    # -- on the thread

    def _live(self) -> None:
        """Make the engine, then obey and step until told to stop. Whoever still waits then is told."""
        try:
            engine = self._make()
            self._tell(self._info, partial(self._info.set_result, engine.info))
            while self._wait_for_work(engine):
                for _ in range(len(self._commands)):
                    # Left in the queue while it runs: whoever waits for it is told, even if it ends the thread.
                    self._obey(engine, self._commands[0])
                    self._commands.popleft()
                if self._may_step(engine) and (events := engine.step()):
                    self._deliver(events)
        finally:
            with self._changed:
                self._stopping = self._idle = True
                waiting = [command.answer for command in self._commands]
                self._commands.clear()
                self._changed.notify_all()
            for answer in waiting:
                self._tell(answer, partial(answer.set_exception, _ended()))

    def _wait_for_work(self, engine: Engine) -> bool:
        """Sleep until there is something to do; False to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or bool(self._commands) or self._may_step(engine))
            return not self._stopping

    def _may_step(self, engine: Engine) -> bool:
        """There is something to compute, and the loop keeps up with taking events."""
        return engine.has_work and self._undelivered < UNDELIVERED_COUNT_MAX

    def _obey(self, engine: Engine, command: _Command) -> None:
        answer = command.answer
        if answer.cancelled():
            return
        try:
            result = command.action(engine)
        except _ANSWERS as refusal:
            self._tell(answer, partial(answer.set_exception, refusal))
            return
        self._tell(answer, partial(answer.set_result, result))

    def _deliver(self, events: list[EngineEvent]) -> None:
        with self._changed:
            self._undelivered += 1
        self._loop.call_soon_threadsafe(self._hand_over, events)

    def _tell(self, answer: asyncio.Future[Any], settle: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(_settle, answer, settle)

    # -- on the loop, called by the thread

    def _settle_info(self, living: asyncio.Future[None]) -> None:
        """The thread has ended, or nobody waits for it any more. Whoever waits for the engine hears why there is none."""
        cause = None if living.cancelled() else living.exception()
        _settle(self._info, partial(self._info.set_exception, cause or _ended()))

    def _hand_over(self, events: list[EngineEvent]) -> None:
        with self._changed:
            self._undelivered -= 1
            self._changed.notify_all()
        if self._bug is not None:
            return
        try:
            self._on_events(events)
        except Exception as bug:  # noqa: BLE001 - `run` raises it; left to the event loop it would only be logged
            self._bug = bug
            self._ask_to_stop()


def _ended() -> WireError:
    """What a command is told when no thread will run it."""
    return WireError(ErrorCode.UNAVAILABLE, "the engine is not running")


def _expect(answer: asyncio.Future[Any]) -> None:
    """A failure of this future may go unseen."""
    if not answer.cancelled():
        answer.exception()


def _settle(answer: asyncio.Future[Any], settle: Callable[[], None]) -> None:
    """Set a future's outcome unless it has one (its waiter may be gone)."""
    if not answer.done():
        settle()
