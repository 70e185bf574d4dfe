"""The engine without weights: the same rules as the real one, tokens that depend on history and bodies, priced steps."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from proto.chat import FinishReason, Grammar, Sampling
from proto.generate import WorkerPrice
from proto.ids import BlockKey
from shared.engine.batch import StepBudget
from shared.engine.protocol import BadGrammar, BadLoad, NeverFits, PoolFull
from shared.engine.sim_engine import SimEngine, SimOptions, sim_body
from tests.tiny_model import Seen, copy_blocks, finish, prompt_of, request_of, run

BLOCK = 16
EOS = 2


def engine_of(*, blocks: int = 64, answer_tokens: int = 0, step_tokens: int = 512, **changes: object) -> SimEngine:
    """A simulated engine with small numbers."""
    bite = min(16, step_tokens)
    budget = StepBudget(alone_tokens=step_tokens, shared_tokens=max(bite, step_tokens // 2), bite_tokens=bite)
    return SimEngine(
        SimOptions(blocks_total=blocks, answer_tokens=answer_tokens, budget=budget, **changes)  # type: ignore[arg-type]
    )


def test_no_torch_is_imported() -> None:
    """Hundreds of simulated workers on a laptop: none of them pays for torch."""
    code = "import sys, shared.engine.create, shared.engine.thread; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("step_tokens", [1, 7, 16, 512])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_stream_is_that_of_the_history(step_tokens: int, temperature: float) -> None:
    """Alone, in a batch, in chunks, cold, warm: the same tokens. Another history or seed: others."""

    def sampling(seed: int = 4) -> Sampling:
        return Sampling(max_tokens=20, temperature=temperature, seed=seed)

    prompts = {f"r{length}": prompt_of(length, salt=length) for length in (1, 16, 17, 50, 96)}
    alone = {
        name: run(engine_of(), request_of(name, prompt, sampling=sampling())).tokens[name]
        for name, prompt in prompts.items()
    }
    engine = engine_of(step_tokens=step_tokens)
    requests = [request_of(name, prompt, sampling=sampling()) for name, prompt in prompts.items()]
    assert run(engine, *requests).tokens == alone
    assert run(engine, *requests).tokens == alone, "warm"
    other = run(engine, request_of("o", prompts["r50"], sampling=sampling(5))).tokens["o"]
    assert (other == alone["r50"]) == (temperature == 0.0)
    assert len({tuple(tokens) for tokens in alone.values()}) == len(prompts)


@pytest.mark.parametrize("emitted", [1, 7, 16, 19])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_later_attempt_goes_on(emitted: int, temperature: float) -> None:
    """A worker dies after `emitted` tokens; the next one says the rest of the same stream, counted from the first."""
    prompt = prompt_of(30)
    sampling = Sampling(max_tokens=20, temperature=temperature, seed=9)
    whole = run(engine_of(), request_of("r", prompt, sampling=sampling)).tokens["r"]
    seen = run(engine_of(), request_of("r", (*prompt, *whole[:emitted]), emitted=emitted, sampling=sampling))
    assert (seen.first["r"], seen.tokens["r"]) == (emitted, whole[emitted:])


@pytest.mark.parametrize("damaged", [0, 2])
def test_wrong_bodies_give_wrong_tokens(damaged: int) -> None:
    """What exactness tests rely on: KV of another block under the right key shows in the answer, and goes on to others."""
    source, target = engine_of(), engine_of()
    prompt = prompt_of(4 * BLOCK + 3)
    expected = run(source, request_of("r", prompt)).tokens["r"]
    claim = target.claim(request_of("r", prompt))
    for index in range(damaged + 1):
        body = source.export(claim.keys[index])
        assert body == sim_body(claim.keys[index], size_bytes=source.info.block_bytes)
        target.load("r", index, body if index != damaged else bytes(len(body)))
    target.start("r")
    seen = Seen()
    finish(target, seen)
    assert seen.tokens["r"] != expected
    # The blocks that were computed from it are wrong too, there and wherever they go.
    assert target.export(claim.keys[3]) != source.export(claim.keys[3])
    assert run(target, request_of("again", prompt)).tokens["again"] == seen.tokens["r"]


def test_right_bodies_give_the_same_tokens() -> None:
    """Export, load into a fresh engine, go on: as if it had been computed there."""
    source, target = engine_of(), engine_of()
    prompt = prompt_of(4 * BLOCK)
    expected = run(source, request_of("r", prompt)).tokens["r"]
    assert copy_blocks(source, target, request_of("r", prompt)) == 3
    target.start("r")
    seen = Seen()
    finish(target, seen)
    assert seen.tokens["r"] == expected
    assert (seen.finished["r"].loaded_tokens, seen.finished["r"].computed_tokens) == (48, 16)
    assert target.export(bytes(16)) is None  # type: ignore[arg-type]


def test_a_step_takes_what_the_price_says() -> None:
    """The simulator's clock: prompt, decode and loads by the worker's calibrated price, and really waited for on request."""
    price = WorkerPrice(
        prefill_base_s=1.0,
        prefill_token_s=0.5,
        prefill_context_s=0.0,
        decode_base_s=10.0,
        decode_stream_s=2.0,
        load_base_s=100.0,
        load_byte_s=0.0,
    )
    slept: list[float] = []
    engine = SimEngine(SimOptions(answer_tokens=0, price=price), sleep=slept.append)
    for name in ("a", "b"):
        engine.claim(request_of(name, prompt_of(20), max_tokens=3))
    for name in ("a", "b"):
        engine.start(name)
    seen = Seen()
    finish(engine, seen)
    assert slept == pytest.approx([1.0 + 0.5 * 40, 10.0 + 2 * 2.0, 10.0 + 2 * 2.0])
    assert seen.finished["a"].decode_s == pytest.approx(28.0)
    *counts, seconds = engine.stats().recent_steps[0]
    assert counts == [40, 0, 40] and seconds == pytest.approx(21.0)
    engine.claim(request_of("c", prompt_of(40, salt=1), max_tokens=1))
    engine.load("c", 0, bytes(engine.info.block_bytes))
    engine.start("c")
    engine.step()
    assert engine.last_step_s == pytest.approx(100.0 + 1.0 + 0.5 * 24)


def test_answers_end_forced_tokens_are_said_and_limits_hold() -> None:
    """The small print is that of the protocol."""
    enders = frozenset({EOS})
    engine = engine_of(answer_tokens=4)
    ended = run(engine, request_of("r", prompt_of(20), max_tokens=400, eos_token_ids=enders))
    assert ended.finished["r"].reason is FinishReason.STOP and ended.tokens["r"][-1] == EOS
    long = Sampling(max_tokens=60, min_tokens=50)
    seen = run(engine, request_of("min", prompt_of(20), sampling=long, eos_token_ids=enders))
    assert len(seen.tokens["min"]) >= 50 and EOS not in seen.tokens["min"][:50]
    on = Sampling(max_tokens=60, ignore_eos=True)
    assert len(run(engine, request_of("on", prompt_of(20), sampling=on, eos_token_ids=enders)).tokens["on"]) == 60
    assert run(engine, request_of("f", prompt_of(20), forced=(1, 2, 3))).tokens["f"][:3] == [1, 2, 3]
    only = run(engine, request_of("p", prompt_of(33, salt=2), prefill_only=True))
    assert only.finished["p"].generated == 0 and "p" not in only.tokens
    with pytest.raises(NeverFits):
        engine.claim(request_of("n", prompt_of(100), max_tokens=8_192))


class EngineLife(RuleBasedStateMachine):
    """Claims, loads, starts, steps, cancels and exports in any order on a pool of ten blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = engine_of(blocks=10, step_tokens=24, answer_tokens=8)
        self.seen = Seen()
        self.live: dict[str, tuple[int, ...]] = {}
        self.claimed: dict[str, list[int]] = {}
        self.keys: dict[str, tuple[BlockKey, ...]] = {}
        self.count = 0

    @rule(
        shared=st.integers(0, 60),
        own=st.integers(1, 40),
        salt=st.integers(0, 2),
        max_tokens=st.integers(1, 40),
        prefill_only=st.booleans(),
    )
    def claim(self, shared: int, own: int, salt: int, max_tokens: int, prefill_only: bool) -> None:
        self.count += 1
        name = f"r{self.count}"
        tokens = (*prompt_of(shared), *prompt_of(own, salt=salt))
        before = self.engine.stats()
        request = request_of(
            name, tokens, max_tokens=max_tokens, prefill_only=prefill_only, eos_token_ids=frozenset({EOS})
        )
        try:
            claim = self.engine.claim(request)
        except (PoolFull, NeverFits):
            assert self.engine.stats() == before
        else:
            assert claim.resident_blocks <= claim.usable_blocks == (len(tokens) - 1) // BLOCK
            self.live[name] = tokens
            self.claimed[name] = [claim.resident_blocks, claim.usable_blocks]
            self.keys[name] = claim.keys

    @precondition(lambda self: self.claimed)
    @rule(data=st.data(), right=st.booleans())
    def load(self, data: st.DataObject, right: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.claimed)))
        index, usable = self.claimed[name]
        size_bytes = self.engine.info.block_bytes
        if index < usable and right:
            self.engine.load(name, index, sim_body(self.keys[name][index], size_bytes=size_bytes))
            self.claimed[name][0] += 1
        else:
            with pytest.raises(BadLoad):
                self.engine.load(name, index + (index < usable), bytes(size_bytes))

    @precondition(lambda self: self.claimed)
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.claimed)))
        del self.claimed[name]
        self.engine.start(name)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        del self.live[name]
        self.claimed.pop(name, None)
        self.engine.cancel(name)

    @rule()
    def step(self) -> None:
        self.seen.take(self.engine.step())
        assert not self.seen.failed
        for name in [name for name in self.live if name in self.seen.finished]:
            del self.live[name]

    @invariant()
    def nothing_is_lost(self) -> None:
        self.engine.check_integrity()
        stats = self.engine.stats()
        assert stats.blocks_free + stats.blocks_cached + stats.blocks_held == stats.blocks_total
        assert stats.requests_claimed + stats.requests_prefilling + stats.requests_decoding == len(self.live)
        assert bool(stats.blocks_held) == bool(self.live)

    def teardown(self) -> None:
        for name in list(self.claimed):
            self.engine.start(name)
        finish(self.engine, self.seen)
        assert self.engine.stats().blocks_held == 0
        for block in self.engine.resident():
            assert self.engine.export(block.key) == sim_body(block.key, size_bytes=self.engine.info.block_bytes)
        for name, tokens in self.live.items():
            said = self.seen.tokens.get(name)
            if said:
                alone = run(
                    engine_of(answer_tokens=8),
                    request_of("alone", tokens, max_tokens=len(said), eos_token_ids=frozenset({EOS})),
                )
                assert alone.tokens["alone"] == said


TestEngineLife = EngineLife.TestCase
TestEngineLife.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_a_grammar_without_a_compiler_is_refused() -> None:
    """An engine made without a tokenizer says so and holds nothing."""
    engine = engine_of()
    with pytest.raises(BadGrammar):
        engine.claim(request_of("r", prompt_of(5), grammar=Grammar(kind="json_object")))
    assert engine.stats().blocks_held == 0
