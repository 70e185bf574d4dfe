"""Frames and packets: what passes, and that nothing that was touched does."""

from __future__ import annotations

import random

import msgpack
import pytest

from proto import data_port
from proto.frame import (
    BODY_ALIGNMENT,
    BODY_BYTES_MAX,
    FrameError,
    FrameFault,
    FrameHeader,
    check_body,
    check_frame,
    decode_frame,
    decode_header,
    encode_frame,
)
from proto.ids import BlockKey
from proto.residency import Tier
from shared.rendezvous import pick
from tests.unit.kvstore.frames import BODY_BYTES, FORMAT, NAMESPACE, body_of, chain, frame_of

FIRST, SECOND = chain(2)


def fault_of(data: bytes, block: object = FIRST) -> FrameFault | None:
    """Why a reader that wants `block` does not take these bytes; None if it does."""
    try:
        check_frame(
            decode_frame(data), FORMAT, namespace=NAMESPACE,
            key=block.key, parent=block.parent, tokens=block.tokens,  # type: ignore[attr-defined]
        )  # fmt: skip
    except FrameError as error:
        return error.fault
    return None


def test_a_frame_is_what_was_written_and_its_body_is_not_copied() -> None:
    data = bytearray(frame_of(FIRST))
    frame = decode_frame(data)
    assert frame.header == FrameHeader(NAMESPACE, FIRST.key, FIRST.parent, FIRST.tokens, "float32", 1, FORMAT.shape)
    assert bytes(frame.body) == body_of(FIRST.key) and fault_of(bytes(data)) is None
    assert (len(data) - len(frame.body)) % BODY_ALIGNMENT == 0
    data[-1] ^= 1
    assert frame.body[-1] != body_of(FIRST.key)[-1], "a view of the same memory"


def test_any_msgpack_reader_can_read_a_frame() -> None:
    header, body = msgpack.unpackb(frame_of(FIRST))
    assert header["key"] == FIRST.key and body == body_of(FIRST.key)


def test_the_header_alone_needs_no_body() -> None:
    data = frame_of(FIRST)
    assert decode_header(data[: len(data) - BODY_BYTES]).key == FIRST.key


def test_every_single_flipped_bit_is_found() -> None:
    """Of the header every bit, of the body a sample. The padding is the only place where nothing depends on a bit."""
    data = frame_of(FIRST)
    padding = data.index(b"\xa3pad") + 4
    body = len(data) - BODY_BYTES
    places = [*range(body * 8), *random.Random(1).sample(range(body * 8, len(data) * 8), 256)]
    for place in places:
        byte, bit = divmod(place, 8)
        if padding <= byte < body - 5:
            continue
        broken = bytearray(data)
        broken[byte] ^= 1 << bit
        assert fault_of(bytes(broken)) is not None, (byte, bit)


def test_every_truncation_is_found_and_nothing_raises_another_error() -> None:
    data = frame_of(FIRST)
    for length in range(len(data)):
        assert fault_of(data[:length]) is not None
    assert fault_of(data + b"\x00") is FrameFault.LENGTH


@pytest.mark.parametrize("seed", range(10))
def test_noise_is_refused_by_name(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(300):
        assert fault_of(b"\x92" + draw.randbytes(draw.randrange(200))) is not None


def test_a_body_under_another_blocks_header_is_found() -> None:
    assert fault_of(frame_of(SECOND), FIRST) is FrameFault.KEY
    swapped = frame_of(FIRST)[:-BODY_BYTES] + body_of(SECOND.key)
    assert fault_of(swapped) is FrameFault.CHECKSUM


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"namespace": b"x" * 32}, FrameFault.NAMESPACE),
        ({"key": SECOND.key}, FrameFault.KEY),
        ({"parent": SECOND.key}, FrameFault.KEY),
        ({"tokens": (9, 9, 9, 9)}, FrameFault.TOKENS),
        ({"dtype": "float16"}, FrameFault.FORMAT),
        ({"layout_version": 2}, FrameFault.FORMAT),
        ({"shape": (1,)}, FrameFault.FORMAT),
        ({"codec": "zstd"}, FrameFault.CODEC),
    ],
)
def test_each_field_is_compared(change: dict[str, object], fault: FrameFault) -> None:
    fields: dict[str, object] = {
        "namespace": NAMESPACE, "key": FIRST.key, "parent": FIRST.parent, "tokens": FIRST.tokens, "dtype": "float32",
        "layout_version": 1, "shape": FORMAT.shape,
    }  # fmt: skip
    data = encode_frame(FrameHeader(**{**fields, **change}), body_of(FIRST.key))  # type: ignore[arg-type]
    assert fault_of(data) is fault


def test_a_short_body_with_a_right_checksum_is_not_a_block() -> None:
    data = frame_of(FIRST, body_of(FIRST.key)[:-4])
    check_body(decode_frame(data))
    assert fault_of(data) is FrameFault.LENGTH


def test_a_body_that_no_packet_carries_is_refused() -> None:
    class Huge(bytes):
        def __len__(self) -> int:
            return BODY_BYTES_MAX + 1

    with pytest.raises(FrameError, match="a frame may have"):
        frame_of(FIRST, Huge())


# -- packets


def parsed(pieces: list[bytes]) -> data_port.Packet:
    data = b"".join(pieces)
    assert data_port.read_length(data[:4]) == len(data) - 4
    return data_port.read_packet(data[4:])


def test_packets_say_what_they_were_made_of() -> None:
    keys = (FIRST.key, SECOND.key)
    assert data_port.get_of(parsed(data_port.get(7, keys))) == (7, keys)
    assert data_port.number_of(parsed(data_port.flush(9))) == 9
    number, tier, data = data_port.frame_of(parsed(data_port.frame(3, Tier.NVME, b"abc")))
    assert (number, tier, bytes(data)) == (3, Tier.NVME, b"abc")


def test_wrong_packets_are_refused() -> None:
    for length in (0, data_port.PACKET_BYTES_MAX + 1):
        with pytest.raises(data_port.PacketError, match="bytes"):
            data_port.read_length(data_port.LENGTH.pack(length))
    with pytest.raises(data_port.PacketError, match="unknown kind"):
        data_port.read_packet(b"\x63")
    for pieces, read in [
        (data_port.packet(data_port.Kind.GET, b"short"), data_port.get_of),
        (data_port.packet(data_port.Kind.GET, bytes(8) + b"torn"), data_port.get_of),
        (data_port.packet(data_port.Kind.GET, bytes(8 + 16 * (data_port.GET_KEYS_MAX + 1))), data_port.get_of),
        (data_port.packet(data_port.Kind.FRAME, bytes(8)), data_port.frame_of),
        (data_port.packet(data_port.Kind.FRAME, bytes(8) + b"\x09"), data_port.frame_of),
        (data_port.packet(data_port.Kind.FLUSH, b"1"), data_port.number_of),
    ]:
        with pytest.raises(data_port.PacketError):
            read(parsed(pieces))


# -- shards


def test_a_shard_that_goes_moves_only_its_own_chains() -> None:
    keys = [BlockKey(random.Random(number).randbytes(16)) for number in range(600)]
    before = {key: pick(key, ["a", "b", "c"]) for key in keys}
    after = {key: pick(key, ["c", "a"]) for key in keys}
    assert all(after[key] == shard for key, shard in before.items() if shard != "b")
    share = [sum(shard == name for shard in before.values()) / len(keys) for name in "abc"]
    assert all(0.25 < part < 0.42 for part in share), share
    assert pick(keys[0], []) is None
