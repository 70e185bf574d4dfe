"""Pure: the identifiers that travel between services, as distinct types so that mypy tells them apart."""

from __future__ import annotations

import re
from typing import Annotated, NewType

from pydantic import StringConstraints

# Ids end up in NATS subjects, where "." separates tokens and "*" and ">" are wildcards: none of them may occur in an id.
ID_PATTERN = r"^[A-Za-z0-9_-]{1,64}$"
ID_REGEX = re.compile(ID_PATTERN)

Id = Annotated[str, StringConstraints(pattern=ID_PATTERN)]

SessionId = NewType("SessionId", str)
TurnId = NewType("TurnId", str)
GenerationId = NewType("GenerationId", str)
# A worker or a kvstore shard: whatever can hold blocks. Stable over restarts; the epoch tells lives apart.
HolderId = NewType("HolderId", str)
# 16 bytes: blake3 over parent key and token ids, keyed by the namespace (shared/block_hash.py).
BlockKey = NewType("BlockKey", bytes)
# 32 bytes: blake3 over everything that makes two equal token runs have different KV.
NamespaceDigest = NewType("NamespaceDigest", bytes)

BLOCK_KEY_BYTES = 16
NAMESPACE_DIGEST_BYTES = 32
# The parent of a sequence's first block.
ROOT_KEY = BlockKey(bytes(BLOCK_KEY_BYTES))
