"""What the kvstore reads from its environment."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from shared.limits import MIB
from shared.settings import RoostSettings


class KvStoreSettings(RoostSettings):
    """Variables ROOST_KVSTORE_*."""

    # Folder of the RAM tier, on a memory file system. Empty: one of this home's own under /dev/shm.
    kvstore_ram_path: Path | None = None
    # Folder of the NVMe tier. Empty: `kv` in ROOST_HOME.
    kvstore_nvme_path: Path | None = None
    # Bytes of frames kept in each tier; 0 leaves a tier out.
    kvstore_ram_bytes: int = Field(default=1024 * MIB, ge=0)
    kvstore_nvme_bytes: int = Field(default=8 * 1024 * MIB, ge=0)
    # Address of the data port, port 0 takes any free one; `advertise` is the host name workers are told, if another.
    kvstore_host: str = "127.0.0.1"
    kvstore_port: int = Field(default=0, ge=0, le=65535)
    kvstore_advertise: str | None = None
    # Frames that wait for a commit. Beyond it a slow NVMe tier is passed over, and a slow RAM tier slows the senders down.
    kvstore_waiting_bytes: int = Field(default=256 * MIB, ge=MIB)
    # Connections to the data port.
    kvstore_connections_max: int = Field(default=256, ge=1, le=65_536)
