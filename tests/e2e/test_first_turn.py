"""What a user sees on the first day: an answer, its cache told, restarts and kills that cost nothing."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from proto.sessions import Record, SessionOpened, StepGenerated, ToolsAnswered, TurnClosed, TurnOpened
from proto.subjects import SESSION_LOG
from shared.bus import Bus
from shared.settings import DEFAULT_MODEL, RoostSettings
from tests.e2e.client import Once, Session
from tests.e2e.system import System

BLOCK_TOKENS = 16
# Long enough for several full blocks.
STORY = "Here is a list of fruits: " + ", ".join(["apple", "banana", "cherry", "orange", "grape", "melon"] * 12) + "."


async def token_log(system: System, session_id: str) -> tuple[list[int], list[list[int]]]:
    """All tokens of a session in order, and those of each answer, straight from its log."""
    bus = await Bus.connect(RoostSettings(nats_url=system.nats.url), "test")
    try:
        entries = await bus.read_log(SESSION_LOG, Record, session_id=session_id)
    finally:
        await bus.close()
    tokens: list[int] = []
    answers: list[list[int]] = []
    for entry in entries:
        body = entry.record.body
        if isinstance(body, TurnClosed) and body.final is not None:
            body = body.final
        if isinstance(body, SessionOpened | TurnOpened | ToolsAnswered):
            tokens += [token for span in body.spans for token in span.tokens]
        elif isinstance(body, StepGenerated):
            answers.append(list(body.tokens))
            tokens += body.tokens
    return tokens, answers


def transformers_greedy(models: Path, prompt: list[int], count: int) -> list[int]:
    """What plain transformers says."""
    model = AutoModelForCausalLM.from_pretrained(models / DEFAULT_MODEL, dtype=torch.float32)
    with torch.no_grad():
        whole = model.generate(
            torch.tensor([prompt]), max_new_tokens=count, do_sample=False, num_beams=1, repetition_penalty=1.0,
            pad_token_id=0,
        )  # fmt: skip
    return [int(token) for token in whole[0][len(prompt) :]]


def full_blocks(tokens: int) -> int:
    """Tokens in full blocks."""
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS


def wait_until(is_so: Callable[[], bool], what: str, within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def wait_stored(system: System) -> None:
    """Until the kvstore has on disk what the workers have sealed so far: no put is under way any more."""
    seen = -1.0
    stable_since = time.monotonic()
    while time.monotonic() - stable_since < 1.0:
        blocks = system["kvstore-0"].metric("roost_kvstore_blocks", tier="nvme")
        if blocks != seen:
            seen, stable_since = blocks, time.monotonic()
        time.sleep(0.1)


def test_the_capital_of_france(system: System) -> None:
    """The newcomer's first question, streamed."""
    answer = Session(system.url).turn("What is the capital of France?")
    assert "Paris" in answer.text
    assert sum(1 for _, kind, _ in answer.events if kind == "text") > 1, "not streamed"
    assert answer.done["finish_reason"] == "stop"


def test_turn_two_reports_every_full_block_as_cached(system: System) -> None:
    """Prompt and answer of turn 1 are all there in turn 2, up to the block that is not full."""
    session = Session(system.url, system="Be brief.")
    first = session.turn(STORY + " Which one is yellow?")
    second = session.turn("And which one is red?")
    usage = first.done["usage"]
    # The last token of an answer was never fed to the model, so its KV is not there.
    known = usage["prompt_tokens"] + usage["completion_tokens"] - 1
    assert second.cached_tokens >= full_blocks(known) > 0
    assert sum(second.sources.values()) == second.done["usage"]["prompt_tokens"]


async def test_decode_restart_loads_the_prefix_from_a_tier(system: System, models: Path) -> None:
    """A new life of the worker has an empty pool: RAM or LMDB serve the prefix, and the tokens are the same."""
    session = Session(system.url)
    first = session.turn(STORY + " Say something about apples.")
    wait_stored(system)
    system.restart("decode-0", how="kill")
    second = session.turn("Say something about bananas.")
    usage = first.done["usage"]
    loaded = second.sources.get("ram", 0) + second.sources.get("nvme", 0)
    assert loaded >= full_blocks(usage["prompt_tokens"] + usage["completion_tokens"] - 1)
    tokens, answers = await token_log(system, session.session_id)
    prompt = tokens[: len(tokens) - len(answers[-1])]
    assert answers[-1] == transformers_greedy(models, prompt, len(answers[-1]))
    assert second.token_ids == answers[-1][: len(second.token_ids)]


def test_everything_restarts_and_the_session_is_still_there(system: System) -> None:
    """Power cut: RAM tier gone, all processes and NATS start anew; LMDB on disk alone serves the prefix."""
    session = Session(system.url)
    first = session.turn(STORY + " Count the cherries.")
    wait_stored(system)
    for process in system.processes.values():
        process.kill()
    system.nats.kill()
    shutil.rmtree(system.ram_path)
    system.nats.start()
    for process in system.processes.values():
        process.start()
    system.wait_ready()
    second = session.turn("Count the melons.")
    usage = first.done["usage"]
    assert second.sources.get("nvme", 0) >= full_blocks(usage["prompt_tokens"] + usage["completion_tokens"] - 1)
    assert [turn["status"] for turn in session.describe()["turns"]] == ["done", "done"]


@pytest.mark.parametrize("name", ["decode", "loop", "router", "kvstore", "prefill", "tools", "retrieval"])
def test_kill_the_only_replica_in_the_middle_of_a_stream(system: System, name: str) -> None:
    """kill -9, back after a second: the stream goes on, every token once, the text of the unfaulted run."""
    question, options = STORY + " Tell me a story about them.", {"max_tokens": 48}
    unfaulted = Session(system.url).turn(question, **options)

    def kill_and_start() -> None:
        system[f"{name}-0"].kill()
        time.sleep(1.0)
        system[f"{name}-0"].start()

    kill = Once(5, kill_and_start)
    faulted = Session(system.url).turn(question, on_event=kill, **options)
    kill.join()
    assert faulted.text == unfaulted.text and faulted.token_ids == unfaulted.token_ids
    assert faulted.done["finish_reason"] == unfaulted.done["finish_reason"]
    system.wait_ready()
