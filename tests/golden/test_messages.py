"""The bytes of every message are pinned: a wire change shows in review as a changed line of messages.txt.

`python -m tests.golden.test_messages` writes the file anew; do so together with WIRE_VERSION where old readers break.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from proto.message import decode, encode
from proto.subjects import SUBJECTS
from tests.golden.samples import SAMPLES

GOLDEN = Path(__file__).with_name("messages.txt")


def stored() -> dict[str, bytes]:
    lines = (line.split() for line in GOLDEN.read_text().splitlines() if line)
    return {name: bytes.fromhex(data) for name, data in lines}


@pytest.mark.parametrize("name", SAMPLES)
def test_bytes_are_as_they_were(name: str) -> None:
    golden = stored()[name]
    assert encode(SAMPLES[name]) == golden
    assert decode(golden, type(SAMPLES[name])) == SAMPLES[name]


def test_every_subject_has_a_sample() -> None:
    sampled = {type(sample) for sample in SAMPLES.values()}
    said = {kind for subject in SUBJECTS for kind in (subject.message, subject.reply) if kind is not None}
    assert said <= sampled, {kind.__name__ for kind in said - sampled}
    assert set(stored()) == set(SAMPLES)


if __name__ == "__main__":
    GOLDEN.write_text("".join(f"{name} {encode(sample).hex()}\n" for name, sample in SAMPLES.items()))
