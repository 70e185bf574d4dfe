"""Pure: one KV block as bytes, in LMDB and on the data port: a msgpack array of a header map and the raw body.

    0x92                                            array of two
    map                                             v, ns, key, parent, tokens, dtype, layout, shape, codec, sum, pad
    0xc6 length                                     bin 32
    body                                            begins at a multiple of 64 bytes from the frame's first byte

Any msgpack reader can read a frame; ours reads the header alone and gives the body as a view of the same memory.

A frame certifies itself. `key` is made of namespace, parent and tokens (shared/block_hash.py), which a reader that wants the
block knows by itself and compares; `sum` is xxh3_128 over namespace, key and body, so that a body under another block's
header is found as surely as a flipped bit. What fails any check is not served (failure catalogue: wrong KV is never an answer).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import msgpack
import xxhash

from proto.ids import BLOCK_KEY_BYTES, NAMESPACE_DIGEST_BYTES, BlockKey
from proto.message import TOKEN_BYTES, pack_tokens, unpack_tokens

FRAME_VERSION: Final = 1
CODEC_RAW: Final = "raw"
# Bodies begin here so that they can be viewed as numbers of any width without a copy.
BODY_ALIGNMENT: Final = 64
# A header holds some hundred bytes and the block's tokens; a longer one is damaged.
HEADER_BYTES_MAX: Final = 16 * 1024
BLOCK_TOKENS_MAX: Final = 1_024
# Large models have blocks of some MB; one block must fit one packet of the data port.
BODY_BYTES_MAX: Final = 63 * 1024 * 1024
FRAME_BYTES_MAX: Final = HEADER_BYTES_MAX + BODY_ALIGNMENT + BODY_BYTES_MAX
assert BLOCK_TOKENS_MAX * TOKEN_BYTES < HEADER_BYTES_MAX, "a block's tokens must fit the header"

_ARRAY_OF_TWO: Final = b"\x92"
_BIN32: Final = 0xC6
_BIN32_BYTES: Final = 5
_CHECKSUM_BYTES: Final = 16
_FIELDS: Final = frozenset({"v", "ns", "key", "parent", "tokens", "dtype", "layout", "shape", "codec", "sum", "pad"})

Buffer = bytes | bytearray | memoryview


class FrameFault(StrEnum):
    """Why a frame is not served; the label of roost_frames_rejected_total."""

    TRUNCATED = "truncated"
    NOT_A_FRAME = "not_a_frame"
    VERSION = "version"
    NAMESPACE = "namespace"
    KEY = "key"
    TOKENS = "tokens"
    FORMAT = "format"  # dtype, layout or shape
    CODEC = "codec"
    LENGTH = "length"
    CHECKSUM = "checksum"


class FrameError(Exception):
    """These bytes are not the frame that was asked for."""

    def __init__(self, fault: FrameFault, detail: str) -> None:
        super().__init__(f"{fault}: {detail}")
        self.fault, self.detail = fault, detail


@dataclass(frozen=True, slots=True)
class FrameFormat:
    """What every body of one worker looks like."""

    kv_dtype: str
    layout_version: int
    shape: tuple[int, ...]
    block_bytes: int
    block_tokens: int


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """Everything about a block but its bytes. `namespace` 32 bytes, `key` and `parent` 16."""

    namespace: bytes
    key: BlockKey
    parent: BlockKey
    tokens: tuple[int, ...]
    dtype: str
    layout_version: int
    shape: tuple[int, ...]
    codec: str = CODEC_RAW


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame whose form is right. `body` is a view of the memory it was read from. Its content is not checked yet."""

    header: FrameHeader
    body: memoryview
    checksum: bytes


def checksum_of(namespace: bytes, key: bytes, body: Buffer) -> bytes:
    """xxh3_128 over namespace, key and body; 16 bytes."""
    digest = xxhash.xxh3_128(namespace + key)
    digest.update(body)
    checksum: bytes = digest.digest()
    return checksum


def encode_frame(header: FrameHeader, body: Buffer) -> bytes:
    """The block as a frame. Raises FrameError(LENGTH) for a body that no packet could carry."""
    if len(body) > BODY_BYTES_MAX:
        raise FrameError(FrameFault.LENGTH, f"a body of {len(body)} bytes; a frame may have {BODY_BYTES_MAX}")
    assert len(header.namespace) == NAMESPACE_DIGEST_BYTES
    assert len(header.key) == len(header.parent) == BLOCK_KEY_BYTES
    fields: dict[str, Any] = {
        "v": FRAME_VERSION,
        "ns": header.namespace,
        "key": header.key,
        "parent": header.parent,
        "tokens": pack_tokens(header.tokens),
        "dtype": header.dtype,
        "layout": header.layout_version,
        "shape": header.shape,
        "codec": header.codec,
        "sum": checksum_of(header.namespace, header.key, body),
        "pad": b"",
    }
    unpadded = len(_ARRAY_OF_TWO) + len(msgpack.packb(fields)) + _BIN32_BYTES
    fields["pad"] = bytes(-unpadded % BODY_ALIGNMENT)
    head = _ARRAY_OF_TWO + msgpack.packb(fields) + bytes([_BIN32]) + len(body).to_bytes(4, "big")
    assert len(head) % BODY_ALIGNMENT == 0 and len(head) <= HEADER_BYTES_MAX
    return b"".join((head, body))


def decode_frame(data: Buffer) -> Frame:
    """Header and body of a frame, without copying the body. Raises FrameError; never reads beyond `data`."""
    view = memoryview(data)
    fields, start = _head(view)
    if len(view) < start + _BIN32_BYTES:
        raise FrameError(FrameFault.TRUNCATED, f"{len(view)} bytes end before the body")
    if view[start] != _BIN32:
        raise FrameError(FrameFault.NOT_A_FRAME, "no body follows the header")
    length = int.from_bytes(view[start + 1 : start + _BIN32_BYTES], "big")
    body = view[start + _BIN32_BYTES :]
    if len(body) != length:
        fault = FrameFault.TRUNCATED if len(body) < length else FrameFault.LENGTH
        raise FrameError(fault, f"{len(body)} bytes of body, {length} were said")
    return Frame(_header(fields), body, fields["sum"])


def decode_header(data: Buffer) -> FrameHeader:
    """The header alone; the body is not looked at. Raises FrameError."""
    fields, _ = _head(memoryview(data))
    return _header(fields)


def _head(view: memoryview) -> tuple[dict[str, Any], int]:
    """The header's map, checked for its fields and their types, and where it ends."""
    if bytes(view[:1]) != _ARRAY_OF_TWO:
        raise FrameError(FrameFault.NOT_A_FRAME, "does not begin as a frame does")
    unpacker = msgpack.Unpacker(raw=False, max_buffer_size=HEADER_BYTES_MAX)
    unpacker.feed(view[1 : 1 + HEADER_BYTES_MAX])
    try:
        fields = unpacker.unpack()
    except msgpack.OutOfData as ended:
        raise FrameError(FrameFault.TRUNCATED, "ends within the header") from ended
    except (ValueError, msgpack.UnpackException) as broken:
        raise FrameError(FrameFault.NOT_A_FRAME, f"the header is not msgpack: {broken}") from broken
    if not isinstance(fields, dict) or set(fields) != _FIELDS:
        raise FrameError(FrameFault.NOT_A_FRAME, "the header does not have the fields of a frame")
    if fields["v"] != FRAME_VERSION:
        raise FrameError(FrameFault.VERSION, f"version {fields['v']!r}, this side reads {FRAME_VERSION}")
    _check_types(fields)
    return fields, 1 + unpacker.tell()


def _check_types(fields: dict[str, Any]) -> None:
    for name, size in (
        ("ns", NAMESPACE_DIGEST_BYTES),
        ("key", BLOCK_KEY_BYTES),
        ("parent", BLOCK_KEY_BYTES),
        ("sum", _CHECKSUM_BYTES),
    ):
        if not isinstance(fields[name], bytes) or len(fields[name]) != size:
            raise FrameError(FrameFault.NOT_A_FRAME, f"{name} is not {size} bytes")
    if not isinstance(fields["tokens"], bytes) or len(fields["tokens"]) % TOKEN_BYTES:
        raise FrameError(FrameFault.TOKENS, "tokens are not whole token ids")
    if not isinstance(fields["dtype"], str) or not isinstance(fields["codec"], str):
        raise FrameError(FrameFault.NOT_A_FRAME, "dtype or codec is not text")
    shape = fields["shape"]
    if not isinstance(fields["layout"], int) or not isinstance(shape, list):
        raise FrameError(FrameFault.NOT_A_FRAME, "layout or shape has another type")
    if not all(isinstance(size, int) and size > 0 for size in shape):
        raise FrameError(FrameFault.NOT_A_FRAME, "shape is not a list of sizes")


def _header(fields: dict[str, Any]) -> FrameHeader:
    try:
        tokens = unpack_tokens(fields["tokens"])
    except ValueError as wrong:
        raise FrameError(FrameFault.TOKENS, str(wrong)) from wrong
    return FrameHeader(
        namespace=fields["ns"],
        key=BlockKey(fields["key"]),
        parent=BlockKey(fields["parent"]),
        tokens=tokens,
        dtype=fields["dtype"],
        layout_version=fields["layout"],
        shape=tuple(fields["shape"]),
        codec=fields["codec"],
    )


def check_body(frame: Frame) -> None:
    """Raises FrameError(CHECKSUM) if the body is not the one that was written under this header."""
    if checksum_of(frame.header.namespace, frame.header.key, frame.body) != frame.checksum:
        raise FrameError(FrameFault.CHECKSUM, "the body is not what was written")


def check_frame(
    frame: Frame, format: FrameFormat, *, namespace: bytes, key: BlockKey, parent: BlockKey, tokens: Sequence[int]
) -> None:
    """Raises FrameError unless this is exactly the block that is wanted, in the form that this engine takes."""
    header = frame.header
    if header.namespace != namespace:
        raise FrameError(FrameFault.NAMESPACE, "made by another model, dtype, layout or tenant")
    if header.key != key or header.parent != parent:
        raise FrameError(FrameFault.KEY, "another block lies under this key")
    if header.tokens != tuple(tokens):
        raise FrameError(FrameFault.TOKENS, "the tokens are not those of this block")
    made = (header.dtype, header.layout_version, header.shape)
    if made != (format.kv_dtype, format.layout_version, format.shape):
        raise FrameError(FrameFault.FORMAT, f"dtype, layout and shape are {made}")
    if header.codec != CODEC_RAW:
        raise FrameError(FrameFault.CODEC, f"codec {header.codec!r} is not known")
    if len(frame.body) != format.block_bytes:
        raise FrameError(FrameFault.LENGTH, f"{len(frame.body)} bytes, a block has {format.block_bytes}")
    check_body(frame)
