"""One tier: frames in an LMDB environment, by key. The only writer of it. RAM and NVMe differ in the folder and in fsync.

Blocking; the shell calls it from the tier's own thread. A transaction is all or nothing, and readers in other processes see it
whole. What cannot be opened is set aside, never deleted: somebody may want to look at it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import lmdb

from proto.frame import Frame, FrameError, FrameFault, FrameHeader, check_body, decode_frame, decode_header
from proto.ids import BLOCK_KEY_BYTES, BlockKey, NamespaceDigest
from proto.residency import Tier
from services.kvstore.events import BlockInfo
from shared.block_hash import chain_keys
from shared.errors import RoostError
from shared.kv_environment import disk_bytes, open_for_writing, write_token
from shared.log import get_logger
from shared.metrics import FRAMES_REJECTED

# Deletes of one transaction while cleaning up; a large one dirties many pages at once.
CLEAN_COUNT_MAX: Final = 1_024

log = get_logger()


class TierError(RoostError):
    """A transaction failed and nothing of it is in the tier. `is_full`: for want of room."""

    def __init__(self, tier: Tier, reason: str, *, is_full: bool) -> None:
        super().__init__(f"{tier} tier: {reason}")
        self.tier, self.reason, self.is_full = tier, reason, is_full


class TierUnusable(RoostError):
    """The tier's folder cannot be used at all. The start stops."""


def check_key(header: FrameHeader) -> None:
    """Raises FrameError(KEY) unless the key is that of namespace, parent and tokens: a frame certifies itself."""
    if not header.tokens:
        raise FrameError(FrameFault.TOKENS, "a block without tokens")
    (key,) = chain_keys(NamespaceDigest(header.namespace), header.tokens, len(header.tokens), header.parent)
    if key != header.key:
        raise FrameError(FrameFault.KEY, "the key is not that of the tokens")


def checked_frame(data: bytes) -> Frame:
    """A frame that came to be stored: form, key and checksum. Raises FrameError."""
    frame = decode_frame(data)
    check_key(frame.header)
    check_body(frame)
    return frame


class LmdbTier:
    """Owns the environment. Not thread-safe, but for `read`, which may be called from another thread."""

    def __init__(self, tier: Tier, folder: Path, *, capacity_bytes: int, host_token: str) -> None:
        """Raises TierUnusable."""
        self.tier, self.folder = tier, folder
        self._capacity_bytes, self._host_token = capacity_bytes, host_token
        self._environment = self._open()

    def _open(self) -> lmdb.Environment:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                environment = self._opened()
            except (lmdb.InvalidError, lmdb.CorruptedError, lmdb.VersionMismatchError, lmdb.PanicError) as damaged:
                self._set_aside(damaged)
                environment = self._opened()
            write_token(self.folder, self._host_token)
        except (OSError, lmdb.Error) as failed:
            raise TierUnusable(f"{self.tier} tier in {self.folder}: {failed}") from failed
        # Slots of readers that were killed keep old pages from being used again.
        environment.reader_check()
        return environment

    def _opened(self) -> lmdb.Environment:
        return open_for_writing(self.folder, capacity_bytes=self._capacity_bytes, durable=self.tier is Tier.NVME)

    def _set_aside(self, damaged: lmdb.Error) -> None:
        aside = self.folder.with_name(f"{self.folder.name}.damaged-{int(time.time())}")
        shutil.move(self.folder, aside)
        self.folder.mkdir()
        log.error("environment_set_aside", tier=self.tier.value, moved_to=str(aside), error=str(damaged))
        FRAMES_REJECTED.labels(reason="environment").inc()

    def scan(self) -> tuple[BlockInfo, ...]:
        """Every frame whose header is right, parents not necessarily first. Others are deleted and counted.

        Reads one page a frame: bodies are checked when they are read for use.
        """
        found: list[BlockInfo] = []
        bad: list[bytes] = []
        with self._environment.begin(buffers=True) as transaction:
            for key, data in transaction.cursor():
                try:
                    header = decode_header(data)
                    check_key(header)
                    if bytes(key) != header.key:
                        raise FrameError(FrameFault.KEY, "lies under another key")
                except FrameError as fault:
                    FRAMES_REJECTED.labels(reason=fault.fault.value).inc()
                    log.warning("frame_rejected", tier=self.tier.value, key=bytes(key).hex()[:32], error=str(fault))
                    bad.append(bytes(key))
                    continue
                found.append(BlockInfo(header.key, header.parent, disk_bytes(len(data))))
        for first in range(0, len(bad), CLEAN_COUNT_MAX):
            self.write({}, bad[first : first + CLEAN_COUNT_MAX])
        return tuple(found)

    def write(self, puts: Mapping[BlockKey, bytes], deletes: Sequence[bytes]) -> None:
        """Delete, then put, in one transaction; on disk (NVMe) when this returns. Raises TierError."""
        try:
            with self._environment.begin(write=True) as transaction:
                for key in deletes:
                    transaction.delete(key)
                for block_key, frame in puts.items():
                    assert len(block_key) == BLOCK_KEY_BYTES
                    transaction.put(block_key, frame)
        except lmdb.MapFullError as full:
            raise TierError(self.tier, "the map is full", is_full=True) from full
        except lmdb.Error as failed:
            # LMDB reports a full or failing disk at commit; the last committed state stays as it was.
            is_full = "space" in str(failed).lower()
            raise TierError(self.tier, str(failed), is_full=is_full) from failed

    def read(self, keys: Sequence[BlockKey]) -> list[bytes]:
        """Copies of the frames of these keys, up to the first that is not here."""
        frames: list[bytes] = []
        with self._environment.begin() as transaction:
            for key in keys:
                frame = transaction.get(key)
                if frame is None:
                    break
                frames.append(frame)
        return frames

    def release_dead_readers(self) -> int:
        """Give back the slots of processes that died while reading. How many there were."""
        freed: int = self._environment.reader_check()
        return freed

    def close(self) -> None:
        """Let go of the map."""
        self._environment.close()

    def destroy(self) -> None:
        """Close and remove the folder: a RAM tier whose content is on NVMe too should not outlive its shard."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)
