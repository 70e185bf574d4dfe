"""Pure: the built-in tools as a table, and the check of a call's arguments against it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from jsonschema import Draft202012Validator

from proto.chat import ToolSpec

# An argument of exec may have 128 KiB; a character has up to four bytes.
CODE_CHARS_MAX: Final = 32_000
assert CODE_CHARS_MAX * 4 < 128 * 1024, "code travels as one argument of exec"
ARGUMENTS_BYTES_MAX: Final = 256 * 1024
URL_CHARS_MAX: Final = 4_096
PASSAGES_MAX: Final = 20


@dataclass(frozen=True, slots=True)
class Tool:
    """One row. `rerun_safe`: running it twice does no more than once, so an interrupted call may run again."""

    spec: ToolSpec
    rerun_safe: bool
    needs_sandbox: bool


def _schema(**properties: dict[str, Any]) -> dict[str, Any]:
    """An object schema; keys in one order everywhere, since it stands at the front of shared prompts."""
    required = [name for name, rule in properties.items() if "default" not in rule]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _text(about: str, chars_max: int) -> dict[str, Any]:
    return {"type": "string", "description": about, "minLength": 1, "maxLength": chars_max}


_ROWS: Final = (
    Tool(
        ToolSpec(
            name="http_fetch",
            description="Get a web address (http or https) of an allowed host and return the text of the answer.",
            parameters=_schema(url=_text("The address to get.", URL_CHARS_MAX)),
        ),
        rerun_safe=True,  # only GET, which by RFC 9110 section 9.2.1 asks for no effect
        needs_sandbox=False,
    ),
    Tool(
        ToolSpec(
            name="python",
            description="Run Python code in an empty folder without network. Only what is printed is returned.",
            parameters=_schema(code=_text("The code to run.", CODE_CHARS_MAX)),
        ),
        rerun_safe=False,
        needs_sandbox=True,
    ),
    Tool(
        ToolSpec(
            name="retrieve",
            description="Search the stored documents and return the passages nearest to the question.",
            parameters=_schema(
                query=_text("What to look for.", URL_CHARS_MAX),
                limit={
                    "type": "integer",
                    "description": "How many passages.",
                    "minimum": 1,
                    "maximum": PASSAGES_MAX,
                    "default": 5,
                },
            ),
        ),
        rerun_safe=True,
        needs_sandbox=False,
    ),
    Tool(
        ToolSpec(
            name="shell",
            description="Run a command line with /bin/sh in an empty folder without network; returns what it printed.",
            parameters=_schema(command=_text("The command line.", CODE_CHARS_MAX)),
        ),
        rerun_safe=False,
        needs_sandbox=True,
    ),
)
# Canonical order: by name.
TOOLS: Final[Mapping[str, Tool]] = {tool.spec.name: tool for tool in sorted(_ROWS, key=lambda tool: tool.spec.name)}
_VALIDATORS: Final = {name: Draft202012Validator(tool.spec.parameters) for name, tool in TOOLS.items()}


class BadCall(Exception):
    """The call cannot be run as it is; the text is for the model."""


def checked_arguments(name: str, arguments: str) -> tuple[Tool, dict[str, Any]]:
    """The tool and its arguments, defaults filled in. Raises BadCall naming the field at fault."""
    tool = TOOLS.get(name)
    if tool is None:
        raise BadCall(f"there is no tool {name!r}; there are: {', '.join(TOOLS)}")
    if len(arguments) > ARGUMENTS_BYTES_MAX:
        raise BadCall(f"the arguments have {len(arguments)} characters; they may have {ARGUMENTS_BYTES_MAX}")
    try:
        values = json.loads(arguments or "{}")
    except (ValueError, RecursionError) as broken:
        raise BadCall(f"the arguments are not JSON: {broken}") from broken
    problems = sorted(_VALIDATORS[name].iter_errors(values), key=lambda problem: (problem.json_path, problem.message))
    if problems:
        field = problems[0].json_path.removeprefix("$").removeprefix(".") or "arguments"
        raise BadCall(f"field {field}: {problems[0].message[:300]}")
    for field, value in values.items():
        if isinstance(value, str) and not _is_plain(value):
            raise BadCall(f"field {field}: holds a NUL or half of a surrogate pair, which no program can be given")
    defaults = {key: rule["default"] for key, rule in tool.spec.parameters["properties"].items() if "default" in rule}
    return tool, {**defaults, **values}


def _is_plain(text: str) -> bool:
    return "\x00" not in text and not any("\ud800" <= char <= "\udfff" for char in text)
