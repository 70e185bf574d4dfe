"""Blocks of made-up chains, as workers would send them."""

from __future__ import annotations

from proto.frame import FrameFormat, FrameHeader, encode_frame
from proto.ids import ROOT_KEY, BlockKey, NamespaceDigest
from services.kvstore.events import BlockInfo
from shared.block_hash import chain_keys
from shared.engine.protocol import SealedBlock
from shared.kv_reader import WantedBlock

NAMESPACE = NamespaceDigest(b"n" * 32)
BLOCK_TOKENS = 4
SHAPE = (2, 2, 1, BLOCK_TOKENS, 8)
BODY_BYTES = 2 * 2 * 1 * BLOCK_TOKENS * 8 * 4
FORMAT = FrameFormat("float32", 1, SHAPE, BODY_BYTES, BLOCK_TOKENS)


def chain(count: int, *, seed: int = 0, namespace: NamespaceDigest = NAMESPACE) -> list[SealedBlock]:
    """`count` consecutive blocks; another seed gives another chain."""
    tokens = tuple(seed * 1_000 + place for place in range(count * BLOCK_TOKENS))
    keys = chain_keys(namespace, tokens, BLOCK_TOKENS)
    parents = [ROOT_KEY, *keys[:-1]]
    return [
        SealedBlock(key, parent, tokens[place * BLOCK_TOKENS : (place + 1) * BLOCK_TOKENS], namespace)
        for place, (key, parent) in enumerate(zip(keys, parents, strict=True))
    ]


def body_of(key: BlockKey) -> bytes:
    """Bytes that belong to this key and no other."""
    return (key * (BODY_BYTES // len(key) + 1))[:BODY_BYTES]


def frame_of(block: SealedBlock, body: bytes | None = None) -> bytes:
    header = FrameHeader(block.namespace, block.key, block.parent, block.tokens, "float32", 1, SHAPE)
    return encode_frame(header, body_of(block.key) if body is None else body)


def info(block: SealedBlock, size_bytes: int = 100) -> BlockInfo:
    return BlockInfo(block.key, block.parent, size_bytes)


def wanted(blocks: list[SealedBlock]) -> list[WantedBlock]:
    return [WantedBlock(block.key, block.parent, block.tokens) for block in blocks]


def with_bodies(blocks: list[SealedBlock]) -> list[tuple[SealedBlock, bytes]]:
    return [(block, body_of(block.key)) for block in blocks]
