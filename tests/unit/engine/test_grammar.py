"""Grammars in both engines: what comes out parses, bad ones are refused by name, a later attempt goes on in the middle."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from proto.chat import FinishReason, Grammar, Sampling
from shared.engine.grammar import GrammarCompiler
from shared.engine.options import EngineOptions
from shared.engine.protocol import BadGrammar, Engine
from shared.engine.sim_engine import SimEngine, SimOptions
from shared.engine.torch_engine import TorchEngine
from shared.grammar_bounds import REFERENCES_COUNT_MAX
from shared.model_dir import ModelDirectory
from tests.tiny_model import EOS, options, prompt_of, request_of, run

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 99}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
)
ENDERS = frozenset({EOS})


@pytest.fixture(params=["torch", "sim"])
def either(request: pytest.FixtureRequest, tiny: ModelDirectory) -> Engine:
    """Both engines over the tiny model's tokenizer."""
    if request.param == "torch":
        return TorchEngine(tiny, options())
    sim = SimOptions.of_model(tiny, EngineOptions(pool_bytes=options().pool_bytes))
    compiler = GrammarCompiler(tiny.tokenizer_path, vocab_size=sim.vocab_size, eos_token_ids=tiny.eos_token_ids)
    return SimEngine(sim, grammars=compiler)


def text_of(tiny: ModelDirectory, tokens: list[int]) -> str:
    """What the tokens say; the end of the answer is not shown."""
    return str(Tokenizer.from_file(str(tiny.tokenizer_path)).decode(tokens))


def constrained(name: str, grammar: Grammar, **changes: Any) -> Any:
    """A request that must keep to the grammar."""
    sampling = changes.pop("sampling", Sampling(max_tokens=120))
    tokens = changes.pop("tokens", prompt_of(40))
    return request_of(name, tokens, sampling=sampling, grammar=grammar, eos_token_ids=ENDERS, **changes)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_json_schema_holds(either: Engine, tiny: ModelDirectory, temperature: float) -> None:
    """A random model, made to say a tool's arguments: they parse and fit the schema."""
    grammar = Grammar(kind="json_schema", text=SCHEMA)
    for seed in range(3):
        sampling = Sampling(max_tokens=120, temperature=temperature, seed=seed)
        seen = run(either, constrained("r", grammar, sampling=sampling))
        said = json.loads(text_of(tiny, seen.tokens["r"]))
        assert said["city"] in ("Oslo", "Rome") and 1 <= said["days"] <= 99 and len(said) == 2
        assert seen.finished["r"].reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("grammar", "answers"),
    [
        (Grammar(kind="lark", text='start: "yes" | "no"'), {"yes", "no"}),
        (Grammar(kind="regex", text="(red|green) [ab]"), {"red a", "red b", "green a", "green b"}),
    ],
    ids=["lark", "regex"],
)
def test_lark_and_regex_hold(either: Engine, tiny: ModelDirectory, grammar: Grammar, answers: set[str]) -> None:
    """The same for the other kinds; the answer ends where the grammar does, even if the model's own end is ignored."""
    for ignore_eos in (False, True):
        sampling = Sampling(max_tokens=40, temperature=1.0, seed=3, ignore_eos=ignore_eos, min_tokens=30)
        seen = run(either, constrained("r", grammar, sampling=sampling))
        assert text_of(tiny, seen.tokens["r"]) in answers
        assert seen.finished["r"].reason is FinishReason.STOP


def test_a_later_attempt_goes_on_in_the_middle(either: Engine, tiny: ModelDirectory) -> None:
    """F-STO-03: whatever part of the JSON was said, the rest is that of the uninterrupted stream."""
    grammar = Grammar(kind="json_schema", text=SCHEMA)
    sampling = Sampling(max_tokens=120, temperature=1.0, seed=5)
    whole = run(either, constrained("r", grammar, sampling=sampling)).tokens["r"]
    for emitted in range(1, len(whole)):
        tokens = (*prompt_of(40), *whole[:emitted])
        seen = run(either, constrained("r", grammar, sampling=sampling, tokens=tokens, emitted=emitted))
        assert seen.tokens["r"] == whole[emitted:]
    # And when nothing was missing but the news of the end: nothing more is said.
    tokens = (*prompt_of(40), *whole)
    seen = run(either, constrained("r", grammar, sampling=sampling, tokens=tokens, emitted=len(whole)))
    assert seen.tokens == {} and seen.finished["r"].reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("grammar", "part"),
    [
        (
            Grammar(kind="json_schema", text='{"type": "object", "unevaluatedProperties": false}'),
            "unevaluatedProperties",
        ),
        (Grammar(kind="json_schema", text='{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (Grammar(kind="json_schema", text="[1"), "not JSON"),
        (Grammar(kind="json_schema", text="[1]"), "not an object"),
        (Grammar(kind="json_schema", text="[" * 50_000), "JSON"),
        (Grammar(kind="lark", text="start: nothing"), "nothing"),
        (Grammar(kind="regex", text="(a"), "unclosed"),
        (Grammar(kind="regex", text="a" * 70_000), "bytes"),
    ],
    ids=["keyword", "unique", "broken", "no-object", "deep", "lark", "regex", "long"],
)
def test_bad_grammars_are_refused_by_name(either: Engine, grammar: Grammar, part: str) -> None:
    """F-STO-02: nothing is accepted and then ignored; nothing stays held, also when asked twice."""
    for _ in range(2):
        with pytest.raises(BadGrammar, match=part):
            either.claim(constrained("r", grammar))
    assert either.stats().blocks_held == either.stats().requests_claimed == 0
    either.check_integrity()


def test_a_chain_of_references_cannot_kill_the_process(either: Engine) -> None:
    """Long chains overflow the compiler's stack, however `$ref` is spelled: they are counted before it sees them."""
    count = REFERENCES_COUNT_MAX + 1
    links = {f"d{index}": {"$ref": f"#/$defs/d{index + 1}"} for index in range(count)}
    text = json.dumps({"$ref": "#/$defs/d0", "$defs": {**links, f"d{count}": {"type": "null"}}})
    for spelling in (text, text.replace('"$ref"', '"\\u0024ref"'), text.replace('"$ref"', '"$r\\u0065f"')):
        with pytest.raises(BadGrammar, match="references"):
            either.claim(constrained("r", Grammar(kind="json_schema", text=spelling)))


def test_forced_tokens_move_the_grammar_on(either: Engine, tiny: ModelDirectory) -> None:
    """A replayed beginning of a constrained answer; one that does not fit is a failure that says so."""
    tokenizer = Tokenizer.from_file(str(tiny.tokenizer_path))
    forced = tuple(tokenizer.encode('{"city"').ids)
    grammar = Grammar(kind="json_schema", text=SCHEMA)
    seen = run(either, constrained("r", grammar, forced=forced))
    assert json.loads(text_of(tiny, seen.tokens["r"]))["city"] in ("Oslo", "Rome")
    seen = run(either, constrained("wrong", grammar, forced=tuple(tokenizer.encode("[").ids)))
    assert "not in the grammar" in seen.failed["wrong"]
    assert either.stats().blocks_held == 0
