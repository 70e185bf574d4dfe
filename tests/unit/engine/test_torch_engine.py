"""The torch engine against plain transformers, on tiny random models: the same tokens whatever the path of the KV."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from proto.chat import FinishReason, Sampling
from shared.engine.protocol import BadLoad, NeverFits, PoolFull, PrefillProgress
from shared.engine.torch_engine import TorchEngine
from shared.model_dir import ModelDirectory
from tests import tiny_model
from tests.tiny_model import EOS, Seen, copy_blocks, finish, greedy_by_transformers, options, prompt_of, request_of, run

BLOCK = 16


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 3])
def test_greedy_equals_transformers_cold_and_warm(engine: TorchEngine, tiny: ModelDirectory, length: int) -> None:
    """F-TIE-04, F-TIE-07: prompts of 1, kB-1, kB, kB+1 tokens, then the very same prompt again with everything cached."""
    prompt = prompt_of(length)
    expected = greedy_by_transformers(tiny, prompt, 12)
    for attempt in ("cold", "warm"):
        seen = run(engine, request_of(attempt, prompt))
        assert seen.tokens[attempt] == expected
        done = seen.finished[attempt]
        assert (done.reason, done.generated) == (FinishReason.LENGTH, 12)
        assert done.resident_tokens + done.loaded_tokens + done.computed_tokens == length
        assert done.resident_tokens == (0 if attempt == "cold" else (length - 1) // BLOCK * BLOCK)
    assert engine.stats().blocks_held == 0


@pytest.mark.parametrize("hit", [0, 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 4 * BLOCK + 3])
def test_any_hit_length_gives_the_same_tokens(engine: TorchEngine, tiny: ModelDirectory, hit: int) -> None:
    """The prompt shares `hit` tokens with an earlier one and then goes its own way."""
    prompt = prompt_of(4 * BLOCK + 3)
    other = prompt[:hit] + tuple((token + 1) % 256 for token in prompt[hit:])
    run(engine, request_of("earlier", other))
    seen = run(engine, request_of("now", prompt))
    assert seen.tokens["now"] == greedy_by_transformers(tiny, prompt, 12)
    assert seen.finished["now"].resident_tokens == min(hit, len(prompt) - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("step_tokens", [1, 7, 16, 40, 512])
def test_chunks_and_batches_change_nothing(tiny: ModelDirectory, step_tokens: int) -> None:
    """Several prompts of different length prefill in chunks beside running streams."""
    engine = TorchEngine(tiny, options(step_tokens=step_tokens))
    prompts = {f"r{length}": prompt_of(length, salt=length) for length in (1, 17, 50, 90)}
    seen = run(engine, *(request_of(name, prompt) for name, prompt in prompts.items()))
    for name, prompt in prompts.items():
        assert seen.tokens[name] == greedy_by_transformers(tiny, prompt, 12)


def test_running_streams_get_a_token_in_every_step(tiny: ModelDirectory) -> None:
    """F-RES-03: a long prompt arrives while two streams run; each step still gives each stream its token."""
    engine = TorchEngine(tiny, options(step_tokens=32))
    for name in ("a", "b"):
        engine.claim(request_of(name, prompt_of(5), max_tokens=40))
        engine.start(name)
    seen = Seen()
    seen.take(engine.step())
    engine.claim(request_of("long", prompt_of(200, salt=1)))
    engine.start("long")
    while "long" not in seen.tokens:
        before = {name: len(seen.tokens[name]) for name in ("a", "b")}
        events = engine.step()
        seen.take(events)
        assert {name: len(seen.tokens[name]) for name in ("a", "b")} == {name: n + 1 for name, n in before.items()}
        progress = [event for event in events if isinstance(event, PrefillProgress)]
        assert len(progress) == 1 and progress[0].total == 200
    finish(engine, seen)


def test_diverging_continuations_of_a_torn_block(engine: TorchEngine, tiny: ModelDirectory) -> None:
    """F-HSH-03: two prompts share kB+3 tokens and diverge inside the block; in one batch each equals its own run."""
    prefix = prompt_of(2 * BLOCK + 3)
    prompts = {"left": (*prefix, 7, 8), "right": (*prefix, 9), "same": prefix, "again": prefix}
    seen = run(engine, *(request_of(name, prompt, max_tokens=20) for name, prompt in prompts.items()))
    for name, prompt in prompts.items():
        assert seen.tokens[name] == greedy_by_transformers(tiny, prompt, 20)


def test_blocks_travel_between_engines(tiny: ModelDirectory) -> None:
    """F-TIE-08: a chain of 150 blocks goes from one worker's pool into another's; the answer is that of a cold run."""
    source, target = (TorchEngine(tiny, options(blocks=400, block_tokens=2)) for _ in range(2))
    prompt = prompt_of(301)
    expected = run(source, request_of("first", prompt)).tokens["first"]
    assert copy_blocks(source, target, request_of("second", prompt)) == 150
    target.start("second")
    seen = Seen()
    finish(target, seen)
    assert seen.tokens["second"] == expected == greedy_by_transformers(tiny, prompt, 12)
    done = seen.finished["second"]
    assert (done.resident_tokens, done.loaded_tokens, done.computed_tokens) == (0, 300, 1)
    key = target.resident()[40].key
    assert target.export(key) == source.export(key)


def test_prefill_here_decode_there(tiny: ModelDirectory) -> None:
    """Two stages: the prefill worker says no token, the decode worker loads its blocks and goes on."""
    prefill, decode = TorchEngine(tiny, options()), TorchEngine(tiny, options())
    prompt = prompt_of(3 * BLOCK + 5)
    only = run(prefill, request_of("p", prompt, prefill_only=True))
    assert only.tokens == {} and only.finished["p"].generated == 0
    assert len(prefill.resident()) == 3
    assert copy_blocks(prefill, decode, request_of("d", prompt)) == 3
    decode.start("d")
    seen = Seen()
    finish(decode, seen)
    assert seen.tokens["d"] == greedy_by_transformers(tiny, prompt, 12)


def test_loads_are_checked(engine: TorchEngine) -> None:
    """A worker loads out of order, too much, or a torn body: refused, and nothing of it is used."""
    prompt = prompt_of(2 * BLOCK)
    size_bytes = engine.info.block_bytes
    claim = engine.claim(request_of("r", prompt))
    assert (claim.resident_blocks, claim.usable_blocks, len(claim.keys)) == (0, 1, 2)
    with pytest.raises(BadLoad, match="next one is 0"):
        engine.load("r", 1, bytes(size_bytes))
    with pytest.raises(BadLoad, match="bytes"):
        engine.load("r", 0, bytes(size_bytes - 1))
    engine.load("r", 0, bytes(size_bytes))
    with pytest.raises(BadLoad):
        engine.load("r", 1, bytes(size_bytes))
    engine.cancel("r")
    assert engine.stats().blocks_free == 64 and engine.resident() == []


def test_cancel_gives_everything_back_at_once(engine: TorchEngine, tiny: ModelDirectory) -> None:
    """A client goes away in the middle of its prompt and another in the middle of its answer; a third is untouched."""
    engine.claim(request_of("waiting", prompt_of(100, salt=3)))
    for name, length in (("prompt", 90), ("answer", 5), ("stays", 40)):
        engine.claim(request_of(name, prompt_of(length, salt=length)))
        engine.start(name)
    seen = Seen()
    seen.take(engine.step())
    seen.take(engine.step())
    for name in ("waiting", "prompt", "answer", "never seen"):
        engine.cancel(name)
        engine.check_integrity()
    assert engine.stats().requests_decoding == 1
    finish(engine, seen)
    assert set(seen.finished) == {"stays"}
    assert seen.tokens["stays"] == greedy_by_transformers(tiny, prompt_of(40, salt=40), 12)
    assert engine.stats().blocks_held == 0


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_a_seeded_stream_goes_on_after_any_cut(tiny: ModelDirectory, penalty: float) -> None:
    """A worker dies after token n; the next attempt gets prompt + n tokens and must say the same rest, for every n."""
    prompt = prompt_of(20)
    sampling = Sampling(
        max_tokens=12, temperature=0.9, top_p=0.95, top_k=50, seed=42, logprobs=0, repetition_penalty=penalty
    )
    engine = TorchEngine(tiny, options())
    whole = run(engine, request_of("whole", prompt, sampling=sampling))
    said = whole.tokens["whole"]
    assert len(said) == 12 and len(set(said)) > 4
    for cut in range(13):
        request = request_of(f"cut{cut}", (*prompt, *said[:cut]), emitted=cut, sampling=sampling)
        seen = run(engine if cut % 2 else TorchEngine(tiny, options()), request)
        assert seen.tokens.get(request.request_id, []) == said[cut:]
        assert seen.first.get(request.request_id, cut) == cut
        assert seen.logprobs.get(request.request_id, []) == pytest.approx(whole.logprobs["whole"][cut:], abs=1e-4)
        assert seen.finished[request.request_id].reason is FinishReason.LENGTH


def test_an_answer_that_was_complete_ends_at_once(engine: TorchEngine) -> None:
    """The worker died between the last token and the terminal event: the new attempt says only that it is over."""
    request = request_of("r", (*prompt_of(20), 9, EOS), emitted=2, eos_token_ids=frozenset({EOS}))
    seen = run(engine, request)
    assert seen.tokens == {} and seen.finished["r"].reason is FinishReason.STOP


def test_repetition_penalty_is_that_of_transformers(engine: TorchEngine, tiny: ModelDirectory) -> None:
    """Prompt and answer both count."""
    prompt = prompt_of(30)
    sampling = Sampling(max_tokens=16, repetition_penalty=1.4)
    seen = run(engine, request_of("r", prompt, sampling=sampling))
    assert seen.tokens["r"] == greedy_by_transformers(tiny, prompt, 16, repetition_penalty=1.4)


def test_the_answer_ends_where_it_should(engine: TorchEngine, tiny: ModelDirectory) -> None:
    """End ids, stop ids, and asking to pass over the end id. The ending token is said."""
    prompt = prompt_of(20)
    free = greedy_by_transformers(tiny, prompt, 12)
    end = free[4]
    stop = free.index(end) + 1
    enders = frozenset({end})
    requests = {
        "eos": request_of("eos", prompt, eos_token_ids=enders),
        "stop": request_of("stop", prompt, sampling=Sampling(max_tokens=12, stop_token_ids=(end,))),
        "on": request_of("on", prompt, sampling=Sampling(max_tokens=12, ignore_eos=True), eos_token_ids=enders),
    }
    seen = run(engine, *requests.values())
    assert seen.tokens == {"eos": free[:stop], "stop": free[:stop], "on": free}
    assert seen.finished["eos"].reason is seen.finished["stop"].reason is FinishReason.STOP
    assert seen.finished["on"].reason is FinishReason.LENGTH


def test_the_answer_is_reusable_like_the_prompt(engine: TorchEngine) -> None:
    """F-TOK-02: turn 2 sends 100 prompt + 50 generated + 50 new tokens; floor(149 / B) * B of them are cached."""
    prompt = prompt_of(100)
    answer = run(engine, request_of("one", prompt, max_tokens=50)).tokens["one"]
    seen = run(engine, request_of("two", (*prompt, *answer, *prompt_of(50, salt=9))))
    assert seen.finished["two"].resident_tokens == 149 // BLOCK * BLOCK


def test_forced_tokens_are_said_and_computed(engine: TorchEngine, tiny: ModelDirectory) -> None:
    """Replay of a recorded answer: the recorded tokens come out, and what follows is what the model says after them."""
    prompt, forced = prompt_of(20), (1, 2, 3, 4, 5)
    seen = run(engine, request_of("r", prompt, forced=forced))
    assert seen.tokens["r"] == [*forced, *greedy_by_transformers(tiny, (*prompt, *forced), 7)]


@pytest.mark.parametrize(
    ("length", "max_tokens", "fits"),
    [(511, 1, True), (512, 1, False), (510, 2, True), (511, 2, False), (513, 1, False)],
)
def test_window_edge(tiny: ModelDirectory, length: int, max_tokens: int, fits: bool) -> None:
    """F-CTX-01: window 512; prompts of W-1, W, W+1 with 1 and 2 tokens to say. The error has the true numbers."""
    engine = TorchEngine(tiny, options())
    request = request_of("r", prompt_of(length), max_tokens=max_tokens)
    if fits:
        assert len(run(engine, request).tokens["r"]) == max_tokens
        return
    with pytest.raises(NeverFits) as refused:
        engine.claim(request)
    assert (refused.value.limit_tokens, refused.value.asked_tokens) == (512, length + max_tokens)
    assert engine.stats().blocks_free == 64


def test_room_is_refused_for_now_or_for_good(tiny: ModelDirectory) -> None:
    """F-RES-02: a pool of 4 blocks. 65 tokens never fit; 40 fit when the other request has gone."""
    engine = TorchEngine(tiny, options(blocks=4))
    with pytest.raises(NeverFits, match="the pool has 4"):
        engine.claim(request_of("never", prompt_of(60), max_tokens=6))
    engine.claim(request_of("first", prompt_of(40), max_tokens=6))
    with pytest.raises(PoolFull) as full:
        engine.claim(request_of("second", prompt_of(40, salt=1), max_tokens=6))
    assert (full.value.needed, full.value.available) == (3, 1)
    with pytest.raises(ValueError, match="already here"):
        engine.claim(request_of("first", prompt_of(1)))
    engine.start("first")
    seen = Seen()
    finish(engine, seen)
    run(engine, request_of("second", prompt_of(40, salt=1), max_tokens=6))


def test_bad_ids_are_refused_by_name(engine: TorchEngine) -> None:
    """A prompt made with another tokenizer must not index outside the embedding."""
    with pytest.raises(ValueError, match="vocabulary of 260"):
        engine.claim(request_of("r", (5, 260)))
    with pytest.raises(ValueError, match="at least one token"):
        engine.claim(request_of("r", ()))


def with_a_damaged_row(tiny: ModelDirectory, folder: Path) -> ModelDirectory:
    """The same model, whose embedding of token 200 is no number."""
    model = AutoModelForCausalLM.from_pretrained(tiny.path)
    with torch.no_grad():
        model.model.embed_tokens.weight[200] = float("nan")
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.model.embed_tokens.weight.nan_to_num())
    model.save_pretrained(folder / "bad")
    (folder / "bad" / "tokenizer.json").write_bytes(tiny.tokenizer_path.read_bytes())
    return replace(tiny, path=folder / "bad")


def test_nan_fails_one_request_and_its_kv_is_dropped(tiny: ModelDirectory, tmp_path: Path) -> None:
    """One embedding row is damaged: the request that uses it fails, its neighbour in the batch and its KV stay right."""
    engine = TorchEngine(with_a_damaged_row(tiny, tmp_path), options())
    good = tuple(token for token in prompt_of(60) if token != 200)
    seen = run(engine, request_of("good", good), request_of("bad", (*good[:20], 200, *good[20:])))
    assert "not finite" in seen.failed["bad"] and len(seen.tokens["good"]) == 12
    assert engine.stats().blocks_held == 0
    assert run(engine, request_of("again", good)).tokens["again"] == seen.tokens["good"]


def test_what_a_damaged_request_left_in_its_blocks_harms_nobody(tiny: ModelDirectory, tmp_path: Path) -> None:
    """Streams of one batch are padded to whole blocks; numbers that are none, left there, would come through any mask."""
    engine = TorchEngine(with_a_damaged_row(tiny, tmp_path), options(blocks=8))
    run(engine, *(request_of(f"bad{number}", (200, *prompt_of(20, salt=number))) for number in range(3)))
    prompts = {"short": prompt_of(17), "long": prompt_of(30, salt=1)}
    seen = run(engine, *(request_of(name, prompt) for name, prompt in prompts.items()))
    for name, prompt in prompts.items():
        assert seen.tokens[name] == greedy_by_transformers(tiny, prompt, 12)


@pytest.mark.parametrize(
    "config",
    [tiny_model.mistral(), tiny_model.gemma2(), tiny_model.gemma3(), tiny_model.qwen2(), tiny_model.qwen3()],
    ids=lambda config: str(config.model_type),
)
@pytest.mark.parametrize("step_tokens", [16, 512])
def test_other_families(config: PreTrainedConfig, step_tokens: int, tmp_path: Path) -> None:
    """Windows, alternating layers, squeezed scores, biases, norms: prompts longer than the window, cold, in chunks and warm."""
    model = tiny_model.make_model(tmp_path / "model", config)
    engine = TorchEngine(model, options(step_tokens=step_tokens))
    for length in (10, 24, 25, 70):
        prompt = prompt_of(length, salt=length)
        expected = greedy_by_transformers(model, prompt, 12)
        for attempt in ("cold", "warm"):
            assert run(engine, request_of(attempt, prompt)).tokens[attempt] == expected
