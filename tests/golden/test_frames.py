"""The bytes of a frame and of each packet of the data port are pinned, like those of messages.

`python -m tests.golden.test_frames` writes frames.txt anew; do so together with FRAME_VERSION where old readers break.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from proto import data_port
from proto.frame import FrameHeader, decode_frame, encode_frame
from proto.ids import BlockKey
from proto.residency import Tier

GOLDEN = Path(__file__).with_name("frames.txt")

HEADER = FrameHeader(
    namespace=bytes(range(32)), key=BlockKey(bytes(range(100, 116))), parent=BlockKey(bytes(16)), tokens=(1, 2, 65_536),
    dtype="float32", layout_version=1, shape=(1, 2, 1, 3, 2),
)  # fmt: skip
BODY = bytes(range(48))

SAMPLES = {
    "frame": encode_frame(HEADER, BODY),
    "put": b"".join(data_port.put(b"frame")),
    "flush": b"".join(data_port.flush(7)),
    "flushed": b"".join(data_port.flushed(7)),
    "get": b"".join(data_port.get(8, (HEADER.key, HEADER.parent))),
    "block": b"".join(data_port.frame(8, Tier.NVME, b"frame")),
    "end": b"".join(data_port.end(8)),
    "fault": b"".join(data_port.fault("no")),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_bytes_are_as_they_were(name: str) -> None:
    stored = dict(line.split() for line in GOLDEN.read_text().splitlines())
    assert SAMPLES[name].hex() == stored[name]


def test_a_stored_frame_is_read() -> None:
    """A tier on disk outlives the process that wrote it."""
    stored = dict(line.split() for line in GOLDEN.read_text().splitlines())
    frame = decode_frame(bytes.fromhex(stored["frame"]))
    assert frame.header == HEADER and bytes(frame.body) == BODY


if __name__ == "__main__":
    GOLDEN.write_text("".join(f"{name} {data.hex()}\n" for name, data in SAMPLES.items()))
