"""A worker's core over the simulated engine, with the shell's part (jobs, puts, outbox) done by the event queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from proto.fleet import KvStoreCard, ModelCard
from proto.generate import Stage, WorkerPrice
from proto.ids import BlockKey
from proto.kv import KvRejected, KvTouched
from proto.receipt import Source
from proto.residency import Tier
from proto.subjects import (
    ASSIGN,
    CANCEL_GENERATE,
    KV_REJECTED,
    KV_TOUCHED,
    PULL,
    RESIDENCY,
    ROUTER_HELLO,
    SNAPSHOT,
    WORK_DONE,
)
from shared.engine.protocol import LAYOUT_VERSION, BadGrammar, BadLoad, NeverFits, PoolFull
from shared.engine.sim_engine import SimEngine, SimOptions
from shared.worker import events as ev
from shared.worker.admission import claim_refusal
from shared.worker.core import WorkerConfig, WorkerCore
from tests.sim.bus import Bus, Respond
from tests.sim.kv_node import KvNode
from tests.sim.node import Node
from tests.sim.world import World

SOURCES = {Tier.RAM: Source.RAM, Tier.NVME: Source.NVME}


def card_of(options: SimOptions, worker_id: str, epoch: int) -> ModelCard:
    info = options.info()
    return ModelCard(
        worker_id=worker_id, epoch=epoch, model=info.model, fingerprint=info.fingerprint,
        tokenizer_digest=info.tokenizer_digest, kv_dtype=info.kv_dtype, layout_version=LAYOUT_VERSION,
        block_tokens=info.block_tokens, rope_scaling=info.rope_scaling, context_tokens=info.context_tokens,
        block_bytes=info.block_bytes,
    )  # fmt: skip


class WorkerNode(Node):
    """A worker of either stage."""

    def __init__(self, name: str, world: World, bus: Bus, kv: KvNode, stage: Stage, options: SimOptions) -> None:
        super().__init__(name, world, bus)
        self.kv, self.stage, self.options = kv, stage, options
        self.engine = SimEngine(options)
        self.core = self._made()
        # What an assignment waits for; an action whose token is not here any more was cancelled.
        self._jobs: dict[str, object] = {}
        self._asking: dict[str, list[Respond]] = {}
        self._is_stepping = False
        self._put_keys: set[BlockKey] = set()

    def _made(self) -> WorkerCore:
        card = card_of(self.options, self.name, self.life.epoch)
        config = WorkerConfig(stage=self.stage, streams_max=3)
        return WorkerCore(card, config, WorkerPrice(), blocks_total=self.options.blocks_total)

    def cards(self) -> dict[str, ModelCard | KvStoreCard]:
        return {"model_card": self.core.card}

    def residency_seq(self) -> int:
        return self.core.blocks.seq

    def born(self) -> None:
        self.engine = SimEngine(self.options)
        self.core = self._made()
        self._jobs, self._asking, self._is_stepping, self._put_keys = {}, {}, False, set()
        self.bus.serve(ASSIGN, self.life, self._assign, key=self.name)
        self.bus.serve(SNAPSHOT, self.life, lambda request, respond: respond(self.core.page(request)), key=self.name)
        self.bus.subscribe(CANCEL_GENERATE, self.life, lambda m: self.tell(ev.CancelHeard(self.world.now, m)))
        self.bus.subscribe(ROUTER_HELLO, self.life, lambda _: self.tell(ev.RouterHeard(self.world.now)))
        self.tick_when_due(lambda: self.core.wake_at, lambda: self.tell(ev.Ticked(self.world.now)))

    def _assign(self, assignment: Any, respond: Respond) -> None:
        self._asking.setdefault(assignment.assignment_id, []).append(respond)
        self.tell(ev.AssignArrived(self.world.now, self.world.now, assignment))

    def tell(self, event: ev.Event) -> None:
        for instruction in self.core.handle(event):
            self._perform(instruction)

    def _perform(self, instruction: ev.Instruction) -> None:
        match instruction:
            case ev.AnswerAssign(name, reply):
                for respond in self._asking.pop(name, []):
                    respond(reply)
            case ev.ClaimBlocks(request):
                self._job(request.request_id, lambda: self._claim(request))
            case ev.FetchBlocks():
                self._job(instruction.assignment_id, lambda: self._fetch(instruction))
            case ev.StartEngine(name):
                self._job(name, lambda: self._start(name))
            case ev.FlushPuts(name, within_s):
                self._flush(name, within_s)
            case ev.CancelEngine(name):
                self._jobs.pop(name, None)
                self.engine.cancel(name)
                self._wake()
            case ev.PutBlocks():
                self.world.after(self.world.random.uniform(0.0, 0.05), lambda: self._put(instruction), self.life)
            case ev.Say(address, event):
                self.bus.publish_to(self.name, address, event)
            case ev.SayDone(done):
                self.bus.publish(self.name, WORK_DONE, done)
            case ev.SayPull(pull):
                self.bus.publish(self.name, PULL, pull)
            case ev.SayDelta(delta):
                self.bus.publish(self.name, RESIDENCY, delta)
            case ev.CountTokens():
                pass

    def _job(self, name: str, action: Callable[[], None]) -> None:
        """Do it between two of the engine's steps, unless it is cancelled before."""
        token = self._jobs[name] = object()

        def act() -> None:
            if self._jobs.get(name) is token:
                del self._jobs[name]
                action()

        self.world.after(self.world.random.uniform(0.0, 0.02), act, self.life)

    def _claim(self, request: Any) -> None:
        try:
            answer: Any = self.engine.claim(request)
        except (PoolFull, NeverFits, BadGrammar, ValueError) as trouble:
            answer = claim_refusal(trouble)
        self._wake()
        self.tell(ev.ClaimAnswered(self.world.now, request.request_id, answer))

    def _fetch(self, ask: ev.FetchBlocks) -> None:
        """What the files have, as far as it is good; sometimes only a part comes in time."""
        wanted = ask.keys[ask.first : ask.last]
        found = self.kv.read(wanted)
        sources: list[Source] = []
        rejected = 0
        most = len(found) if self.world.random.random() < 0.9 else self.world.random.randint(0, len(found))
        for index, (tier, frame) in enumerate(found[:most]):
            if not frame.is_good:
                rejected += 1
                report = KvRejected(shard_id=self.kv.name, tier=tier, key=frame.block.key, reason="checksum")
                self.bus.publish(self.name, KV_REJECTED, report)
                break
            try:
                self.engine.load(ask.assignment_id, ask.first + index, frame.body)
            except BadLoad:
                break
            sources.append(SOURCES[tier])
        if sources:
            touched = KvTouched(shard_id=self.kv.name, keys=wanted[: len(sources)])
            self.bus.publish(self.name, KV_TOUCHED, touched)
        fetched = ev.Fetched(blocks=Counter(sources), bytes_moved=100 * len(sources), rejected=rejected)
        self._job(ask.assignment_id, lambda: self.tell(ev.FetchEnded(self.world.now, ask.assignment_id, fetched)))

    def _start(self, name: str) -> None:
        self.engine.start(name)
        self._wake()

    def _wake(self) -> None:
        """As the engine's thread: step while there is work, and what a claim evicted is also to be told."""
        if not self._is_stepping:
            self._step()

    def _step(self) -> None:
        """One step takes what the engine says that it takes; its events are told at its end."""
        self._is_stepping = self.engine.has_work
        if not self._is_stepping:
            return
        events = self.engine.step()

        def ended() -> None:
            if events:
                self.tell(ev.EngineTold(self.world.now, events))
            self.tell(ev.StatsArrived(self.world.now, self.engine.stats()))
            self._step()

        self.world.after(self.engine.last_step_s, ended, self.life)

    def _put(self, put: ev.PutBlocks) -> None:
        for block in put.blocks:
            body = self.engine.export(block.key)
            if body is None or not self.kv.is_on:
                return
            self._put_keys.add(block.key)
            self.kv.put(block, body)

    def _flush(self, name: str, within_s: float) -> None:
        token = self._jobs[name] = object()

        def ended(is_stored: bool) -> None:
            if self._jobs.get(name) is token:
                del self._jobs[name]
                self.tell(ev.FlushEnded(self.world.now, name, is_stored))

        def ask() -> None:
            if self.kv.is_on:
                life = self.life
                self.kv.flush(set(self._put_keys), lambda: self.world.after(0.001, lambda: ended(True), life))

        # After the puts before it, which take up to as long.
        self.world.after(0.06, ask, self.life)
        self.world.after(within_s, lambda: ended(False), self.life)
