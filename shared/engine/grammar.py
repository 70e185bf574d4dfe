"""Grammars: what a request may say next, by llguidance. One compiled grammar per text, one state per sequence.

A state is always rebuilt from the tokens that were said, so a generation that moves to another worker goes on in the
middle of its JSON (failure catalogue F-STO-03). Keywords that llguidance cannot enforce are refused by name, not passed
over (F-STO-02). Whitespace between JSON tokens is bounded: a model may otherwise emit it until max_tokens.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from blake3 import blake3
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from proto.chat import Grammar
from shared.engine.protocol import BadGrammar
from shared.grammar_bounds import excess_of

# A hostile grammar costs time and memory in proportion to these; shared/grammar_bounds.py bounds what these do not.
_LIMITS: Final = LLParserLimits(
    max_grammar_size=100_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    verbose_errors=False,
)
_WHITESPACE: Final = r"[\x20\x0A]{0,8}"
# Agents of one tenant use a handful of tool schemas; a compiled one takes some hundred KB.
COMPILED_COUNT_MAX: Final = 64


class LlguidanceState:
    """Implements batch.GrammarState."""

    def __init__(self, matcher: LLMatcher, model_eos_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._model_eos_ids = model_eos_ids

    def allowed(self, eos_token_ids: frozenset[int]) -> NDArray[np.bool_]:
        """See GrammarState. The tokenizer's own end ids are taken out: the request says what ends an answer."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        mask = np.unpackbits(bits, bitorder="little").view(np.bool_)
        mask[list(self._model_eos_ids)] = False
        if eos_token_ids and self._matcher.is_accepting():
            mask[[token for token in eos_token_ids if token < len(mask)]] = True
        return mask

    def advance(self, token: int) -> bool:
        """See GrammarState."""
        return bool(self._matcher.consume_token(token))

    @property
    def ended(self) -> bool:
        """See GrammarState."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()


class GrammarCompiler:
    """Compiles each distinct grammar once, bad ones too, and keeps the last few."""

    def __init__(self, tokenizer_path: Path, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer_path = tokenizer_path
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids) or frozenset({0})
        # Made at the first grammar (0.3 s): most workers never see one.
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[bytes, LLMatcher | BadGrammar] = OrderedDict()

    def start(self, grammar: Grammar, said: Sequence[int]) -> LlguidanceState:
        """The state after `said`. Raises BadGrammar if the grammar does not compile or `said` does not fit it."""
        digest = blake3(grammar.kind.encode() + b"\0" + grammar.text.encode()).digest()
        compiled = self._compiled.get(digest)
        if compiled is None:
            compiled = self._compiled[digest] = self._compile(grammar)
            if len(self._compiled) > COMPILED_COUNT_MAX:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(digest)
        if isinstance(compiled, BadGrammar):
            raise BadGrammar(str(compiled))
        matcher = compiled.deep_copy()
        if said and not matcher.consume_tokens(list(said)):
            raise BadGrammar("the tokens said by earlier attempts do not fit the grammar")
        return LlguidanceState(matcher, self._eos_token_ids)

    def _compile(self, grammar: Grammar) -> LLMatcher | BadGrammar:
        if self._tokenizer is None:
            self._tokenizer = LLTokenizer(
                self._tokenizer_path.read_text(encoding="utf-8"),
                n_vocab=self._vocab_size,
                eos_token=sorted(self._eos_token_ids),
            )
        try:
            text = grammar_text(grammar)
        except BadGrammar as bad:
            return bad
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=_LIMITS)
        return BadGrammar(matcher.get_error()) if matcher.is_error() else matcher


def grammar_text(grammar: Grammar) -> str:
    """The grammar in llguidance's own language. Raises BadGrammar for text that is too large or no JSON."""
    if grammar.kind == "json_object":
        grammar = Grammar(kind="json_schema", text='{"type": "object"}')
    elif grammar.kind == "json_schema":
        grammar = Grammar(kind="json_schema", text=_plain_json(grammar.text))
    if excess := excess_of(grammar):
        raise BadGrammar(excess)
    match grammar.kind:
        case "json_schema" | "json_object":
            return str(LLMatcher.grammar_from_json_schema(grammar.text, overrides={"whitespace_pattern": _WHITESPACE}))
        case "regex":
            return str(LLMatcher.grammar_from_regex(grammar.text))
        case "lark":
            return str(LLMatcher.grammar_from_lark(grammar.text))


def _plain_json(schema: str) -> str:
    """The schema in json.dumps' spelling: a `$ref` written with escapes must not slip through the bounds."""
    try:
        parsed = json.loads(schema)
        text = json.dumps(parsed)
    except (ValueError, RecursionError) as broken:
        raise BadGrammar(f"the JSON schema is not JSON: {broken}") from broken
    if not isinstance(parsed, dict):
        raise BadGrammar("the JSON schema is not an object")
    return text
