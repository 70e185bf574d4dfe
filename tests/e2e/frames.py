"""A look into a kvstore's LMDB tiers, and damage done to them behind its back."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import lmdb

from proto.frame import decode_header
from proto.ids import ROOT_KEY

BLOCK_TOKENS = 16

# In a process of its own, as LMDB wants one handle a process; a key whose new value is null is deleted.
WRITE = """
import json, lmdb, sys
environment = lmdb.open(sys.argv[1], map_size=0)
with environment.begin(write=True) as transaction:
    for key, value in json.load(sys.stdin).items():
        if value is None:
            transaction.delete(bytes.fromhex(key))
        else:
            transaction.put(bytes.fromhex(key), bytes.fromhex(value))
environment.close()
"""


@dataclass(frozen=True)
class Tier:
    """One tier's folder."""

    folder: Path

    def frames(self) -> dict[bytes, bytes]:
        """All frames by key."""
        with lmdb.open(str(self.folder), readonly=True, map_size=0) as environment, environment.begin() as transaction:
            return {bytes(key): bytes(frame) for key, frame in transaction.cursor()}

    def chain(self, tokens: Sequence[int]) -> list[bytes]:
        """Keys of the blocks that hold these tokens, from the first one on, as far as they are here."""
        by_content = {}
        for key, frame in self.frames().items():
            header = decode_header(frame)
            by_content[header.parent, header.tokens] = key
        keys: list[bytes] = []
        for first in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            parent = keys[-1] if keys else bytes(ROOT_KEY)
            key = by_content.get((parent, tuple(tokens[first : first + BLOCK_TOKENS])))  # type: ignore[call-overload]
            if key is None:
                break
            keys.append(key)
        return keys

    def write(self, changes: dict[bytes, bytes | None]) -> None:
        """Put or delete."""
        text = json.dumps({key.hex(): None if value is None else value.hex() for key, value in changes.items()})
        subprocess.run([sys.executable, "-c", WRITE, str(self.folder)], input=text, text=True, check=True)
