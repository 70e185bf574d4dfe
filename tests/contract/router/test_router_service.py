"""The router's shell on a real bus: real messages, real lease, and workers and loops that only speak the protocol."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from proto.errors import ErrorCode, ErrorReply, WireError
from proto.fleet import FleetPing, ServiceState
from proto.generate import (
    Assignment,
    AssignReply,
    Generate,
    GenerateAccepted,
    GenerateEvent,
    RouterHello,
    WorkDone,
    WorkOutcome,
)
from proto.ids import BlockKey
from proto.residency import ResidencyDelta, ResidencySnapshot, SnapshotRequest, Tier, TierChange
from proto.subjects import (
    ASSIGN,
    FLEET_PING,
    GENERATE,
    HEARTBEAT,
    LEASES,
    PULL,
    RESIDENCY,
    ROUTER_HELLO,
    SNAPSHOT,
    WORK_DONE,
)
from services.router.service import RouterService
from services.router.settings import RouterSettings
from shared.bus import Bus
from shared.settings import RoostSettings
from tests.nats_server import NatsServer
from tests.unit.router.drive import beat, card, generate, pull

PAGE = 3


async def until(happened: Callable[[], object], within_s: float = 8.0) -> None:
    """Poll with a deadline."""
    give_up_at = time.monotonic() + within_s
    while not happened():
        assert time.monotonic() < give_up_at, "it did not happen"
        await asyncio.sleep(0.01)


class FakeWorker:
    """A worker process's side of the protocol, on a connection of its own."""

    def __init__(self, bus: Bus, name: str, *, room: int = 1, keys: tuple[BlockKey, ...] = ()) -> None:
        self.bus, self.name, self.room = bus, name, room
        self.keys = sorted(keys)
        self.got: list[Assignment] = []
        self.seen = self.seq = self.pages = 0
        self.refusal: ErrorReply | None = None
        self.is_pulling = True

    async def start(self) -> None:
        await self.bus.serve(ASSIGN, Assignment, self._assign, worker_id=self.name)
        await self.bus.serve(SNAPSHOT, SnapshotRequest, self._snapshot, holder_id=self.name)
        await self.bus.subscribe(FLEET_PING, FleetPing, lambda _: self.bus.spawn(self.beat()))
        await self.bus.subscribe(ROUTER_HELLO, RouterHello, lambda _: self.bus.spawn(self.pull()))
        self.bus.spawn(self._live())

    async def beat(self) -> None:
        await self.bus.publish(HEARTBEAT, beat(self.name, model_card=card(self.name)), service="decode")

    async def _live(self) -> None:
        while True:
            await self.beat()
            if self.is_pulling:
                await self.pull()
            await asyncio.sleep(0.5)

    async def pull(self) -> None:
        await self.bus.publish(PULL, pull(self.name, room=self.room, seen=self.seen))

    async def _assign(self, assignment: Assignment) -> AssignReply:
        self.seen += 1
        if self.refusal is not None:
            return AssignReply(accepted=False, error=self.refusal)
        self.got.append(assignment)
        self.room -= 1
        self.bus.spawn(self.pull())
        return AssignReply(accepted=True)

    async def _snapshot(self, request: SnapshotRequest) -> ResidencySnapshot:
        self.pages += 1
        rest = [key for key in self.keys if key > request.after_key]
        return ResidencySnapshot(
            holder_id=self.name, epoch=1, seq=self.seq, tier=request.tier, keys=tuple(rest[:PAGE]),
            is_last=len(rest) <= PAGE,
        )  # fmt: skip

    async def store(self, *keys: BlockKey, said: bool = True) -> None:
        self.keys = sorted({*self.keys, *keys})
        self.seq += 1
        if said:
            change = TierChange(tier=Tier.DEVICE, stored=keys)
            await self.bus.publish(
                RESIDENCY, ResidencyDelta(holder_id=self.name, epoch=1, seq=self.seq, changes=(change,))
            )

    async def finish(self) -> None:
        work = self.got.pop(0)
        self.room += 1
        done = WorkDone(
            worker_id=self.name, epoch=1, assignment_id=work.assignment_id, attempt=work.generate.attempt,
            generation_id=work.generate.generation_id, outcome=WorkOutcome.DONE,
        )  # fmt: skip
        await self.bus.publish(WORK_DONE, done)
        await self.pull()


class FakeLoop:
    """Asks, and hears what is said on its reply subject."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.heard: list[GenerateEvent] = []

    async def start(self) -> None:
        await self.bus.subscribe_to("roost.generate.event.loop.*", GenerateEvent, self.heard.append)

    async def ask(self, wanted: Generate) -> GenerateAccepted:
        address = f"roost.generate.event.loop.{wanted.generation_id}"
        late = wanted.model_copy(update={"reply_subject": address, "deadline_at": time.time() + 60})
        return await self.bus.request(GENERATE, late, GenerateAccepted, timeout_s=1.0)

    async def asks_until_taken(self, wanted: Generate) -> None:
        for _ in range(200):
            try:
                await self.ask(wanted)
                return
            except WireError as refused:
                # A request that went down with the server has no answer.
                assert refused.code in (ErrorCode.UNAVAILABLE, ErrorCode.DEADLINE)
                await asyncio.sleep(0.05)
        raise AssertionError("no router became active")

    def kinds(self, name: str) -> list[str]:
        return [event.body.kind for event in self.heard if event.generation_id == name]


class Stand:
    """Makes the parts and takes them down."""

    def __init__(self, server: NatsServer, home: Path) -> None:
        self._server, self._home = server, home
        self._buses: list[Bus] = []
        self.bugs: list[BaseException] = []

    async def bus(self, name: str) -> Bus:
        bus = await Bus.connect(RoostSettings(nats_url=self._server.url), name, self.bugs.append)
        self._buses.append(bus)
        return bus

    async def worker(self, name: str, room: int = 1, keys: tuple[BlockKey, ...] = ()) -> FakeWorker:
        worker = FakeWorker(await self.bus(name), name, room=room, keys=keys)
        await worker.start()
        return worker

    async def loop(self) -> FakeLoop:
        loop = FakeLoop(await self.bus("loop"))
        await loop.start()
        return loop

    async def router(self, instance: str = "router-0") -> RouterService:
        """A life of a router without signals and metrics port: what `Service.run` does around `start` is left out."""
        settings = RouterSettings(nats_url=self._server.url, home=self._home, instance=instance)
        service = RouterService(settings)
        service.bus = await self.bus(instance)
        await service.start()
        service.state = ServiceState.READY
        return service

    async def kill(self, service: RouterService) -> None:
        """No goodbye: its connection and tasks are gone."""
        tasks = list(service._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._buses.remove(service.bus)
        await service.bus.close()

    async def close(self, routers: list[RouterService]) -> None:
        for service in routers:
            await self.kill(service)
        for bus in self._buses:
            await bus.close()
        assert not self.bugs, self.bugs


@asynccontextmanager
async def _stand(server: NatsServer, home: Path) -> AsyncIterator[Stand]:
    stand = Stand(server, home)
    routers: list[RouterService] = []
    make = stand.router

    async def made(instance: str = "router-0") -> RouterService:
        routers.append(await make(instance))
        return routers[-1]

    stand.router = made  # type: ignore[method-assign]
    yield stand
    await stand.close([service for service in routers if service.bus in stand._buses])


@pytest.fixture
async def stand(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Stand]:
    async with _stand(nats_server, tmp_path) as made:
        yield made


async def test_work_goes_to_the_worker_that_holds_it(stand: Stand) -> None:
    """Snapshot in pages, deltas after it, a gap healed by a new snapshot; then the plan says what is resident."""
    wanted = generate("g1", 160)
    cold, warm = await stand.worker("cold"), await stand.worker("warm", keys=wanted.keys[:7])
    router = await stand.router()
    loop = await stand.loop()
    index = router._core.index
    await until(lambda: index.device_runs(wanted.keys) == {"warm": 7})
    assert warm.pages == 3 and cold.pages == 1
    await warm.store(wanted.keys[7])
    await until(lambda: index.device_runs(wanted.keys) == {"warm": 8})
    await warm.store(wanted.keys[8], said=False)
    await warm.store(wanted.keys[9])
    await until(lambda: index.device_runs(wanted.keys) == {"warm": 10})
    await until(lambda: len(router._core.lives) == 2 and all(life.card for life in router._core.lives.values()))
    assert (await loop.ask(wanted)).depth == 0
    await until(lambda: warm.got)
    plan = warm.got[0].plan
    # The last token is computed, so the block that ends the prompt is not used.
    assert [(part.source.value, part.block_count) for part in plan.segments] == [("resident", 9), ("computed", 1)]
    assert not plan.blind and 0 < plan.decided_in_s < 0.1 and cold.got == []
    await warm.finish()
    await until(lambda: router._core.jobs.count == 0)


async def test_waiting_says_so_and_a_refusal_finds_another(stand: Stand) -> None:
    """Queued each second; OVERLOADED at one worker is no failure."""
    router, loop = await stand.router(), await stand.loop()
    await loop.ask(generate("g1"))
    await until(lambda: loop.kinds("g1").count("queued") >= 2)
    full = await stand.worker("a")
    full.refusal = ErrorReply(code=ErrorCode.OVERLOADED, message="full")
    await until(lambda: full.seen)
    free = await stand.worker("b")
    await until(lambda: free.got)
    assert router.load()["queue"] == 0


async def test_a_worker_that_falls_silent_loses_its_work(stand: Stand) -> None:
    """LOST within the time that the loop's own watchdog would need, and the next attempt goes elsewhere."""
    await stand.router()
    loop, worker = await stand.loop(), await stand.worker("a")
    await loop.ask(generate("g1"))
    await until(lambda: worker.got)
    worker.is_pulling = False
    silent_at = time.monotonic()
    await until(lambda: "failed" in loop.kinds("g1"))
    assert time.monotonic() - silent_at < 3.5
    other = await stand.worker("b")
    await loop.ask(generate("g1", attempt=2))
    await until(lambda: other.got)


async def test_a_new_life_of_the_same_router_takes_over_at_once(stand: Stand) -> None:
    """The lease of the dead one has two seconds to go; its successor does not wait for that."""
    first = await stand.router()
    worker, loop = await stand.worker("a", room=0), await stand.loop()
    await loop.ask(generate("g1"))
    await stand.kill(first)
    began = time.monotonic()
    second = await stand.router()
    assert second._core.is_active and time.monotonic() - began < 1.0
    worker.room = 1
    await loop.ask(generate("g1", attempt=2))
    await until(lambda: worker.got)
    assert worker.got[0].generate.attempt == 2


async def test_a_standby_hears_everything_and_takes_over(stand: Stand) -> None:
    """It knows the blocks when the active one dies, and it answers no request before."""
    wanted = generate("g1", 160)
    active, standby = await stand.router("router-0"), await stand.router("router-1")
    worker, loop = await stand.worker("a", keys=wanted.keys), await stand.loop()
    assert active._core.is_active and not standby._core.is_active
    await until(lambda: standby._core.index.block_count == len(wanted.keys))
    await stand.kill(active)
    died_at = time.monotonic()
    await loop.asks_until_taken(wanted)
    await until(lambda: worker.got)
    assert time.monotonic() - died_at < 6.0
    assert not worker.got[0].plan.blind
    await until(lambda: standby.load()["active"] == 1.0)


async def test_a_draining_router_hands_over_at_once(stand: Stand) -> None:
    """What waits is told so; the standby does not wait for the lease to end."""
    active, standby = await stand.router("router-0"), await stand.router("router-1")
    loop = await stand.loop()
    await loop.ask(generate("g1"))
    await active.drain()
    drained_at = time.monotonic()
    await until(lambda: loop.kinds("g1") == ["failed"])
    await until(lambda: standby._core.is_active)
    assert time.monotonic() - drained_at < 2.0


async def test_it_lives_through_a_restart_of_nats(stand: Stand, nats_server: NatsServer) -> None:
    """The lease lived in the server's memory; afterwards there is one active router again."""
    router, loop, worker = await stand.router(), await stand.loop(), await stand.worker("a")
    await until(lambda: router._core.lives)
    nats_server.kill()
    nats_server.start()
    await until(lambda: router.bus.is_connected and loop.bus.is_connected, 15.0)
    await loop.asks_until_taken(generate("g1"))
    await until(lambda: worker.got, 15.0)
    bucket = await loop.bus.bucket(LEASES)
    entry = None
    for _ in range(100):
        if (entry := await bucket.get("router.active")) is not None:
            break
        await asyncio.sleep(0.1)
    assert entry is not None and b"router-0" in entry[0]
