"""What the engine's steps take on this machine, measured at start with a few requests that nobody asked for.

Their blocks live in a namespace of their own and are never announced, so they are the first that are evicted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from proto.chat import Sampling
from proto.generate import Stage, WorkerPrice
from shared.clock import Clock
from shared.engine.protocol import EngineEvent, EngineInfo, EngineRequest, RequestFailed, RequestFinished
from shared.engine.thread import EngineThread
from shared.worker.price import fit

# A calibration that takes longer ends after the requests in progress; what it did not see keeps its default.
CALIBRATE_S_MAX: Final = 1.5
NAMESPACE: Final = b"\xff" * 32
STREAMS: Final = 2
STREAM_TOKENS: Final = 3
PROMPT_TOKENS_SMALL: Final = 16


@dataclass(frozen=True, slots=True)
class _Round:
    """Requests that run together."""

    prompt_tokens: int
    max_tokens: int = 1
    count: int = 1


class Calibration:
    """Runs the rounds. Feed it the engine's events while `run` waits."""

    def __init__(self, thread: EngineThread, info: EngineInfo, clock: Clock) -> None:
        self._thread, self._info, self._clock = thread, info, clock
        self._running: set[str] = set()
        self._ended = asyncio.Event()
        self._count = 0

    def hear(self, events: Sequence[EngineEvent]) -> None:
        """What a step did."""
        for event in events:
            if isinstance(event, RequestFinished | RequestFailed):
                self._running.discard(event.request_id)
        if not self._running:
            self._ended.set()

    async def run(self, stage: Stage, step_tokens: int, otherwise: WorkerPrice) -> WorkerPrice:
        """The price. Raises what the engine raises on requests of these sizes, which a pool that is fit for use holds."""
        began = self._clock.monotonic()
        largest = self._largest(step_tokens)
        small = min(PROMPT_TOKENS_SMALL, largest)
        rounds = [_Round(small), _Round(largest)]
        if stage is Stage.DECODE:
            rounds += [_Round(1, STREAM_TOKENS), _Round(1, STREAM_TOKENS, STREAMS)]
        # The first steps of a process warm caches and say nothing about later ones.
        await self._round(_Round(small, 2))
        warm_up = len((await self._thread.stats()).recent_steps)
        for one in rounds:
            await self._round(one)
            if self._clock.monotonic() - began > CALIBRATE_S_MAX:
                break
        return fit((await self._thread.stats()).recent_steps[warm_up:], otherwise)

    def _largest(self, step_tokens: int) -> int:
        """A prompt of one full step, if window and pool hold it."""
        room = min(self._info.context_tokens, self._info.blocks_total * self._info.block_tokens)
        return max(min(step_tokens, room - STREAM_TOKENS), 1)

    async def _round(self, one: _Round) -> None:
        self._ended.clear()
        names = [f"calibrate-{self._count + number}" for number in range(1, one.count + 1)]
        self._running = set(names)
        for name in names:
            self._count += 1
            await self._thread.claim(
                EngineRequest(
                    request_id=name,
                    namespace=NAMESPACE,
                    # Tokens that no other request begins with, or its prompt would be found here and not computed.
                    tokens=(self._count % self._info.vocab_size,) * one.prompt_tokens,
                    sampling=Sampling(max_tokens=one.max_tokens, ignore_eos=True),
                    prefill_only=one.max_tokens == 1,
                )
            )
        for name in names:
            await self._thread.start(name)
        await self._ended.wait()
