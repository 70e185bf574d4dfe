"""THE SHELL of the kvstore: frames in by the data port, batches into LMDB by one thread a tier, announcements out."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, TypeVar, assert_never

from proto.errors import WireError
from proto.fleet import KvStoreCard
from proto.frame import FrameError
from proto.ids import BlockKey
from proto.kv import KvRejected, KvTouched
from proto.residency import ResidencyDelta, ResidencySnapshot, SnapshotRequest, Tier
from proto.subjects import KV_REJECTED, KV_TOUCHED, RESIDENCY, SNAPSHOT
from services.kvstore.core import TIERS, KvStoreCore
from services.kvstore.data_server import DataServer
from services.kvstore.events import (
    Announce,
    BatchCommitted,
    BatchFailed,
    BlockInfo,
    Damaged,
    Event,
    Found,
    LetGo,
    PutArrived,
    Settled,
    Ticked,
    Touched,
    WriteBatch,
)
from services.kvstore.folders import room_in, take_folders
from services.kvstore.settings import KvStoreSettings
from services.kvstore.tier import LmdbTier, TierError, checked_frame
from shared.kv_environment import disk_bytes, new_host_token
from shared.log import get_logger
from shared.metrics import FRAMES_REJECTED, Health, counter, gauge
from shared.service import Service

# Slots of workers that died while reading are given back this often.
READERS_CHECK_S: Final = 30.0
METRICS_EVERY_S: Final = 2.0

BLOCKS = gauge("roost_kvstore_blocks", "Committed blocks.", ("tier",))
BYTES = gauge("roost_kvstore_bytes", "Bytes of frames, those being written included.", ("tier",))
CAPACITY = gauge("roost_kvstore_capacity_bytes", "Bytes that a tier may hold.", ("tier",))
WAITING = gauge("roost_kvstore_waiting_bytes", "Bytes of frames that wait for a commit.")
PUTS = counter("roost_kvstore_puts_total", "Frames that came.")
EVICTED = gauge("roost_kvstore_evicted_blocks", "Blocks evicted in this life.", ("tier",))
SKIPPED = gauge(
    "roost_kvstore_skipped_blocks", "Puts that a tier was spared in this life: full, failing or behind.", ("tier",)
)
GETS = counter("roost_kvstore_gets_total", "Blocks asked for on the data port, by outcome.", ("outcome",))

T = TypeVar("T")
log = get_logger()


class KvStoreService(Service[KvStoreSettings]):
    """Shell of one shard. Decides nothing: services/kvstore/core.py does."""

    name = "kvstore"
    settings_type = KvStoreSettings

    def __init__(self, settings: KvStoreSettings) -> None:
        super().__init__(settings)
        # Before anything else: another process with this shard's folders is a reason not to start.
        self._folders = take_folders(settings)
        self.instance_id = self._folders.shard_id
        self._host_token = new_host_token()
        self._tiers: dict[Tier, LmdbTier] = {}
        self._threads: dict[Tier, ThreadPoolExecutor] = {}
        self._frames: dict[BlockKey, bytes] = {}
        # Set at each Settled, and replaced; whoever waits looks again.
        self._settled = asyncio.Event()
        self._room = asyncio.Event()
        self._data_port = 0
        self._short_of_room: tuple[str, ...] = ()

    async def start(self) -> None:
        """See Service."""
        self._capacities = self._measure()
        self._core = KvStoreCore(
            self.instance_id, self.epoch, self._capacities, waiting_bytes_max=self.settings.kvstore_waiting_bytes
        )
        for tier, capacity_bytes in self._capacities.items():
            CAPACITY.labels(tier=tier.value).set(capacity_bytes)
            self._threads[tier] = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{tier.value}-tier")
            self._tiers[tier] = await self._on_thread(tier, partial(self._open, tier, capacity_bytes))
            self._handle(Found(tier, await self._on_thread(tier, self._tiers[tier].scan)))
        self._server = DataServer(self, connections_max=self.settings.kvstore_connections_max)
        self._data_port = await self._server.start(self.settings.kvstore_host, self.settings.kvstore_port)
        await self.bus.serve(SNAPSHOT, SnapshotRequest, self._snapshot, holder_id=self.instance_id)
        await self.bus.subscribe(KV_TOUCHED, KvTouched, self._touched)
        await self.bus.subscribe(KV_REJECTED, KvRejected, self._rejected)
        self.spawn(self._look_after())

    def _measure(self) -> dict[Tier, int]:
        """Capacities as set, or as the file systems allow."""
        wanted = {Tier.RAM: self.settings.kvstore_ram_bytes, Tier.NVME: self.settings.kvstore_nvme_bytes}
        folders = {Tier.RAM: self._folders.ram, Tier.NVME: self._folders.nvme}
        real = {tier: room_in(folders[tier], wanted[tier]) for tier in TIERS if wanted[tier]}
        self._short_of_room = tuple(
            f"{tier} tier has {size_bytes} of the {wanted[tier]} bytes asked for: its file system has no more"
            for tier, size_bytes in real.items()
            if size_bytes < wanted[tier]
        )
        return real

    def _open(self, tier: Tier, capacity_bytes: int) -> LmdbTier:
        folder = self._folders.ram if tier is Tier.RAM else self._folders.nvme
        return LmdbTier(tier, folder, capacity_bytes=capacity_bytes, host_token=self._host_token)

    async def drain(self) -> None:
        """Commit what was taken."""
        while not self._core.is_idle:
            await self._next_settled()

    async def stop(self) -> None:
        """See Service. The RAM tier's content is on NVMe too: it gives its memory back."""
        if hasattr(self, "_server"):
            await self._server.close()
        for tier, opened in self._tiers.items():
            is_kept_below = tier is Tier.RAM and Tier.NVME in self._tiers
            await self._on_thread(tier, opened.destroy if is_kept_below else opened.close)
        for thread in self._threads.values():
            thread.shutdown()
        self._folders.lock.close()

    def health(self) -> Health:
        """Ready, and degraded while a tier fails or is smaller than asked for."""
        base = super().health()
        reasons = (*self._short_of_room, *(self._core.troubles() if hasattr(self, "_core") else ()))
        return Health(ready=base.ready, degraded=bool(reasons), reasons=reasons)

    def load(self) -> dict[str, float]:
        """See Service."""
        loads: dict[str, float] = {}
        for tier in self._tiers:
            index = self._core.index_of(tier)
            assert index is not None
            loads[f"{tier.value}_blocks"] = float(len(index))
            loads[f"{tier.value}_used_share"] = round(index.used_bytes / max(index.capacity_bytes, 1), 4)
        return loads

    def kv_card(self) -> KvStoreCard:
        """See Service."""
        return KvStoreCard(
            shard_id=self.instance_id,
            epoch=self.epoch,
            host=self.settings.kvstore_advertise or self._own_host(),
            data_port=self._data_port,
            ram_path=str(self._folders.ram) if Tier.RAM in self._tiers else "",
            nvme_path=str(self._folders.nvme) if Tier.NVME in self._tiers else "",
            host_token=self._host_token,
        )

    def residency_seq(self) -> int:
        """See Service."""
        return self._core.seq

    def _own_host(self) -> str:
        """How others reach the address that is bound."""
        bound = self.settings.kvstore_host
        return socket.gethostname() if bound in ("", "0.0.0.0", "::") else bound

    # -- what the core asks for

    def _handle(self, event: Event) -> None:
        for instruction in self._core.handle(event):
            match instruction:
                case WriteBatch():
                    self.spawn(self._write(instruction))
                case Announce(delta):
                    self.spawn(self._announce(delta))
                case Settled():
                    self._wake()
                case LetGo(keys):
                    for key in keys:
                        self._frames.pop(key, None)
                case _:
                    assert_never(instruction)
        if self._core.pending_bytes <= self.settings.kvstore_waiting_bytes:
            self._room.set()

    async def _write(self, batch: WriteBatch) -> None:
        tier = self._tiers[batch.tier]
        puts = {key: self._frames[key] for key in batch.puts}
        try:
            await self._on_thread(batch.tier, lambda: tier.write(puts, batch.deletes))
        except TierError as failed:
            log.error("batch_failed", tier=batch.tier.value, puts=len(puts), error=failed.reason, full=failed.is_full)
            self._handle(BatchFailed(batch.tier, failed.reason, failed.is_full, self.clock.monotonic()))
        else:
            self._handle(BatchCommitted(batch.tier))
        self._wake()

    async def _announce(self, delta: ResidencyDelta) -> None:
        try:
            await self.bus.publish(RESIDENCY, delta)
        except WireError as away:
            # The gap in the numbers makes the router ask for a snapshot.
            log.warning("announcement_lost", seq=delta.seq, error=str(away))

    async def _on_thread(self, tier: Tier, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads[tier], work)

    def _wake(self) -> None:
        event, self._settled = self._settled, asyncio.Event()
        event.set()

    async def _next_settled(self) -> None:
        await self._settled.wait()

    # -- what the data port asks for

    async def put(self, data: bytes) -> BlockKey:
        """See BlockStore."""
        while self._core.pending_bytes > self.settings.kvstore_waiting_bytes:
            self._room.clear()
            await self._room.wait()
        PUTS.inc()
        try:
            header = checked_frame(data).header
        except FrameError as fault:
            FRAMES_REJECTED.labels(reason=fault.fault.value).inc()
            raise
        self._frames[header.key] = data
        block = BlockInfo(header.key, header.parent, disk_bytes(len(data)))
        self._handle(PutArrived(block, self.clock.monotonic()))
        return header.key

    async def settled(self, keys: set[BlockKey]) -> None:
        """See BlockStore."""
        while any(self._core.is_open(key) for key in keys):
            await self._next_settled()

    async def read(self, keys: tuple[BlockKey, ...]) -> list[tuple[Tier, bytes]]:
        """See BlockStore. One tier's run after the other, as the index has them."""
        frames: list[tuple[Tier, bytes]] = []
        while len(frames) < len(keys):
            tier = self._core.tier_of(keys[len(frames)])
            if tier is None:
                break
            run = 0
            for key in keys[len(frames) :]:
                if self._core.tier_of(key) is not tier:
                    break
                run += 1
            part = keys[len(frames) : len(frames) + run]
            opened = self._tiers[tier]
            found = await asyncio.get_running_loop().run_in_executor(None, opened.read, part)
            frames += [(tier, frame) for frame in found]
            if len(found) < run:
                break
        GETS.labels(outcome="found").inc(len(frames))
        GETS.labels(outcome="missing").inc(len(keys) - len(frames))
        return frames

    # -- what the bus says

    async def _snapshot(self, request: SnapshotRequest) -> ResidencySnapshot:
        return self._core.snapshot(request)

    def _touched(self, touched: KvTouched) -> None:
        if touched.shard_id == self.instance_id:
            self._handle(Touched(touched.keys))

    def _rejected(self, rejected: KvRejected) -> None:
        if rejected.shard_id == self.instance_id:
            FRAMES_REJECTED.labels(reason="reported").inc()
            self._handle(Damaged(rejected.tier, BlockKey(rejected.key)))

    async def _look_after(self) -> None:
        checked_at = self.clock.monotonic()
        while True:
            self._handle(Ticked(self.clock.monotonic()))
            WAITING.set(self._core.pending_bytes)
            for tier, opened in self._tiers.items():
                index = self._core.index_of(tier)
                assert index is not None
                BLOCKS.labels(tier=tier.value).set(len(index))
                BYTES.labels(tier=tier.value).set(index.used_bytes)
                evicted, skipped = self._core.counts(tier)
                EVICTED.labels(tier=tier.value).set(evicted)
                SKIPPED.labels(tier=tier.value).set(skipped)
                if self.clock.monotonic() - checked_at > READERS_CHECK_S:
                    await self._on_thread(tier, opened.release_dead_readers)
            if self.clock.monotonic() - checked_at > READERS_CHECK_S:
                checked_at = self.clock.monotonic()
            await self.clock.sleep(METRICS_EVERY_S)
