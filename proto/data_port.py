"""Pure: the kvstore's TCP data port: packets of a length, a kind and a payload. KV bytes never go through the broker.

    u32 little-endian length of what follows | u8 kind | payload

    worker -> kvstore   PUT      a frame
                        FLUSH    u64 number             answered by FLUSHED when all puts before it are readable, or dropped
                        GET      u64 number, 16-byte keys of a chain, in order
    kvstore -> worker   FRAME    u64 number, u8 tier, a frame         one for each key, up to the first that is not here
                        END      u64 number                           the get is over
                        FLUSHED  u64 number
                        FAULT    text                                 the connection is closed after it

Each side stops reading when it has enough in hand, so that TCP holds the other one back.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from proto.frame import FRAME_BYTES_MAX
from proto.ids import BLOCK_KEY_BYTES, BlockKey
from proto.message import pack_keys, unpack_keys
from proto.residency import Tier

LENGTH: Final = struct.Struct("<I")
_NUMBER: Final = struct.Struct("<Q")
_FRAME_HEAD: Final = struct.Struct("<QB")
# Keys of one get; a longer chain is asked for in parts.
GET_KEYS_MAX: Final = 1_024
PACKET_BYTES_MAX: Final = 1 + _FRAME_HEAD.size + FRAME_BYTES_MAX
assert 1 + _NUMBER.size + GET_KEYS_MAX * BLOCK_KEY_BYTES <= PACKET_BYTES_MAX

_TIER_NUMBERS: Final = {Tier.RAM: 1, Tier.NVME: 2}
_TIERS: Final = {number: tier for tier, number in _TIER_NUMBERS.items()}


class Kind(IntEnum):
    """What a packet is."""

    PUT = 1
    FLUSH = 2
    GET = 3
    FRAME = 4
    END = 5
    FLUSHED = 6
    FAULT = 7


class PacketError(Exception):
    """The other side does not speak this protocol, or its bytes are damaged; the connection cannot go on."""


@dataclass(frozen=True, slots=True)
class Packet:
    """One packet as it came."""

    kind: Kind
    payload: memoryview


def packet(kind: Kind, *parts: bytes) -> list[bytes]:
    """Pieces to write, in order; frames are not copied into one."""
    length = 1 + sum(map(len, parts))
    assert length <= PACKET_BYTES_MAX
    return [LENGTH.pack(length) + bytes([kind]), *parts]


def read_length(data: bytes) -> int:
    """Bytes that follow. Raises PacketError on a length that nobody sends."""
    (length,) = LENGTH.unpack(data)
    if not 1 <= length <= PACKET_BYTES_MAX:
        raise PacketError(f"a packet of {length} bytes; there are 1 to {PACKET_BYTES_MAX}")
    return int(length)


def read_packet(data: bytes) -> Packet:
    """What follows a length. Raises PacketError on an unknown kind."""
    try:
        return Packet(Kind(data[0]), memoryview(data)[1:])
    except ValueError as unknown:
        raise PacketError(f"unknown kind of packet {data[0]}") from unknown


def put(frame: bytes) -> list[bytes]:
    """Keep this block."""
    return packet(Kind.PUT, frame)


def flush(number: int) -> list[bytes]:
    """Say when everything put before is readable."""
    return packet(Kind.FLUSH, _NUMBER.pack(number))


def flushed(number: int) -> list[bytes]:
    """Answer to a flush."""
    return packet(Kind.FLUSHED, _NUMBER.pack(number))


def get(number: int, keys: tuple[BlockKey, ...]) -> list[bytes]:
    """Send these blocks."""
    assert len(keys) <= GET_KEYS_MAX
    return packet(Kind.GET, _NUMBER.pack(number), pack_keys(keys))


def frame(number: int, tier: Tier, data: bytes) -> list[bytes]:
    """One block of a get."""
    return packet(Kind.FRAME, _FRAME_HEAD.pack(number, _TIER_NUMBERS[tier]), data)


def end(number: int) -> list[bytes]:
    """A get is over."""
    return packet(Kind.END, _NUMBER.pack(number))


def fault(text: str) -> list[bytes]:
    """Why the connection is closed."""
    return packet(Kind.FAULT, text.encode()[:512])


def number_of(received: Packet) -> int:
    """The number of a FLUSH, FLUSHED or END. Raises PacketError."""
    if len(received.payload) != _NUMBER.size:
        raise PacketError(f"{received.kind.name} has {len(received.payload)} bytes")
    (number,) = _NUMBER.unpack(received.payload)
    return int(number)


def get_of(received: Packet) -> tuple[int, tuple[BlockKey, ...]]:
    """Number and keys of a GET. Raises PacketError."""
    if len(received.payload) < _NUMBER.size:
        raise PacketError("GET has no number")
    (number,) = _NUMBER.unpack_from(received.payload)
    try:
        keys = unpack_keys(bytes(received.payload[_NUMBER.size :]))
    except ValueError as torn:
        raise PacketError(f"GET: {torn}") from torn
    if len(keys) > GET_KEYS_MAX:
        raise PacketError(f"GET asks for {len(keys)} blocks; {GET_KEYS_MAX} at most")
    return int(number), keys


def frame_of(received: Packet) -> tuple[int, Tier, memoryview]:
    """Number, tier and bytes of a FRAME. Raises PacketError."""
    if len(received.payload) < _FRAME_HEAD.size:
        raise PacketError("FRAME has no head")
    number, tier_number = _FRAME_HEAD.unpack_from(received.payload)
    if tier_number not in _TIERS:
        raise PacketError(f"FRAME of an unknown tier {tier_number}")
    return int(number), _TIERS[tier_number], received.payload[_FRAME_HEAD.size :]
