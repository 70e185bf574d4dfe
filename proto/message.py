"""Pure: the base of every message and its one encoding, msgpack of {v, t, b}.

`v` is the wire version, `t` the message's class name, `b` its fields. Token ids travel as packed little-endian u32 and
block keys as one byte string, so that a 200,000-token prompt stays under the broker's payload bound.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import Annotated, Any, TypeVar

import msgpack
from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, ValidationError

from proto.errors import ErrorCode, WireError
from proto.ids import BLOCK_KEY_BYTES, BlockKey

WIRE_VERSION = 1
TOKEN_BYTES = 4
# A vocabulary never reaches this; a larger id is a damaged message.
TOKEN_ID_MAX = 0x7FFF_FFFF


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Token ids as little-endian u32, 4 bytes each."""
    packed = array("I", tokens)
    assert packed.itemsize == TOKEN_BYTES
    if sys.byteorder == "big":  # pragma: no cover - no such machine at hand
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes) -> tuple[int, ...]:
    """Inverse of `pack_tokens`. Raises ValueError on a length that is no multiple of four or an id out of range."""
    if len(data) % TOKEN_BYTES:
        raise ValueError(f"{len(data)} bytes are not a whole number of {TOKEN_BYTES}-byte token ids")
    packed = array("I")
    packed.frombytes(data)
    if sys.byteorder == "big":  # pragma: no cover
        packed.byteswap()
    if packed and max(packed) > TOKEN_ID_MAX:
        raise ValueError(f"token id {max(packed)} is above {TOKEN_ID_MAX}")
    return tuple(packed)


def pack_keys(keys: Iterable[BlockKey]) -> bytes:
    """Block keys joined, 16 bytes each."""
    return b"".join(keys)


def unpack_keys(data: bytes) -> tuple[BlockKey, ...]:
    """Inverse of `pack_keys`. Raises ValueError on a torn key."""
    if len(data) % BLOCK_KEY_BYTES:
        raise ValueError(f"{len(data)} bytes are not a whole number of {BLOCK_KEY_BYTES}-byte block keys")
    return tuple(BlockKey(data[i : i + BLOCK_KEY_BYTES]) for i in range(0, len(data), BLOCK_KEY_BYTES))


def _tokens_in(value: Any) -> Any:
    return unpack_tokens(value) if isinstance(value, bytes) else value


def _keys_in(value: Any) -> Any:
    return unpack_keys(value) if isinstance(value, bytes) else value


Tokens = Annotated[tuple[int, ...], BeforeValidator(_tokens_in), PlainSerializer(pack_tokens, return_type=bytes)]
Keys = Annotated[tuple[BlockKey, ...], BeforeValidator(_keys_in), PlainSerializer(pack_keys, return_type=bytes)]


class Message(BaseModel):
    """Base of everything said on the wire: frozen, no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")


M = TypeVar("M", bound=BaseModel)


def encode(message: BaseModel) -> bytes:
    """The message as msgpack bytes."""
    body = {"v": WIRE_VERSION, "t": type(message).__name__, "b": message.model_dump(mode="python")}
    packed: bytes = msgpack.packb(body, use_bin_type=True)
    return packed


def decode(data: bytes, expected: type[M]) -> M:
    """The one place where bytes become a message. Raises WireError naming the field that is wrong."""
    try:
        envelope = msgpack.unpackb(data, raw=False, strict_map_key=False)
    except (ValueError, msgpack.UnpackException, UnicodeDecodeError) as broken:
        raise WireError(ErrorCode.BAD_MESSAGE, f"not msgpack: {broken}", field="body") from broken
    if not isinstance(envelope, dict) or set(envelope) != {"v", "t", "b"}:
        raise WireError(ErrorCode.BAD_MESSAGE, "not an envelope of v, t and b", field="body")
    if envelope["v"] != WIRE_VERSION:
        raise WireError(
            ErrorCode.BAD_MESSAGE, f"wire version {envelope['v']}, this side speaks {WIRE_VERSION}", field="v"
        )
    if envelope["t"] != expected.__name__:
        raise WireError(ErrorCode.BAD_MESSAGE, f"got a {envelope['t']}, expected a {expected.__name__}", field="t")
    try:
        return expected.model_validate(envelope["b"])
    except ValidationError as invalid:
        first = invalid.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise WireError(ErrorCode.BAD_MESSAGE, first["msg"], field=field) from invalid
