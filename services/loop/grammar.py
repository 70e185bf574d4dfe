"""Pure: the grammar that makes a tool call come out as one, in llguidance's Lark dialect.

`start` spells the call's markup; only the arguments are free, and they follow the tool's own JSON Schema. Where the choice
gives the arguments, nothing is free. They are not checked here: the tool answers wrong ones as it answers the model's own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from proto.chat import Grammar, ToolChoice, ToolSpec
from proto.errors import ErrorCode, WireError


def _call_rule(number: int, tool: ToolSpec, arguments: str | None) -> list[str]:
    opening = f'<tool_call>\n{{"name": {json.dumps(tool.name)}, "arguments": '
    if arguments is not None:
        whole = f"{opening}{arguments}}}\n</tool_call>"
        return [f"call_{number}: {_literal(whole)}"]
    schema = {"type": "object", "properties": {}, **tool.parameters}
    return [
        f'call_{number}: {_literal(opening)} arguments_{number} "}}\\n</tool_call>"',
        f"arguments_{number}: %json {json.dumps(schema)}",
    ]


def _literal(text: str) -> str:
    """Text as a string of the Lark dialect, which escapes as JSON does."""
    return json.dumps(text, ensure_ascii=False)


def call_grammar(tools: Sequence[ToolSpec], choice: ToolChoice) -> Grammar | None:
    """The grammar for this choice, None when the model is free. Raises BAD_REQUEST for a choice that cannot be met."""
    if choice.mode in ("auto", "none"):
        return None
    if not tools:
        raise WireError(
            ErrorCode.BAD_REQUEST, "a tool call is asked for, but the session has no tools", field="tool_choice"
        )
    wanted = [tool for tool in tools if choice.name in (None, tool.name)]
    if not wanted:
        names = ", ".join(tool.name for tool in tools)
        raise WireError(ErrorCode.BAD_REQUEST, f"no tool {choice.name!r}; there are: {names}", field="tool_choice.name")
    rules = [line for number, tool in enumerate(wanted) for line in _call_rule(number, tool, choice.arguments)]
    start = "start: " + " | ".join(f"call_{number}" for number in range(len(wanted)))
    return Grammar(kind="lark", text="\n".join([start, *rules]))
