"""The kvstore's core over two dictionaries that outlive it, as LMDB files do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from proto.fleet import KvStoreCard, ModelCard
from proto.ids import BlockKey
from proto.residency import Tier
from proto.subjects import KV_REJECTED, KV_TOUCHED, RESIDENCY, SNAPSHOT
from services.kvstore import events as ev
from services.kvstore.core import KvStoreCore
from shared.engine.protocol import SealedBlock
from tests.sim.bus import Bus, Respond
from tests.sim.node import Node
from tests.sim.world import World

LOOK_AFTER_S = 2.0


@dataclass
class Frame:
    """A frame on disk. `is_good` says whether its checksum is right."""

    block: SealedBlock
    body: bytes
    is_good: bool = True


class KvNode(Node):
    """One shard. `disk` is what its tiers really hold, in whichever life it was written."""

    def __init__(self, name: str, world: World, bus: Bus, capacities: dict[Tier, int]) -> None:
        super().__init__(name, world, bus)
        self.capacities = capacities
        self.disk: dict[Tier, dict[BlockKey, Frame]] = {tier: {} for tier in capacities}
        # While this is set batches fail, as on a full or broken disk.
        self.is_failing = False
        self.core = self._made()
        self._held: dict[BlockKey, Frame] = {}
        self._in_flight: list[ev.WriteBatch] = []
        self._waiting: list[tuple[set[BlockKey], Callable[[], None]]] = []

    def _made(self) -> KvStoreCore:
        return KvStoreCore(self.name, self.life.epoch, self.capacities, waiting_bytes_max=100_000)

    def cards(self) -> dict[str, ModelCard | KvStoreCard]:
        card = KvStoreCard(
            shard_id=self.name,
            epoch=self.life.epoch,
            host="h",
            data_port=1,
            ram_path="/r",
            nvme_path="/n",
            host_token="x",
        )
        return {"kv_card": card}

    def residency_seq(self) -> int:
        return self.core.seq

    def born(self) -> None:
        self.core = self._made()
        self._held, self._in_flight, self._waiting = {}, [], []
        for tier, frames in self.disk.items():
            found = tuple(_info(frame) for frame in frames.values())
            self.tell(ev.Found(tier, found))
        self.bus.serve(SNAPSHOT, self.life, self._page, key=self.name)
        self.world.every(LOOK_AFTER_S, lambda: self.tell(ev.Ticked(self.world.now)), self.life)
        self.bus.subscribe(KV_TOUCHED, self.life, lambda touched: self.tell(ev.Touched(touched.keys)))
        self.bus.subscribe(KV_REJECTED, self.life, lambda m: self.tell(ev.Damaged(m.tier, BlockKey(m.key))))

    def died(self) -> None:
        """A transaction that was under way is in the tier, or not at all."""
        for batch in self._in_flight:
            if self.world.random.random() < 0.5:
                self._apply(batch)

    def _page(self, request: Any, respond: Respond) -> None:
        respond(self.core.snapshot(request))

    def tell(self, event: ev.Event) -> None:
        for instruction in self.core.handle(event):
            match instruction:
                case ev.WriteBatch():
                    self._in_flight.append(instruction)
                    seconds = self.world.random.uniform(0.001, 0.03)
                    self.world.after(seconds, lambda batch=instruction: self._ended(batch), self.life)
                case ev.Announce(delta):
                    self.check_announced(delta)
                    self.bus.publish(self.name, RESIDENCY, delta)
                case ev.LetGo(keys):
                    for key in keys:
                        self._held.pop(key, None)
                case ev.Settled():
                    pass
        self._wake()

    def _ended(self, batch: ev.WriteBatch) -> None:
        self._in_flight.remove(batch)
        if self.is_failing:
            self.tell(ev.BatchFailed(batch.tier, "the disk fails", False, self.world.now))
            return
        self._apply(batch)
        self.tell(ev.BatchCommitted(batch.tier))

    def _apply(self, batch: ev.WriteBatch) -> None:
        frames = self.disk[batch.tier]
        for key in batch.deletes:
            frames.pop(key, None)
        for key in batch.puts:
            frames[key] = self._held[key]

    def check_announced(self, delta: Any) -> None:
        """Invariant 6: nothing is advertised before its bytes have fully arrived."""
        for change in delta.changes:
            for key in change.stored:
                assert key in self.disk[change.tier], "announced before its commit"

    def _wake(self) -> None:
        still = []
        for keys, settled in self._waiting:
            if any(self.core.is_open(key) for key in keys):
                still.append((keys, settled))
            else:
                settled()
        self._waiting = still

    # -- the data port

    def put(self, block: SealedBlock, body: bytes) -> None:
        frame = Frame(block, body)
        self._held[block.key] = frame
        self.tell(ev.PutArrived(_info(frame), self.world.now))

    def flush(self, keys: set[BlockKey], settled: Callable[[], None]) -> None:
        self._waiting.append((keys, settled))
        self._wake()

    def read(self, keys: Sequence[BlockKey]) -> list[tuple[Tier, Frame]]:
        """Frames up to the first that no tier has; a bad one is the last. Works while the shard is dead: files are files."""
        found: list[tuple[Tier, Frame]] = []
        for key in keys:
            copies = [(tier, frames[key]) for tier, frames in self.disk.items() if key in frames]
            good = [copy for copy in copies if copy[1].is_good]
            found += (good or copies)[:1]
            if not good:
                break
        return found


def _info(frame: Frame) -> ev.BlockInfo:
    return ev.BlockInfo(frame.block.key, frame.block.parent, len(frame.body))
