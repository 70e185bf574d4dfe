"""Pure: which router is the active one. A lease in a key-value bucket with compare-and-set, renewed well within its life.

Held only as long as the last renewal that succeeded says: counted from before it was asked for, so that the holder stops
no later than others may begin. A new life of the same instance takes over at once, as the old one cannot be alive.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

LEASE_KEY: Final = "router.active"
# The bucket forgets an entry after its TTL; should it not, an entry that did not change for so many TTLs is dead.
STALE_TTLS: Final = 2.0


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds the lease."""

    instance_id: str
    epoch: int

    def packed(self) -> bytes:
        """As the bucket has it."""
        return json.dumps({"instance_id": self.instance_id, "epoch": self.epoch}).encode()

    @classmethod
    def unpacked(cls, value: bytes) -> Holder | None:
        """Inverse of `packed`; None for anything else."""
        try:
            fields = json.loads(value)
            return cls(str(fields["instance_id"]), int(fields["epoch"]))
        except (ValueError, KeyError, TypeError):
            return None


class Step(StrEnum):
    """What to do with the bucket."""

    CREATE = "create"
    UPDATE = "update"
    WAIT = "wait"


class Lease:
    """Mutable; owned by the shell's lease task."""

    def __init__(self, me: Holder, ttl_s: float) -> None:
        self.me = me
        self._ttl_s = ttl_s
        self._held_until = float("-inf")
        self._seen_revision: int | None = None
        self._seen_since = 0.0

    def is_active(self, now: float) -> bool:
        """Whether the lease is surely ours."""
        return now < self._held_until

    @property
    def held_until(self) -> float:
        """When it ends unless it is renewed."""
        return self._held_until

    def decide(self, entry: tuple[bytes, int] | None, now: float) -> Step:
        """What to do about the entry (value, revision) that the bucket has."""
        if entry is None:
            return Step.CREATE
        value, revision = entry
        if revision != self._seen_revision:
            self._seen_revision, self._seen_since = revision, now
        holder = Holder.unpacked(value)
        if holder is None or (holder.instance_id == self.me.instance_id and holder.epoch <= self.me.epoch):
            return Step.UPDATE
        return Step.UPDATE if now - self._seen_since > STALE_TTLS * self._ttl_s else Step.WAIT

    def renewed(self, asked_at: float) -> None:
        """The bucket took our entry; it was asked to at this time."""
        self._held_until = asked_at + self._ttl_s

    def lost(self) -> None:
        """Somebody else has it."""
        self._held_until = float("-inf")
