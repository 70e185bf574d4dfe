"""Pure: engines <-> kvstore, the control side. The bytes themselves travel as frames (proto/frame.py), never on NATS."""

from __future__ import annotations

from proto.ids import Id
from proto.message import Keys, Message
from proto.residency import Tier


class KvTouched(Message):
    """worker -> kvstore: I read these straight from your environment; they are in use (recency for eviction)."""

    shard_id: Id
    keys: Keys


class KvRejected(Message):
    """worker -> kvstore: this frame failed a check and was not served. Quarantine it and say that it is gone."""

    shard_id: Id
    tier: Tier
    key: bytes
    reason: str
