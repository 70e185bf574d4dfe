"""Pure: messages and tools as OpenAI's API writes them, and as proto.chat says them. Used by chat and native routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import pydantic_core
from pydantic import Field

from proto.chat import ChatMessage, Role, ToolCall, ToolChoice, ToolSpec
from proto.errors import ErrorCode, WireError
from services.gateway.bodies import Body, check_json

MESSAGES_COUNT_MAX: Final = 20_000
TOOLS_COUNT_MAX: Final = 256
CALLS_COUNT_MAX: Final = 256
CALL_ID_CHARACTERS_MAX: Final = 256
TOOL_NAME_PATTERN: Final = r"^[A-Za-z0-9_-]{1,64}$"

ROLES: Final = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
}


class TextPart(Body):
    """One part of a content list. Other kinds than text are refused."""

    type: Literal["text"]
    text: str


class FunctionCall(Body):
    """Name and arguments (JSON text) of a call."""

    name: str = Field(pattern=TOOL_NAME_PATTERN)
    arguments: str


class ApiToolCall(Body):
    """A call in an assistant message."""

    id: str = Field(min_length=1, max_length=CALL_ID_CHARACTERS_MAX)
    type: Literal["function"] = "function"
    function: FunctionCall


class ApiMessage(Body):
    """One message, as OpenAI's chat API has it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | tuple[TextPart, ...] | None = None
    tool_calls: tuple[ApiToolCall, ...] | None = Field(default=None, max_length=CALLS_COUNT_MAX)
    tool_call_id: str | None = Field(default=None, min_length=1, max_length=CALL_ID_CHARACTERS_MAX)


class FunctionSpec(Body):
    """A function that the caller offers. `strict` is accepted: calls always follow the schema when one is forced."""

    name: str = Field(pattern=TOOL_NAME_PATTERN)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ApiTool(Body):
    """A tool whose calls go back to the caller."""

    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(Body):
    """The function that must be called. `arguments` (JSON text or object) forces the whole call."""

    name: str = Field(pattern=TOOL_NAME_PATTERN)
    arguments: str | dict[str, Any] | None = None


class NamedTool(Body):
    """OpenAI's way to name the tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


def content_text(content: str | Sequence[TextPart] | None) -> str:
    """Content as one text; parts are joined by newlines."""
    if content is None:
        return ""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def to_messages(messages: Sequence[ApiMessage], field: str = "messages") -> tuple[ChatMessage, ...]:
    """Checked for sense: who may call, who must answer which call. Raises BAD_REQUEST naming the field."""
    return tuple(_to_message(message, f"{field}.{index}") for index, message in enumerate(messages))


def _to_message(message: ApiMessage, field: str) -> ChatMessage:
    role = ROLES[message.role]
    calls = tuple(
        ToolCall(call_id=call.id, name=call.function.name, arguments=call.function.arguments)
        for call in message.tool_calls or ()
    )
    if calls and role is not Role.ASSISTANT:
        raise WireError(ErrorCode.BAD_REQUEST, "only an assistant calls tools", field=f"{field}.tool_calls")
    if (role is Role.TOOL) != (message.tool_call_id is not None):
        problem = "a tool message names the call that it answers, and no other message does"
        raise WireError(ErrorCode.BAD_REQUEST, problem, field=f"{field}.tool_call_id")
    if message.content is None and not calls:
        raise WireError(ErrorCode.BAD_REQUEST, "a message without tool calls has content", field=f"{field}.content")
    return ChatMessage(
        role=role, content=content_text(message.content), tool_calls=calls, tool_call_id=message.tool_call_id
    )


def to_tools(tools: Sequence[ApiTool], field: str = "tools") -> tuple[ToolSpec, ...]:
    """The caller's tools. Raises BAD_REQUEST for a name that is there twice or a schema that is not of an object."""
    names: set[str] = set()
    specs: list[ToolSpec] = []
    for index, tool in enumerate(tools):
        function, place = tool.function, f"{field}.{index}.function"
        if function.name in names:
            raise WireError(ErrorCode.BAD_REQUEST, f"two tools are named {function.name!r}", field=f"{place}.name")
        names.add(function.name)
        parameters = function.parameters or {"type": "object", "properties": {}}
        if parameters.get("type", "object") != "object":
            raise WireError(
                ErrorCode.BAD_REQUEST, "parameters are a JSON Schema of type object", field=f"{place}.parameters.type"
            )
        check_json(parameters, f"{place}.parameters")
        specs.append(ToolSpec(name=function.name, description=function.description or "", parameters=parameters))
    return tuple(specs)


def named_choice(function: NamedFunction, field: str) -> ToolChoice:
    """The choice of one tool, perhaps with its arguments. Raises BAD_REQUEST for arguments that are no JSON object."""
    arguments = function.arguments
    if isinstance(arguments, dict):
        check_json(arguments, f"{field}.arguments")
        arguments = pydantic_core.to_json(arguments).decode()
    elif arguments is not None:
        try:
            parsed = pydantic_core.from_json(arguments)
        except ValueError as broken:
            raise WireError(
                ErrorCode.BAD_REQUEST, f"arguments are not JSON: {broken}", field=f"{field}.arguments"
            ) from None
        if not isinstance(parsed, dict):
            raise WireError(ErrorCode.BAD_REQUEST, "arguments are a JSON object", field=f"{field}.arguments")
    return ToolChoice(mode="named", name=function.name, arguments=arguments)


def check_choice(choice: ToolChoice, tools: Sequence[ToolSpec], field: str) -> None:
    """A forced tool must be there. Raises BAD_REQUEST."""
    if choice.mode == "required" and not tools:
        raise WireError(ErrorCode.BAD_REQUEST, "a tool is required, but there are none", field=field)
    if choice.mode == "named" and choice.name not in {tool.name for tool in tools}:
        raise WireError(ErrorCode.BAD_REQUEST, f"there is no tool {choice.name!r}", field=field)
