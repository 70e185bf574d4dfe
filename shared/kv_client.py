"""How a worker reads and writes KV blocks below its device: the shard's LMDB where it may be mapped, else its data port.

    fetch   direct: one thread maps the environments and checks frames;  else: GET on the data port, checked here
    put     always through the shard's data port, from a bounded queue, in order;  full or no shard: dropped, counted
    flush   everything put before is readable, or known to be dropped

A shard is found by its heartbeats; a chain's shard is rendezvous-hashed from its first key. A shard that fails is left alone
for a while and says so in `trouble`: that costs a recompute, never an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from proto import data_port
from proto.errors import WireError
from proto.fleet import Heartbeat, KvStoreCard, ServiceState
from proto.frame import FrameError, FrameFormat, FrameHeader, encode_frame
from proto.ids import BlockKey
from proto.kv import KvRejected, KvTouched
from proto.receipt import Source
from proto.subjects import HEARTBEAT, KV_REJECTED, KV_TOUCHED, Subject
from shared.bus import Bus
from shared.cards import CardBook
from shared.clock import Clock
from shared.engine.protocol import SealedBlock
from shared.kv_channel import ChannelError, DataChannel
from shared.kv_reader import FetchedBlock, KvReader, KvReadError, ReadRun, Rejected, WantedBlock, checked_body
from shared.kv_sender import PutSender
from shared.limits import MIB
from shared.log import get_logger
from shared.metrics import FRAMES_REJECTED, counter
from shared.rendezvous import pick

# Blocks of one read: enough to make a thread hop cheap, few enough that the engine can begin to load.
READ_COUNT_MAX: Final = 8
GET_S_MAX: Final = 2.0
# A shard that failed is not asked again before this, doubled at each further failure.
PAUSE_S_MIN: Final = 0.5
PAUSE_S_MAX: Final = 30.0

FALLBACKS = counter(
    "roost_kv_fetch_fallbacks_total", "Fetches that could not use what the shard holds, by why.", ("reason",)
)

log = get_logger()


@dataclass(frozen=True, slots=True)
class KvClientSettings:
    """Bounds of one worker's client."""

    # Frames that wait to be sent. A worker whose kvstore is behind goes on without it.
    puts_waiting_bytes_max: int = 256 * MIB
    # Off: the data port is used even where the environments could be mapped.
    maps_environments: bool = True


@dataclass(slots=True)
class _Shard:
    """What this client has of one shard."""

    card: KvStoreCard
    sender: PutSender
    # None: not tried for this life yet, or not to be had; see `is_mappable`.
    reader: KvReader | None = None
    is_mappable: bool = True
    channel: DataChannel | None = None
    gets: asyncio.Lock = field(default_factory=asyncio.Lock)
    get_number: int = 0
    failures: int = 0
    paused_until: float = 0.0
    trouble: str = ""


class Fetch:
    """One fetch in progress: iterate it for FetchedBlocks in chain order. Its numbers are final after the last one."""

    def __init__(self, runs: AsyncIterator[ReadRun]) -> None:
        self.rejected = 0
        self.fallback: str | None = None
        self.bytes_moved = 0
        self._runs = runs
        self._blocks = self._iterate()

    def __aiter__(self) -> AsyncIterator[FetchedBlock]:
        return self._blocks

    async def _iterate(self) -> AsyncIterator[FetchedBlock]:
        try:
            async for run in self._runs:
                self.rejected += len(run.rejected)
                if run.rejected:
                    self.fallback = f"frame rejected: {run.rejected[0].fault}"
                for block in run.blocks:
                    self.bytes_moved += len(block.body)
                    yield block
        except (ChannelError, KvReadError) as failed:
            self.fallback = str(failed)

    async def close(self) -> None:
        """Stop early. Idempotent."""
        await self._blocks.aclose()  # type: ignore[attr-defined]  # an async generator
        await self._runs.aclose()  # type: ignore[attr-defined]


class KvClient:
    """One worker's client of all shards. Lives on the worker's event loop; one thread reads maps."""

    def __init__(self, bus: Bus, clock: Clock, format: FrameFormat, settings: KvClientSettings | None = None) -> None:
        self._bus, self._clock, self._format = bus, clock, format
        self._settings = settings or KvClientSettings()
        self._cards = CardBook()
        self._shards: dict[str, _Shard] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-read")

    async def open(self) -> None:
        """Listen for shards."""
        await self._bus.subscribe(HEARTBEAT, Heartbeat, self._heard, service="kvstore")

    @property
    def is_connected(self) -> bool:
        """A shard is known and not failing."""
        now = self._clock.monotonic()
        return any(shard.paused_until <= now for shard in self._known().values())

    @property
    def trouble(self) -> str | None:
        """Why the kvstore is not used as it should be, if so."""
        shards = self._known()
        if not shards:
            return "no kvstore is heard"
        return next((shard.trouble for shard in shards.values() if shard.trouble), None)

    # -- shards

    def _heard(self, heartbeat: Heartbeat) -> None:
        self._cards.hear(heartbeat, self._clock.monotonic())
        if heartbeat.state is ServiceState.STOPPED and (shard := self._shards.get(heartbeat.instance_id)) is not None:
            if shard.card.epoch <= heartbeat.epoch:
                self._forget(shard)
            return
        card = heartbeat.kv_card
        if card is None:
            return
        known = self._shards.get(card.shard_id)
        if known is not None and known.card.epoch >= card.epoch:
            return
        if known is not None:
            self._forget(known)
        sender = PutSender(
            card.host, card.data_port, bytes_max=self._settings.puts_waiting_bytes_max, spawn=self._bus.spawn
        )
        self._shards[card.shard_id] = _Shard(card, sender)

    def _known(self) -> dict[str, _Shard]:
        """Live shards by id; those that fell silent are let go."""
        for gone in self._cards.forget_silent(self._clock.monotonic()):
            shard = self._shards.get(gone.kv_card.shard_id) if gone.kv_card is not None else None
            if shard is not None and shard.card.epoch <= gone.epoch:
                self._forget(shard)
        return self._shards

    def _forget(self, shard: _Shard) -> None:
        self._shards.pop(shard.card.shard_id, None)
        shard.sender.close()
        if shard.channel is not None:
            shard.channel.close()
        if shard.reader is not None:
            # On the thread that may be reading from it.
            self._thread.submit(shard.reader.close)

    def _shard_of(self, first_key: BlockKey) -> _Shard | None:
        shards = self._known()
        picked = pick(first_key, shards)
        return None if picked is None else shards[picked]

    def _failed(self, shard: _Shard, failed: Exception) -> None:
        pause_s = min(PAUSE_S_MIN * 2**shard.failures, PAUSE_S_MAX)
        shard.failures = min(shard.failures + 1, 16)
        shard.paused_until = self._clock.monotonic() + pause_s
        shard.trouble = f"{shard.card.shard_id}: {failed}"
        FALLBACKS.labels(reason="failed").inc()
        log.warning("kv_shard_failed", shard=shard.card.shard_id, error=str(failed), paused_s=pause_s)

    # -- fetch

    def fetch(self, namespace: bytes, first_key: BlockKey, wanted: Sequence[WantedBlock]) -> Fetch:
        """Consecutive blocks of the chain that begins with `first_key`, as far as its shard has them in good order."""
        return Fetch(self._runs(namespace, first_key, wanted))

    async def _runs(
        self, namespace: bytes, first_key: BlockKey, wanted: Sequence[WantedBlock]
    ) -> AsyncIterator[ReadRun]:
        shard = self._shard_of(first_key)
        if shard is None or not wanted:
            return
        if shard.paused_until > self._clock.monotonic():
            FALLBACKS.labels(reason="paused").inc()
            raise ChannelError(shard.trouble)
        read: list[BlockKey] = []
        try:
            for first in range(0, len(wanted), READ_COUNT_MAX):
                part = wanted[first : first + READ_COUNT_MAX]
                run = await self._read(shard, namespace, part)
                read += [block.key for block in run.blocks]
                await self._report(shard, run.rejected)
                yield run
                if len(run.blocks) < len(part):
                    break
            shard.failures, shard.trouble = 0, ""
        except (ChannelError, KvReadError) as failed:
            self._failed(shard, failed)
            raise
        finally:
            if read:
                await self._tell(KV_TOUCHED, KvTouched(shard_id=shard.card.shard_id, keys=tuple(read)))

    async def _tell(self, subject: Subject, message: KvTouched | KvRejected) -> None:
        # NATS is away: the shard orders its evictions a little worse, or finds the bad frame by itself.
        with suppress(WireError):
            await self._bus.publish(subject, message)

    async def _read(self, shard: _Shard, namespace: bytes, wanted: Sequence[WantedBlock]) -> ReadRun:
        if self._settings.maps_environments and shard.is_mappable:
            try:
                return await asyncio.get_running_loop().run_in_executor(
                    self._thread, self._read_map, shard, namespace, wanted
                )
            except KvReadError as failed:
                shard.is_mappable = False
                log.warning("kv_map_failed", shard=shard.card.shard_id, error=str(failed), uses="data port")
        return await self._read_port(shard, namespace, wanted)

    def _read_map(self, shard: _Shard, namespace: bytes, wanted: Sequence[WantedBlock]) -> ReadRun:
        """On the reading thread."""
        if shard.reader is None:
            reader = KvReader(shard.card)
            if not reader.is_complete:
                reader.close()
                raise KvReadError("the tiers are not on this host, or not in this pid namespace")
            shard.reader = reader
        return shard.reader.read(self._format, namespace, wanted)

    async def _read_port(self, shard: _Shard, namespace: bytes, wanted: Sequence[WantedBlock]) -> ReadRun:
        run = ReadRun()
        async with shard.gets:
            if shard.channel is None:
                shard.channel = await DataChannel.open(shard.card.host, shard.card.data_port)
            channel, is_read_out = shard.channel, False
            try:
                await self._get(shard, channel, namespace, wanted, run)
                is_read_out = True
            finally:
                if not is_read_out:
                    # Whatever was left unread would be taken for the answer of the next get.
                    channel.close()
                    shard.channel = None
        return run

    async def _get(
        self, shard: _Shard, channel: DataChannel, namespace: bytes, wanted: Sequence[WantedBlock], run: ReadRun
    ) -> None:
        shard.get_number += 1
        await channel.send(data_port.get(shard.get_number, tuple(block.key for block in wanted)), GET_S_MAX)
        for place in range(len(wanted) + 1):
            answer = await channel.receive(GET_S_MAX)
            if answer.kind is data_port.Kind.END:
                return
            try:
                number, tier, data = data_port.frame_of(answer)
            except data_port.PacketError as wrong:
                raise ChannelError(str(wrong)) from wrong
            if number != shard.get_number or place == len(wanted):
                raise ChannelError("the shard answers something else")
            if run.rejected:
                continue
            try:
                body = checked_body(data, self._format, namespace, wanted[place])
            except FrameError as fault:
                run.rejected.append(Rejected(tier, wanted[place].key, fault.fault))
                continue
            run.blocks.append(FetchedBlock(wanted[place].key, body, Source.POOL))

    async def _report(self, shard: _Shard, rejected: Sequence[Rejected]) -> None:
        for frame in rejected:
            FRAMES_REJECTED.labels(reason=frame.fault.value).inc()
            FALLBACKS.labels(reason="rejected").inc()
            log.warning(
                "frame_rejected",
                shard=shard.card.shard_id,
                tier=frame.tier.value,
                key=frame.key.hex(),
                fault=frame.fault.value,
            )
            report = KvRejected(shard_id=shard.card.shard_id, tier=frame.tier, key=frame.key, reason=frame.fault.value)
            await self._tell(KV_REJECTED, report)

    # -- put

    def put(self, namespace: bytes, first_key: BlockKey, blocks: Sequence[tuple[SealedBlock, bytes]]) -> bool:
        """Queue blocks of one chain, in order, for its shard. False if none of them was taken: no shard, or it is behind."""
        shard = self._shard_of(first_key)
        if shard is None:
            return False
        for sealed, body in blocks:
            header = FrameHeader(
                namespace=namespace,
                key=sealed.key,
                parent=sealed.parent,
                tokens=sealed.tokens,
                dtype=self._format.kv_dtype,
                layout_version=self._format.layout_version,
                shape=self._format.shape,
            )
            if not shard.sender.put(encode_frame(header, body)):
                return False
        return True

    async def flush(self, timeout_s: float) -> bool:
        """Whether within this time everything that was put before became readable, or was dropped by its shard."""
        flushes = [shard.sender.flush(timeout_s) for shard in self._known().values()]
        return all(await asyncio.gather(*flushes))

    async def close(self) -> None:
        """Send what is queued for a moment, then let go of everything."""
        await self.flush(1.0)
        for shard in list(self._shards.values()):
            self._forget(shard)
        await asyncio.to_thread(self._thread.shutdown)
