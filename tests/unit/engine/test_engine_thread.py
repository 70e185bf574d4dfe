"""The engine's thread: order of commands, cancelled claims, stopping, bugs, and that it waits for a slow event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from proto.errors import WireError
from shared.engine import thread as thread_module
from shared.engine.protocol import Claim, EngineEvent, EngineRequest, PoolFull, RequestFinished
from shared.engine.sim_engine import SimEngine, SimOptions
from shared.engine.thread import EngineThread
from tests.tiny_model import Seen, prompt_of, request_of

DEADLINE_S = 10.0


class GatedEngine(SimEngine):
    """A simulated engine whose next claim, and every step, waits until it is let through."""

    def __init__(self, options: SimOptions) -> None:
        super().__init__(options)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.calls: list[str] = []
        self.steps = 0

    def claim(self, request: EngineRequest) -> Claim:
        self.entered.set()
        assert self.gate.wait(DEADLINE_S)
        self.calls.append(f"claim {request.request_id}")
        return super().claim(request)

    def cancel(self, request_id: str) -> None:
        self.calls.append(f"cancel {request_id}")
        super().cancel(request_id)

    def step(self) -> list[EngineEvent]:
        self.steps += 1
        return super().step()


class Running:
    """A thread over a gated engine, with what it said."""

    def __init__(self, on_events: Callable[[list[EngineEvent]], None] | None = None) -> None:
        self.engine = GatedEngine(SimOptions(blocks_total=64, answer_tokens=0))
        self.seen = Seen()
        self.thread = EngineThread(lambda: self.engine, on_events or self.seen.take)
        self.task = asyncio.create_task(self.thread.run())

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.001)

    async def enter_claim(self) -> None:
        await self.until(self.engine.entered.is_set)

    async def end(self) -> None:
        self.engine.gate.set()
        await self.thread.stop()
        await self.task


async def test_a_request_runs_and_the_thread_stops() -> None:
    """The plain life: ready, claim, start, tokens in order, stop; what comes later is refused."""
    running = Running()
    assert (await running.thread.ready()).blocks_total == 64
    claim = await running.thread.claim(request_of("r", prompt_of(40)))
    assert (claim.resident_blocks, claim.usable_blocks) == (0, 2)
    await running.thread.start("r")
    await running.until(lambda: "r" in running.seen.finished)
    assert len(running.seen.tokens["r"]) == 12
    assert (await running.thread.stats()).blocks_held == 0
    await running.thread.check_integrity()
    await running.end()
    with pytest.raises(WireError, match="not running"):
        await running.thread.stats()


async def test_commands_run_in_the_order_they_were_given() -> None:
    """F-CAN-05: cancel and a new claim of the same id, without waiting in between, must not change places."""
    running = Running()
    await running.thread.ready()
    first = running.thread.claim(request_of("r", prompt_of(20)))
    running.thread.cancel("r")
    second = running.thread.claim(request_of("r", prompt_of(20)))
    await asyncio.gather(first, second)
    assert running.engine.calls == ["claim r", "cancel r", "claim r"]
    assert (await running.thread.stats()).requests_claimed == 1
    await running.end()


async def test_refusals_reach_the_caller_and_the_thread_goes_on() -> None:
    """PoolFull is an answer, not an accident."""
    running = Running()
    await running.thread.claim(request_of("a", prompt_of(900), max_tokens=1))
    with pytest.raises(PoolFull):
        await running.thread.claim(request_of("b", prompt_of(900, salt=1), max_tokens=1))
    with pytest.raises(ValueError, match="already here"):
        await running.thread.claim(request_of("a", prompt_of(1)))
    assert (await running.thread.stats()).requests_claimed == 1
    await running.end()


async def test_a_claim_whose_caller_went_away_holds_nothing() -> None:
    """The claim is already running on the thread when its caller is cancelled: the blocks come back by themselves."""
    running = Running()
    await running.thread.ready()
    running.engine.gate.clear()
    running_claim = running.thread.claim(request_of("r", prompt_of(40)))
    await running.enter_claim()
    waiting_claim = running.thread.claim(request_of("never", prompt_of(40)))
    assert running_claim.cancel() and waiting_claim.cancel()
    running.engine.gate.set()
    stats = await running.thread.stats()
    assert (stats.requests_claimed, stats.blocks_held) == (0, 0)
    assert "claim never" not in running.engine.calls
    await running.end()


async def test_undoing_a_claim_spares_the_next_one_of_its_id() -> None:
    """F-CAN-05: the retry with the same id is queued before the cancelled claim has answered."""
    running = Running()
    await running.thread.ready()
    running.engine.gate.clear()
    old = running.thread.claim(request_of("r", prompt_of(40)))
    await running.enter_claim()
    old.cancel()
    new = running.thread.claim(request_of("r", prompt_of(40)))
    running.engine.gate.set()
    assert (await new).usable_blocks == 2
    assert (await running.thread.stats()).requests_claimed == 1
    # A claim that was refused takes nothing from the one that has the id.
    running.engine.entered.clear()
    running.engine.gate.clear()
    double = running.thread.claim(request_of("r", prompt_of(40)))
    await running.enter_claim()
    double.cancel()
    running.engine.gate.set()
    assert (await running.thread.stats()).requests_claimed == 1
    await running.end()


async def test_stop_tells_whoever_waits() -> None:
    """A worker ends while commands wait: they are refused, none hangs."""
    running = Running()
    await running.thread.ready()
    running.engine.gate.clear()
    held = running.thread.claim(request_of("r", prompt_of(40)))
    await running.enter_claim()
    waiting = [running.thread.stats(), running.thread.export(bytes(16))]  # type: ignore[arg-type]
    stopping = asyncio.create_task(running.thread.stop())
    await asyncio.sleep(0)
    running.engine.gate.set()
    await stopping
    outcomes = await asyncio.wait_for(asyncio.gather(held, *waiting, return_exceptions=True), DEADLINE_S)
    # The thread empties the queue that it had begun, or refuses it; either way everybody hears.
    assert all(not isinstance(outcome, BaseException) or isinstance(outcome, WireError) for outcome in outcomes)
    await running.task


async def test_stopped_before_it_ran() -> None:
    """A worker that is stopped while it starts: `ready` answers instead of waiting for ever."""
    thread = EngineThread(lambda: SimEngine(SimOptions()), lambda events: None)
    await thread.stop()
    await thread.run()
    with pytest.raises(WireError):
        await asyncio.wait_for(thread.ready(), DEADLINE_S)


async def test_an_engine_that_cannot_be_made_says_why() -> None:
    """No weights: the service that spawned `run`, and whoever waits for the engine, end with the reason."""

    def make() -> SimEngine:
        raise OSError("no such checkpoint")

    thread = EngineThread(make, lambda events: None)
    task = asyncio.create_task(thread.run())
    with pytest.raises(OSError, match="no such checkpoint"):
        await asyncio.wait_for(thread.ready(), DEADLINE_S)
    with pytest.raises(OSError, match="no such checkpoint"):
        await task


@pytest.mark.parametrize("where", ["step", "cancel"])
async def test_a_bug_in_the_engine_ends_run_with_its_exception(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Bugs are not survived: the life ends with them, and whoever waited is told."""
    running = Running()
    await running.thread.ready()

    def broken(*_: Any) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr(running.engine, where, broken)
    await running.thread.claim(request_of("r", prompt_of(5)))
    running.thread.start("r") if where == "step" else running.thread.cancel("r")
    with pytest.raises(RuntimeError, match="a bug"):
        await asyncio.wait_for(running.task, DEADLINE_S)
    with pytest.raises(WireError):
        await running.thread.stats()


async def test_a_bug_in_the_listener_ends_run_with_its_exception() -> None:
    """An event loop only logs what its callbacks raise; tokens would then be missing without a word."""

    def broken(events: list[EngineEvent]) -> None:
        raise RuntimeError("a bug in the shell")

    running = Running(broken)
    await running.thread.claim(request_of("r", prompt_of(5)))
    await running.thread.start("r")
    with pytest.raises(RuntimeError, match="in the shell"):
        await asyncio.wait_for(running.task, DEADLINE_S)


async def test_the_thread_waits_for_a_slow_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop is busy: at most a bounded number of event lists waits for it, then everything arrives in order."""
    monkeypatch.setattr(thread_module, "UNDELIVERED_COUNT_MAX", 3)
    running = Running()
    await running.thread.ready()
    running.thread.claim(request_of("r", prompt_of(5), max_tokens=50))
    running.thread.start("r")
    busy = threading.Event()
    deadline = asyncio.get_running_loop().time() + DEADLINE_S
    # The loop does nothing meanwhile: this blocks it.
    while running.engine.steps < 3 and asyncio.get_running_loop().time() < deadline:
        busy.wait(0.005)
    busy.wait(0.05)
    assert running.engine.steps == 3
    await running.until(lambda: "r" in running.seen.finished)
    assert len(running.seen.tokens["r"]) == 50
    await running.end()


async def test_too_many_commands_are_refused_but_cancels_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is bounded; giving room back always works."""
    monkeypatch.setattr(thread_module, "COMMANDS_COUNT_MAX", 2)
    running = Running()
    await running.thread.ready()
    running.engine.gate.clear()
    held = running.thread.claim(request_of("r", prompt_of(40)))
    await running.enter_claim()
    waiting = running.thread.stats()
    with pytest.raises(WireError, match="commands are waiting"):
        await running.thread.stats()
    gone = running.thread.cancel("r")
    running.engine.gate.set()
    await asyncio.gather(held, waiting, gone)
    assert (await running.thread.stats()).blocks_held == 0
    await running.end()


async def test_events_of_one_request_end_with_its_end() -> None:
    """The last event list holds the terminal event; nothing of the request comes after it."""
    lists: list[list[EngineEvent]] = []
    running = Running(lists.append)
    await running.thread.claim(request_of("r", prompt_of(20), max_tokens=5))
    await running.thread.start("r")
    await running.until(lambda: any(isinstance(event, RequestFinished) for events in lists for event in events))
    assert isinstance(lists[-1][-1], RequestFinished)
    await running.end()
