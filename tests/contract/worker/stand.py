"""Workers on a real bus, and a router and a loop that only speak the protocol."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from proto.chat import Sampling
from proto.fleet import Heartbeat, ModelCard, ServiceState
from proto.generate import (
    Assignment,
    AssignReply,
    CancelGenerate,
    Generate,
    Generated,
    GenerateEvent,
    GenerateFailed,
    Plan,
    Pull,
    RouterHello,
    Segment,
    Stage,
    TokensOut,
    WorkDone,
    Working,
)
from proto.residency import ResidencyDelta, ResidencySnapshot, SnapshotRequest, Tier
from proto.subjects import (
    ASSIGN,
    CANCEL_GENERATE,
    FLEET_PING,
    HEARTBEAT,
    PULL,
    RESIDENCY,
    ROUTER_HELLO,
    SNAPSHOT,
    WORK_DONE,
)
from services.decode.service import DecodeService
from services.decode.settings import DecodeSettings
from services.prefill.service import PrefillService
from services.prefill.settings import PrefillSettings
from shared.block_hash import Namespace, chain_keys
from shared.bus import Bus
from shared.settings import RoostSettings

SALT = b"acme"
Worker = DecodeService | PrefillService


async def until(happened: Callable[[], object], within_s: float = 20.0) -> None:
    """Poll with a deadline."""
    give_up_at = time.monotonic() + within_s
    while not happened():
        assert time.monotonic() < give_up_at, "it did not happen"
        await asyncio.sleep(0.01)


class Peer:
    """A router and a loop in one: hears everything that workers say, and hands work out."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.pulls: list[Pull] = []
        self.done: list[WorkDone] = []
        self.deltas: list[ResidencyDelta] = []
        self.events: list[GenerateEvent] = []
        self.beats: list[Heartbeat] = []
        self._count = 0

    async def start(self) -> None:
        await self.bus.subscribe(PULL, Pull, self.pulls.append)
        await self.bus.subscribe(WORK_DONE, WorkDone, self.done.append)
        await self.bus.subscribe(RESIDENCY, ResidencyDelta, self.deltas.append)
        await self.bus.subscribe(HEARTBEAT, Heartbeat, self.beats.append)
        await self.bus.subscribe_to("roost.generate.event.peer.*", GenerateEvent, self.events.append)

    def generate(self, card: ModelCard, name: str, tokens: tuple[int, ...], **more: Any) -> Generate:
        namespace = Namespace.of_card(card, SALT).digest()
        fields: dict[str, Any] = {
            "generation_id": name, "attempt": 1, "session_id": "s", "turn_id": "t", "request_id": "r", "tenant": "acme",
            "model": card.model, "namespace": namespace, "salt": SALT, "tokens": tokens,
            "keys": chain_keys(namespace, tokens, card.block_tokens), "sampling": Sampling(max_tokens=12, ignore_eos=True),
            "deadline_at": time.time() + 60, "submitted_at": time.time(),
            "reply_subject": f"roost.generate.event.peer.{name}",
        }  # fmt: skip
        return Generate(**{**fields, **more})

    def assignment(self, worker: Worker, generate: Generate, **more: Any) -> Assignment:
        self._count += 1
        fields: dict[str, Any] = {
            "assignment_id": f"a{self._count}", "worker_epoch": worker.epoch, "stage": worker.stage, "generate": generate,
            "plan": Plan(policy="test", segments=()), "queued_s": 0.0,
        }  # fmt: skip
        return Assignment(**{**fields, **more})

    async def assign(self, worker: Worker, generate: Generate, **more: Any) -> AssignReply:
        return await self.send(worker, self.assignment(worker, generate, **more))

    async def send(self, worker: Worker, assignment: Assignment) -> AssignReply:
        return await self.bus.request(ASSIGN, assignment, AssignReply, timeout_s=10, worker_id=worker.instance_id)

    async def cancel(self, name: str, through: int = 1) -> None:
        cancel = CancelGenerate(generation_id=name, through_attempt=through, reason="test")
        await self.bus.publish(CANCEL_GENERATE, cancel)

    async def hello(self) -> None:
        await self.bus.publish(ROUTER_HELLO, RouterHello(router_id="router-9", epoch=9))

    async def snapshot(self, worker: Worker, after: bytes = b"") -> ResidencySnapshot:
        request = SnapshotRequest(after_key=after, tier=Tier.DEVICE)
        return await self.bus.request(SNAPSHOT, request, ResidencySnapshot, holder_id=worker.instance_id)

    def bodies(self, name: str, kind: type) -> list[Any]:
        return [event.body for event in self.events if event.generation_id == name and isinstance(event.body, kind)]

    def tokens(self, name: str) -> list[int]:
        said: list[int] = []
        for out in self.bodies(name, TokensOut):
            assert out.first == len(said), "in order, none twice"
            said += out.token_ids
        return said

    def sources(self, name: str) -> dict[str, int]:
        (said,) = [body.tokens_by_source for body in self.bodies(name, Working) if body.tokens_by_source]
        return {source.value: count for source, count in said.items()}

    async def end_of(self, name: str) -> Generated | GenerateFailed:
        await until(lambda: self.bodies(name, Generated) or self.bodies(name, GenerateFailed), 40.0)
        (end,) = [*self.bodies(name, Generated), *self.bodies(name, GenerateFailed)]
        assert isinstance(end, Generated | GenerateFailed)
        return end

    async def done_of(self, name: str) -> WorkDone:
        await until(lambda: any(done.generation_id == name for done in self.done), 40.0)
        (done,) = [done for done in self.done if done.generation_id == name]
        return done

    def pull_of(self, worker: Worker) -> Pull:
        return [pull for pull in self.pulls if pull.worker_id == worker.instance_id][-1]


class Stand:
    """Makes the parts and takes them down."""

    def __init__(self, url: str, home: Path, model: str) -> None:
        self._url, self._home, self._model = url, home, model
        self._buses: list[Bus] = []
        self._workers: list[Worker] = []
        self.bugs: list[BaseException] = []

    async def bus(self, name: str) -> Bus:
        bus = await Bus.connect(RoostSettings(nats_url=self._url), name, self.bugs.append)
        self._buses.append(bus)
        return bus

    async def peer(self) -> Peer:
        peer = Peer(await self.bus("peer"))
        await peer.start()
        return peer

    async def worker(self, name: str = "decode-0", stage: Stage = Stage.DECODE, **settings: Any) -> Worker:
        """A life of a worker without signals and metrics port: what `Service.run` does around `start` is left out."""
        fields: dict[str, Any] = {
            "nats_url": self._url, "home": self._home, "model": self._model, "instance": name, "worker_engine": "sim",
            "worker_sim_decode_base_s": 0.002, "worker_sim_decode_stream_s": 0.0, "worker_sim_prefill_token_s": 0.0,
            **settings,
        }  # fmt: skip
        is_decode = stage is Stage.DECODE
        worker = DecodeService(DecodeSettings(**fields)) if is_decode else PrefillService(PrefillSettings(**fields))
        # What a service does with a bug is to end; a test shows it.
        worker.fail = self.bugs.append  # type: ignore[method-assign]
        worker.bus = await self.bus(name)
        self._workers.append(worker)
        await worker.start()
        worker.state = ServiceState.READY
        await worker.bus.subscribe(FLEET_PING, FLEET_PING.message, worker._pinged)  # type: ignore[arg-type]
        await worker.beat()
        return worker

    async def end(self, worker: Worker) -> None:
        """Its tasks, connection and thread are gone. No drain."""
        tasks = list(worker._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await worker.stop()
        self._workers.remove(worker)
        self._buses.remove(worker.bus)
        await worker.bus.close()

    async def close(self) -> None:
        for worker in list(self._workers):
            await self.end(worker)
        for bus in self._buses:
            await bus.close()
        assert not self.bugs, self.bugs


def promise(generate: Generate, source: Any, blocks: int) -> Plan:
    """A plan that expects so many leading blocks from there."""
    return Plan(policy="test", segments=(Segment(first_block=0, block_count=blocks, source=source),))
