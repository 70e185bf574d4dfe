"""Grammars are compiled once here, before a turn is queued, so that a bad one is a 400 and not a failed turn.

Uses llguidance as the workers do, over bytes instead of a model's vocabulary. In one thread of its own: a large schema takes
tens of milliseconds. Verdicts are remembered by digest, as agents send the same few schemas again and again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from blake3 import blake3
from llguidance import LLMatcher, LLParserLimits

from proto.chat import Grammar, ToolSpec
from proto.errors import ErrorCode, WireError
from services.gateway.sampling import schema_grammar
from shared.grammar_bounds import excess_of

VERDICTS_COUNT_MAX: Final = 4_096
MESSAGE_CHARACTERS_MAX: Final = 500
# Larger grammars are refused by llguidance itself; the workers have the same bounds.
LIMITS: Final = LLParserLimits(
    max_grammar_size=100_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    verbose_errors=False,
)


class GrammarChecker:
    """Owns the thread and the verdicts: '' for a good grammar, else what is wrong."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()

    async def check(self, grammar: Grammar | None, field: str) -> None:
        """Raises BAD_GRAMMAR naming the field."""
        if grammar is None or grammar.kind == "json_object":
            return
        verdict = excess_of(grammar) or await self._verdict(grammar)
        if verdict:
            raise WireError(ErrorCode.BAD_GRAMMAR, verdict[:MESSAGE_CHARACTERS_MAX], field=field)

    async def check_tools(self, tools: Sequence[ToolSpec], field: str) -> None:
        """The parameters of tools whose call is forced, and so generated under a grammar."""
        for index, tool in enumerate(tools):
            place = f"{field}.{index}.function.parameters"
            await self.check(schema_grammar(tool.parameters, place), place)

    async def _verdict(self, grammar: Grammar) -> str:
        digest = blake3(f"{grammar.kind}:{grammar.text}".encode()).digest()
        verdict = self._verdicts.get(digest)
        if verdict is None:
            verdict = await asyncio.get_running_loop().run_in_executor(self._thread, compile_fault, grammar)
            self._verdicts[digest] = verdict
            if len(self._verdicts) > VERDICTS_COUNT_MAX:
                self._verdicts.popitem(last=False)
        return verdict

    def close(self) -> None:
        """Let the thread go."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def compile_fault(grammar: Grammar) -> str:
    """What llguidance has against the grammar, '' for nothing."""
    match grammar.kind:
        case "json_schema":
            text = LLMatcher.grammar_from_json_schema(grammar.text)
        case "regex":
            text = LLMatcher.grammar_from_regex(grammar.text)
        case _:
            text = LLMatcher.grammar_from_lark(grammar.text)
    return str(LLMatcher.validate_grammar(text, limits=LIMITS)).strip()
