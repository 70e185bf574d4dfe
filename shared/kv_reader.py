"""A worker's own look into a shard's LMDB environments: read-only, memory-mapped, every frame checked before it is used.

Blocking: belongs to one thread of the client. A body is copied once, out of the map, after its check; the transaction that
keeps the pages in place lasts for one call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import lmdb

from proto.fleet import KvStoreCard
from proto.frame import FrameError, FrameFault, FrameFormat, check_frame, decode_frame
from proto.ids import BlockKey
from proto.receipt import Source
from proto.residency import Tier
from shared.errors import RoostError
from shared.kv_environment import may_map, open_for_reading

SOURCE_OF_TIER = {Tier.RAM: Source.RAM, Tier.NVME: Source.NVME}


@dataclass(frozen=True, slots=True)
class WantedBlock:
    """A block of a chain as whoever asks for it knows it."""

    key: BlockKey
    parent: BlockKey
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FetchedBlock:
    """A block whose frame passed every check. `body` is the caller's own copy."""

    key: BlockKey
    body: bytes | memoryview
    source: Source


@dataclass(frozen=True, slots=True)
class Rejected:
    """A frame that did not pass."""

    tier: Tier
    key: BlockKey
    fault: FrameFault


@dataclass(slots=True)
class ReadRun:
    """What a read found: a run of blocks from the first wanted one on, and what it passed over."""

    blocks: list[FetchedBlock] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)


class KvReadError(RoostError):
    """The environment cannot be read at present; the data port may."""


class KvReader:
    """Owns the read-only maps of one life of one shard."""

    def __init__(self, card: KvStoreCard) -> None:
        """Maps each tier that may be mapped, RAM first. Raises KvReadError."""
        self.card = card
        self._environments: list[tuple[Tier, lmdb.Environment]] = []
        for tier, path in ((Tier.RAM, card.ram_path), (Tier.NVME, card.nvme_path)):
            if path and may_map(Path(path), card.host_token):
                try:
                    self._environments.append((tier, open_for_reading(Path(path))))
                except (OSError, lmdb.Error) as failed:
                    self.close()
                    raise KvReadError(f"{path}: {failed}") from failed

    @property
    def is_complete(self) -> bool:
        """Every tier of the shard could be mapped. If not, the data port sees more."""
        paths = sum(bool(path) for path in (self.card.ram_path, self.card.nvme_path))
        return len(self._environments) == paths

    def read(self, format: FrameFormat, namespace: bytes, wanted: Sequence[WantedBlock]) -> ReadRun:
        """Blocks in order, up to the first that no tier has in good order. Raises KvReadError."""
        run = ReadRun()
        try:
            with ExitStack() as stack:
                transactions = [
                    (tier, stack.enter_context(environment.begin(buffers=True)))
                    for tier, environment in self._environments
                ]
                for block in wanted:
                    found = self._find(transactions, format, namespace, block, run.rejected)
                    if found is None:
                        break
                    run.blocks.append(found)
        except lmdb.Error as failed:
            raise KvReadError(str(failed)) from failed
        return run

    def _find(
        self,
        transactions: Sequence[tuple[Tier, lmdb.Transaction]],
        format: FrameFormat,
        namespace: bytes,
        block: WantedBlock,
        rejected: list[Rejected],
    ) -> FetchedBlock | None:
        for tier, data in self._copies(transactions, block.key):
            try:
                body = checked_body(data, format, namespace, block)
            except FrameError as fault:
                rejected.append(Rejected(tier, block.key, fault.fault))
                continue
            return FetchedBlock(block.key, bytes(body), SOURCE_OF_TIER[tier])
        return None

    def _copies(
        self, transactions: Sequence[tuple[Tier, lmdb.Transaction]], key: BlockKey
    ) -> Iterator[tuple[Tier, memoryview]]:
        for tier, transaction in transactions:
            data = transaction.get(key)
            if data is not None:
                yield tier, memoryview(data)

    def close(self) -> None:
        """Let go of the maps. Idempotent."""
        while self._environments:
            self._environments.pop()[1].close()


def checked_body(data: bytes | memoryview, format: FrameFormat, namespace: bytes, block: WantedBlock) -> memoryview:
    """The body of the frame `data`, if it is exactly the wanted block. Raises FrameError."""
    frame = decode_frame(data)
    check_frame(frame, format, namespace=namespace, key=block.key, parent=block.parent, tokens=block.tokens)
    return frame.body
