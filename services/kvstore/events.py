"""Pure: what the kvstore's core is told, and what it asks of its shell."""

from __future__ import annotations

from dataclasses import dataclass

from proto.ids import BlockKey
from proto.residency import ResidencyDelta, Tier


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """A frame without its bytes. `size_bytes` is what it takes in a tier."""

    key: BlockKey
    parent: BlockKey
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Found:
    """The tier was read at the start: these frames are in it."""

    tier: Tier
    blocks: tuple[BlockInfo, ...]


@dataclass(frozen=True, slots=True)
class PutArrived:
    """A worker sent a frame, and its form and checksum are right. `now` is monotonic seconds."""

    block: BlockInfo
    now: float


@dataclass(frozen=True, slots=True)
class BatchCommitted:
    """The batch that was asked for is in the tier."""

    tier: Tier


@dataclass(frozen=True, slots=True)
class BatchFailed:
    """Nothing of the batch is in the tier. `is_full` says that the tier itself had no room, whatever we counted."""

    tier: Tier
    reason: str
    is_full: bool
    now: float


@dataclass(frozen=True, slots=True)
class Touched:
    """Blocks of one chain were read, in chain order."""

    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class Damaged:
    """A frame failed a check on reading, or is not where it should be."""

    tier: Tier
    key: BlockKey


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time passed. Needed now and then: a tier that failed is tried again with the deletes that are left."""

    now: float


Event = Found | PutArrived | BatchCommitted | BatchFailed | Touched | Damaged | Ticked


@dataclass(frozen=True, slots=True)
class WriteBatch:
    """Do this in one transaction: first delete, then put. One batch a tier at a time; its end is told as an event."""

    tier: Tier
    deletes: tuple[BlockKey, ...]
    puts: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class LetGo:
    """The bytes of these frames are not needed any more."""

    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class Settled:
    """These puts are readable, or dropped: whoever waits for them may go on."""

    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell the routers."""

    delta: ResidencyDelta


Instruction = WriteBatch | LetGo | Settled | Announce
