"""The grammars of forced calls, against the real grammar engine and the default model's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from proto.chat import ToolChoice, ToolSpec
from proto.errors import ErrorCode, WireError
from services.loop.grammar import call_grammar
from shared.engine.grammar import GrammarCompiler
from shared.engine.protocol import BadGrammar
from shared.settings import DEFAULT_MODEL

PYTHON = ToolSpec(
    name="python",
    description="Runs code.",
    parameters={"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
)


def accepts(models: Path, choice: ToolChoice, text: str) -> bool:
    """Whether the worker's grammar lets exactly this be said."""
    path = models / DEFAULT_MODEL / "tokenizer.json"
    grammar = call_grammar([PYTHON], choice)
    assert grammar is not None
    compiler = GrammarCompiler(path, vocab_size=49_152, eos_token_ids=(2,))
    try:
        state = compiler.start(grammar, Tokenizer.from_file(str(path)).encode(text, add_special_tokens=False).ids)
    except BadGrammar as bad:
        assert "do not fit" in str(bad)
        return False
    return state.ended


def call(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "python", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize(
    "code", ["print(6 * 7)", 'x = "é\t\\n"\nprint(x)', 'a {{ %json }} | start: "x" /re/ [1-9]', "\u2028 \U0001f600"]
)
def test_given_arguments_are_the_only_thing_that_can_be_said(models: Path, code: str) -> None:
    arguments = json.dumps({"code": code}, ensure_ascii=False)
    choice = ToolChoice(mode="named", name="python", arguments=arguments)
    assert accepts(models, choice, call(arguments))
    assert not accepts(models, choice, call(json.dumps({"code": "something else"})))
    assert not accepts(models, choice, "Sure!")


def test_without_arguments_they_follow_the_schema(models: Path) -> None:
    choice = ToolChoice(mode="named", name="python")
    assert accepts(models, choice, call('{"code": "print(1)"}'))
    assert not accepts(models, choice, call('{"code": 5}'))


def test_a_choice_that_cannot_be_met_names_its_field() -> None:
    with pytest.raises(WireError) as unknown:
        call_grammar([PYTHON], ToolChoice(mode="named", name="ruby"))
    assert (unknown.value.reply.code, unknown.value.reply.field) == (ErrorCode.BAD_REQUEST, "tool_choice.name")
    with pytest.raises(WireError) as none:
        call_grammar([], ToolChoice(mode="required"))
    assert none.value.reply.field == "tool_choice"
