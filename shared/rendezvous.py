"""Pure: rendezvous hashing: every client picks the same shard for a chain; a shard that comes or goes moves only its own."""

from __future__ import annotations

from collections.abc import Iterable

from blake3 import blake3

from proto.ids import BlockKey


def pick(first_key: BlockKey, shard_ids: Iterable[str]) -> str | None:
    """The shard for the chain that begins with `first_key`: the one with the highest hash. None without shards.

    A chain goes to one shard as a whole, so that its blocks lie together and evict together (highest random weight,
    Thaler and Ravishankar 1998).
    """
    return max(shard_ids, key=lambda shard_id: blake3(first_key + shard_id.encode()).digest(8), default=None)
