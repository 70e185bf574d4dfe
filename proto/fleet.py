"""Pure: everyone -> everyone. Heartbeats, and the cards by which parts of one system find and check each other."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from proto.ids import Id
from proto.message import Message


class ServiceState(StrEnum):
    """Life of a service: it only moves to the right."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"


class ModelCard(Message):
    """What a worker serves. Everything that makes KV differ is here; loop and router compute keys from it.

    Travels in the worker's heartbeats.
    """

    worker_id: Id
    epoch: int
    model: str
    # blake3 of weights and config; never a path.
    fingerprint: str
    tokenizer_digest: str
    adapter: str = ""
    kv_dtype: str
    layout_version: int
    block_tokens: int = Field(ge=1)
    rope_scaling: str = ""
    context_tokens: int
    block_bytes: int


class KvStoreCard(Message):
    """Where a kvstore shard is. Travels in its heartbeats.

    `host_token` tells a reader whether the paths mean the same files to it: it is the content of a file in the tier's
    folder, so a reader that finds it there may map the environments, and one that does not uses the data port.
    """

    shard_id: Id
    epoch: int
    host: str
    data_port: int
    ram_path: str
    nvme_path: str
    host_token: str


class Heartbeat(Message):
    """Said each second, on every change of state, and in answer to a fleet ping. `reasons` says why it is not well."""

    service: str
    instance_id: Id
    epoch: int
    state: ServiceState
    degraded: bool = False
    reasons: tuple[str, ...] = ()
    host: str
    pid: int
    metrics_port: int
    started_at: float
    sent_at: float
    load: dict[str, float] = Field(default_factory=dict)
    # What this instance serves (workers) or holds (kvstore); heartbeats are how everyone learns of them.
    model_card: ModelCard | None = None
    kv_card: KvStoreCard | None = None
    # The last ResidencyDelta of this life, of who holds blocks: shows that the last one was lost when none follows.
    residency_seq: int | None = Field(default=None, ge=0)


class FleetPing(Message):
    """Ask everyone for a heartbeat now."""

    asked_by: str
