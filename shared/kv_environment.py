"""Where a tier's LMDB environment lies, and whether a process may map it: names, host token, how much a frame takes.

LMDB tells its readers apart by pid, so an environment is shared only inside one pid namespace of one running machine. A
shard writes that into the host token, with a secret of its own in a file beside the environment: whoever reads the same file
and is on the same machine in the same pid namespace may map it (design.md section 6). Everyone else uses the data port.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Final

import lmdb

TOKEN_FILE: Final = "host-token"
PAGE_BYTES: Final = 4096
# Before a large value LMDB puts a page header.
_VALUE_HEAD_BYTES: Final = 16
# Processes that may read at once; a dead one's slot is taken back by the shard.
READERS_MAX: Final = 512
# LMDB finds room for a value only in one run of pages: this much more than the capacity keeps it from being full by holes.
MAP_SLACK_BYTES: Final = 64 * 1024 * 1024


def disk_bytes(frame_bytes: int) -> int:
    """Bytes that a frame takes in an environment: whole pages."""
    return -(-(frame_bytes + _VALUE_HEAD_BYTES) // PAGE_BYTES) * PAGE_BYTES


def map_bytes(capacity_bytes: int) -> int:
    """Size of the map for so many bytes of frames; address space and, in a sparse file, nothing more."""
    return capacity_bytes + capacity_bytes // 4 + MAP_SLACK_BYTES


def machine_and_namespace() -> str:
    """This boot of this machine and this pid namespace; two processes with the same can share an environment."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"


def new_host_token() -> str:
    """A token for this life of a shard."""
    return f"{machine_and_namespace()}:{secrets.token_hex(16)}"


def write_token(folder: Path, token: str) -> None:
    """Beside the environment, for readers to compare; appears whole or not at all."""
    draft = folder / f"{TOKEN_FILE}.draft"
    draft.write_text(token)
    draft.replace(folder / TOKEN_FILE)


def may_map(folder: Path, token: str) -> bool:
    """Whether `folder` is the one that the token's writer has, and LMDB can tell us apart."""
    if not token.startswith(f"{machine_and_namespace()}:"):
        return False
    try:
        return (folder / TOKEN_FILE).read_text() == token
    except OSError:
        return False


def open_for_reading(folder: Path) -> lmdb.Environment:
    """The environment, mapped read-only. Raises lmdb.Error or OSError."""
    return lmdb.open(
        str(folder),
        # As large as the shard made it; the library's own choice is what is in use now, which the shard soon outgrows.
        map_size=0,
        readonly=True,
        lock=True,
        create=False,
        max_readers=READERS_MAX,
        max_spare_txns=2,
        readahead=False,
    )


def open_for_writing(folder: Path, *, capacity_bytes: int, durable: bool) -> lmdb.Environment:
    """The shard's own handle. `writemap` stays off: with it a full disk kills the process (SIGBUS)."""
    return lmdb.open(
        str(folder),
        map_size=map_bytes(capacity_bytes),
        max_readers=READERS_MAX,
        sync=durable,
        metasync=durable,
        writemap=False,
        readahead=False,
        max_spare_txns=2,
    )
