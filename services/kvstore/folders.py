"""Where a shard keeps its tiers, and that nobody else does: one folder a shard, held by a file lock while it lives."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import IO, Final

from services.kvstore.settings import KvStoreSettings
from services.kvstore.tier import TierUnusable

SHARDS_MAX: Final = 256
LOCK_FILE: Final = "lock"


@dataclass(frozen=True, slots=True)
class ShardFolders:
    """A shard's own folders. The lock ends with the process, however it ends."""

    shard_id: str
    ram: Path
    nvme: Path
    lock: IO[str]


def take_folders(settings: KvStoreSettings) -> ShardFolders:
    """The folders of this instance, or of the first shard nobody has. Raises TierUnusable."""
    nvme_root = (settings.kvstore_nvme_path or settings.home_path / "kv").expanduser().resolve()
    ram_root = settings.kvstore_ram_path or _shared_memory(settings.home_path)
    names = [settings.instance] if settings.instance else [f"shard-{number}" for number in range(SHARDS_MAX)]
    for name in names:
        folder = nvme_root / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as failed:
            raise TierUnusable(f"NVMe tier: {failed}") from failed
        lock = _locked(folder / LOCK_FILE)
        if lock is not None:
            return ShardFolders(name, ram_root.expanduser().resolve() / name, folder / "nvme", lock)
    raise TierUnusable(f"{nvme_root}: another process has {' or '.join(names[:3])}")


def _shared_memory(home: Path) -> Path:
    """A folder on the memory file system that belongs to this user and this home."""
    digest = sha256(str(home).encode()).hexdigest()[:12]
    return Path("/dev/shm") / f"roost-{os.getuid()}-{digest}"


def _locked(path: Path) -> IO[str] | None:
    lock = path.open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        return None
    return lock


def room_in(folder: Path, wanted_bytes: int) -> int:
    """`wanted_bytes`, or what the file system really has for this tier, with a tenth left for others."""
    folder.mkdir(parents=True, exist_ok=True)
    usage = os.statvfs(folder)
    here = sum(path.stat().st_blocks * 512 for path in folder.glob("*.mdb"))
    return min(wanted_bytes, (usage.f_bavail * usage.f_frsize + here) * 9 // 10)
