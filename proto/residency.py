"""Pure: who holds which blocks. Sequence-numbered deltas, with a snapshot on a gap.

A holder is a worker (tier `device`) or a kvstore shard (tiers `ram` and `nvme`). Each life of a holder has an epoch; a
delta of an older life counts nothing. The router's index is a hint of known age: a wrong entry costs time, never tokens.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from proto.ids import Id
from proto.message import Keys, Message


class Tier(StrEnum):
    """Where a holder has a block."""

    DEVICE = "device"
    RAM = "ram"
    NVME = "nvme"


class TierChange(Message):
    """Keys that came to and went from one tier. Said only after the commit that made it true."""

    tier: Tier
    stored: Keys = ()
    dropped: Keys = ()


class ResidencyDelta(Message):
    """Change number `seq` of this holder's life; the first is 1."""

    holder_id: Id
    epoch: int
    seq: int = Field(ge=1)
    changes: tuple[TierChange, ...]


class SnapshotRequest(Message):
    """router -> holder: all you hold, from this key on (keys in sorted order, so that a page can follow a page)."""

    after_key: bytes = b""
    tier: Tier


class ResidencySnapshot(Message):
    """One page. `seq` is the last change that is really in it, taken in the same step as the keys."""

    holder_id: Id
    epoch: int
    seq: int
    tier: Tier
    keys: Keys
    is_last: bool
