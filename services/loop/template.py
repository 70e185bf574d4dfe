"""Pure: chat templates, rendered so that a session only ever grows.

The prompt of a session is never rendered again. What a turn adds is rendered beside a stub of what came before, and only the
text after the stub is taken:

    first turn   render(system, user, ...)                         whole
    later        render(stub user, stub assistant, user, ...)      what follows the stub assistant's content

So a template that rewrites finished turns (F-TOK-01) cannot: they are frozen as the tokens they were. Contents are rendered
as placeholders and put back as pieces of their own, so that no content is ever parsed as markup (F-SEC-03).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from proto.chat import ChatMessage, Role, ToolCall, ToolSpec
from proto.errors import ErrorCode, WireError

# Private-use characters frame a placeholder; a template has no reason to hold them, and content is never rendered.
OPEN: Final = "\ue0f0"
CLOSE: Final = "\ue0f1"

TOOLS_PREAMBLE: Final = (
    "You may call the following tools. To call one, answer with a JSON object with the keys name and arguments inside "
    "<tool_call></tool_call> tags.\n<tools>\n{tools}\n</tools>"
)


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of rendered text: the template's own markup, or somebody's content."""

    text: str
    is_markup: bool


def canonical_json(value: Any) -> str:
    """One text for equal values: sorted keys, no spare blanks. Tools in it are shared by sessions (F-TOK-05)."""
    return json.dumps(value, sort_keys=True, separators=(", ", ": "), ensure_ascii=False)


def tool_as_openai(tool: ToolSpec) -> dict[str, Any]:
    """The shape that chat templates expect of a tool."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def call_markup(call: ToolCall) -> str:
    """A call as the model would have said it (Hermes form)."""
    return f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}\n</tool_call>'


class ChatTemplate:
    """One model's template. Raises WireError BAD_REQUEST when the template refuses the messages."""

    def __init__(self, source: str, *, bos_token: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise
        environment.filters["tojson"] = _tojson
        self._template = environment.from_string(source)
        self._bos_token = bos_token
        self._knows_tools = "tools" in source

    def opening(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> list[Piece]:
        """The whole prompt of a session's first turn, up to where the assistant speaks."""
        system = "\n\n".join(message.content for message in messages if message.role is Role.SYSTEM)
        rest = [message for message in messages if message.role is not Role.SYSTEM]
        if tools and not self._knows_tools:
            listed = "\n".join(canonical_json(tool_as_openai(tool)) for tool in tools)
            system = "\n\n".join(filter(None, (system, TOOLS_PREAMBLE.format(tools=listed))))
        head = [ChatMessage(role=Role.SYSTEM, content=system)] if system else []
        contents = [_content(message) for message in (*head, *rest)]
        rendered = self._render([message.role for message in (*head, *rest)], tools if self._knows_tools else ())
        return _split(rendered, contents, first=0)

    def following(self, messages: Sequence[ChatMessage]) -> list[Piece]:
        """What these messages add after an assistant's answer, from its end marker to where the assistant speaks again."""
        rendered = self._render([Role.USER, Role.ASSISTANT, *(message.role for message in messages)], ())
        marker = _placeholder(1)
        position = rendered.rfind(marker)
        if position < 0:
            raise WireError(
                ErrorCode.BAD_REQUEST, "the model's chat template drops the assistant's answer", field="model"
            )
        return _split(rendered[position + len(marker) :], [_content(message) for message in messages], first=2)

    def _render(self, roles: Sequence[Role], tools: Sequence[ToolSpec]) -> str:
        messages = [{"role": role.value, "content": _placeholder(number)} for number, role in enumerate(roles)]
        try:
            return self._template.render(
                messages=messages,
                tools=[tool_as_openai(tool) for tool in tools] or None,
                add_generation_prompt=True,
                bos_token=self._bos_token,
                eos_token="",
            )
        except jinja2.TemplateError as refused:
            raise WireError(
                ErrorCode.BAD_REQUEST, f"the model's chat template: {refused}", field="messages"
            ) from refused


def _content(message: ChatMessage) -> str:
    calls = "\n".join(call_markup(call) for call in message.tool_calls)
    return "\n".join(filter(None, (message.content, calls))) if calls else message.content


def _placeholder(number: int) -> str:
    return f"{OPEN}{number}{CLOSE}"


def _split(rendered: str, contents: Sequence[str], *, first: int) -> list[Piece]:
    """Cut the rendering at its placeholders. `first` is the number of the first message that belongs to it."""
    pieces: list[Piece] = []
    for number, part in enumerate(rendered.split(OPEN)):
        markup = part
        if number > 0:
            name, _, markup = part.partition(CLOSE)
            index = int(name) - first
            assert 0 <= index < len(contents), "a placeholder of a message that was not asked for"
            if contents[index]:
                pieces.append(Piece(contents[index], is_markup=False))
        if markup:
            pieces.append(Piece(markup, is_markup=True))
    return pieces


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, indent=indent)
