"""A long prompt is computed by a prefill worker, handed over through the kvstore, and said by a decode worker."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from tests.e2e.client import Answer, Session
from tests.e2e.system import System
from tests.e2e.test_first_turn import token_log, transformers_greedy


def long_text(seed: int) -> str:
    """About 1,500 tokens that no other test has."""
    return " ".join(
        f"Box {seed + number} holds {number * 7 % 23} red and {number * 5 % 19} blue marbles." for number in range(90)
    )


async def check_tokens(system: System, models: Path, session: Session) -> None:
    tokens, answers = await token_log(system, session.session_id)
    prompt = tokens[: len(tokens) - len(answers[-1])]
    assert len(prompt) > 1_100
    assert answers[-1] == transformers_greedy(models, prompt, len(answers[-1]))


async def test_a_long_prompt_is_handed_over(system: System, models: Path) -> None:
    session = Session(system.url)
    answer = session.turn(long_text(1_000) + " How many boxes are there?", max_tokens=8)
    step = answer.done["receipt"]["steps"][0]
    assert step["prefill_worker_id"] == "prefill-0" and step["worker_id"] == "decode-0"
    assert answer.sources["ram"] > 1_000, answer.sources
    assert answer.sources["computed"] <= 32, answer.sources
    await check_tokens(system, models, session)


async def test_kill_prefill_while_it_computes(system: System, models: Path) -> None:
    """Its stage is left out, or done again: the same tokens."""
    session = Session(system.url)
    got: list[Answer] = []
    asking = threading.Thread(
        target=lambda: got.append(session.turn(long_text(5_000) + " Which box is last?", max_tokens=8))
    )
    asking.start()
    deadline = time.monotonic() + 20
    while system["prefill-0"].metric("roost_worker_streams") < 1:
        assert time.monotonic() < deadline, "the prompt never came to the prefill worker"
        time.sleep(0.05)
    system["prefill-0"].kill()
    system["prefill-0"].start()
    asking.join(timeout=100)
    assert got and got[0].done["finish_reason"] in ("stop", "length")
    await check_tokens(system, models, session)
    system.wait_ready()
