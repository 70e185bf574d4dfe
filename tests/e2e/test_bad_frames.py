"""Whatever happens to the bytes in LMDB: the same answer, recomputed, and counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgpack

from proto.frame import decode_frame, encode_frame
from tests.e2e.client import Session
from tests.e2e.frames import BLOCK_TOKENS, Tier
from tests.e2e.system import System
from tests.e2e.test_first_turn import STORY, token_log, transformers_greedy, wait_stored


def flipped(frame: bytes, _: bytes) -> bytes:
    return frame[:-1_000] + bytes([frame[-1_000] ^ 0x10]) + frame[-999:]


def of_another_model(frame: bytes, _: bytes) -> bytes:
    """A frame that is right in itself, under the same key, for another namespace."""
    mine = decode_frame(frame)
    return encode_frame(replace(mine.header, namespace=bytes(32)), bytes(mine.body))


DAMAGE: dict[str, Callable[[bytes, bytes], bytes | None]] = {
    "corrupted": flipped,
    "truncated": lambda frame, _: frame[: len(frame) // 3],
    "deleted": lambda frame, _: None,
    "swapped with another block": lambda _, other: other,
    "of another model": of_another_model,
    "another block's body": lambda frame, other: frame[: -len(_body(frame))] + _body(other),
}


def _body(frame: bytes) -> bytes:
    return bytes(msgpack.unpackb(frame)[1])


async def test_damaged_frames_cost_a_recompute_and_nothing_else(system: System, models: Path) -> None:
    """One session a kind of damage, its fifth block damaged in both tiers while the worker is away."""
    sessions = {kind: Session(system.url, system=f"{number}. {STORY}") for number, kind in enumerate(DAMAGE)}
    for session in sessions.values():
        session.turn("Which one is yellow?", max_tokens=8)
    wait_stored(system)
    system["decode-0"].kill()
    tiers = [Tier(system.home / "kv" / "kvstore-0" / "nvme"), Tier(system.ram_path / "kvstore-0")]
    for kind, session in sessions.items():
        tokens, _ = await token_log(system, session.session_id)
        for tier in tiers:
            keys = tier.chain(tokens)
            assert len(keys) > 8, (kind, tier, len(keys))
            frames = tier.frames()
            tier.write({keys[5]: DAMAGE[kind](frames[keys[5]], frames[keys[2]])})
    system["decode-0"].start()
    system.wait_ready()
    for kind, session in sessions.items():
        answer = session.turn("And which one is red?", max_tokens=8)
        step = answer.done["receipt"]["steps"][0]
        loaded = answer.sources.get("ram", 0) + answer.sources.get("nvme", 0)
        assert loaded + answer.sources.get("resident", 0) == 5 * BLOCK_TOKENS, (kind, answer.sources)
        assert answer.sources["computed"] > BLOCK_TOKENS
        assert (step["frames_rejected"] > 0) is (kind != "deleted"), (kind, step)
        tokens, answers = await token_log(system, session.session_id)
        prompt = tokens[: len(tokens) - len(answers[-1])]
        assert answers[-1] == transformers_greedy(models, prompt, len(answers[-1])), kind
    assert system["decode-0"].metric("roost_frames_rejected_total") >= len(DAMAGE) - 1
