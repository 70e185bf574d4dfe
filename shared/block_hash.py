"""Pure: the identity of a KV block. The only place where a block key is made (design.md section 3).

    namespace = blake3( every field, each as tag, length, bytes )                      32 bytes
    key[i]    = blake3( key[i-1] + u32le(tokens of block i), keyed by namespace )[:16]  16 bytes, key[-1] = 16 zero bytes

Fields are tagged and length-prefixed, so ("org_1", "2345") and ("org_12345", "") differ (failure catalogue F-SEC-04), and
token ids are fixed-width, so 65 and 321 do (F-HSH-05). The tenant's salt is one of the fields: two tenants share no block
unless they were given one salt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

from blake3 import blake3

from proto.fleet import ModelCard
from proto.ids import BLOCK_KEY_BYTES, NAMESPACE_DIGEST_BYTES, ROOT_KEY, BlockKey, NamespaceDigest
from proto.message import TOKEN_BYTES, pack_tokens

HASH_SPEC = "roost-block-v1"


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything besides the tokens that makes KV what it is."""

    fingerprint: str
    tokenizer_digest: str
    adapter: str
    kv_dtype: str
    layout_version: int
    block_tokens: int
    rope_scaling: str
    salt: bytes = b""

    @classmethod
    def of_card(cls, card: ModelCard, salt: bytes = b"") -> Namespace:
        """The namespace that this worker's blocks live in for the tenant with this salt."""
        return cls(
            fingerprint=card.fingerprint,
            tokenizer_digest=card.tokenizer_digest,
            adapter=card.adapter,
            kv_dtype=card.kv_dtype,
            layout_version=card.layout_version,
            block_tokens=card.block_tokens,
            rope_scaling=card.rope_scaling,
            salt=salt,
        )

    def digest(self) -> NamespaceDigest:
        """32 bytes that name this namespace."""
        hasher = blake3(HASH_SPEC.encode())
        for field, value in zip(fields(self), astuple(self), strict=True):
            data = value if isinstance(value, bytes) else str(value).encode()
            for part in (field.name.encode(), data):
                hasher.update(len(part).to_bytes(8, "little"))
                hasher.update(part)
        digest = NamespaceDigest(hasher.digest())
        assert len(digest) == NAMESPACE_DIGEST_BYTES
        return digest


def chain_keys(
    namespace: NamespaceDigest, tokens: Sequence[int], block_tokens: int, parent: BlockKey = ROOT_KEY
) -> tuple[BlockKey, ...]:
    """Keys of the full blocks of `tokens`, which begin right after the block `parent`. A partial tail has no key."""
    assert block_tokens >= 1 and len(namespace) == NAMESPACE_DIGEST_BYTES
    packed = pack_tokens(tokens[: len(tokens) // block_tokens * block_tokens])
    width = block_tokens * TOKEN_BYTES
    keys = []
    for start in range(0, len(packed), width):
        parent = BlockKey(blake3(parent + packed[start : start + width], key=namespace).digest(BLOCK_KEY_BYTES))
        keys.append(parent)
    return tuple(keys)
