"""Pure: the body of `POST /v1/chat/completions` and the turn it becomes. Unknown fields become warnings.

What OpenAI's API has and Roost cannot do is refused when it would change the answer, and passed over when it would not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from pydantic import Field

from proto.chat import Grammar, ToolChoice
from proto.errors import ErrorCode, WireError
from proto.turns import StartTurn
from services.gateway.bodies import Body
from services.gateway.messages import (
    MESSAGES_COUNT_MAX,
    TOOLS_COUNT_MAX,
    ApiMessage,
    ApiTool,
    NamedTool,
    check_choice,
    named_choice,
    to_messages,
    to_tools,
)
from services.gateway.sampling import (
    TOKENS_MAX,
    SamplingFields,
    StructuredOutputs,
    format_grammar,
    structured_grammar,
    to_sampling,
)
from services.gateway.turn_context import TurnContext


class StreamOptions(Body):
    """What a stream says beside the answer."""

    include_usage: bool | None = None


class RoostOptions(Body):
    """Roost's own wishes in an OpenAI request."""

    receipt: bool = False


class ChatBody(SamplingFields):
    """The whole conversation, every time."""

    model: str = Field(min_length=1)
    messages: tuple[ApiMessage, ...] = Field(min_length=1, max_length=MESSAGES_COUNT_MAX)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_completion_tokens: int | None = Field(default=None, ge=1, le=TOKENS_MAX)
    tools: tuple[ApiTool, ...] | None = Field(default=None, max_length=TOOLS_COUNT_MAX)
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    structured_outputs: StructuredOutputs | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = None
    roost: RoostOptions | None = None


# Fields that change nothing here, so that nobody need be told.
HARMLESS: Final = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
    }
)


def _is_unset(value: Any) -> bool:
    return value in (None, 0, False) or value == {} or value == []


# Fields that would change the answer: refused unless they say what is done anyway.
REFUSED: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "n": (lambda value: value in (None, 1), "more than one choice is not supported yet"),
    "best_of": (lambda value: value in (None, 1), "more than one choice is not supported yet"),
    "top_logprobs": (_is_unset, "alternatives are not reported yet; logprobs of the chosen tokens are"),
    "frequency_penalty": (_is_unset, "not supported; repetition_penalty is"),
    "presence_penalty": (_is_unset, "not supported; repetition_penalty is"),
    "logit_bias": (_is_unset, "not supported"),
    "functions": (_is_unset, "superseded by tools"),
    "function_call": (lambda value: value in (None, "none"), "superseded by tool_choice"),
    "audio": (_is_unset, "there is only text"),
    "modalities": (lambda value: value in (None, ["text"]), "there is only text"),
    "web_search_options": (lambda value: value is None, "not supported"),
    "parallel_tool_calls": (lambda value: value in (None, True), "the model may always make several calls"),
    "chat_template": (lambda value: value is None, "a request cannot bring its own template"),
    "guided_json": (_is_unset, "superseded by structured_outputs"),
    "guided_regex": (_is_unset, "superseded by structured_outputs"),
    "guided_choice": (_is_unset, "superseded by structured_outputs"),
    "guided_grammar": (_is_unset, "superseded by structured_outputs"),
}


def refuse_unsupported(body: ChatBody) -> None:
    """Raises BAD_REQUEST for the first field that asks for what cannot be done."""
    for name, value in (body.model_extra or {}).items():
        if name in REFUSED:
            is_fine, problem = REFUSED[name]
            if not is_fine(value):
                raise WireError(ErrorCode.BAD_REQUEST, f"{name}: {problem}", field=name)


def is_known(path: str) -> bool:
    """Whether an extra field needs no warning."""
    return path in HARMLESS or path in REFUSED or path.endswith(".refusal")


def to_start_turn(body: ChatBody, context: TurnContext) -> StartTurn:
    """Raises BAD_REQUEST naming the field."""
    refuse_unsupported(body)
    tools = to_tools(body.tools or ())
    choice = _choice(body)
    check_choice(choice, tools, "tool_choice")
    return StartTurn(
        turn_id=context.turn_id,
        session_id=context.session_id,
        request_id=context.request_id,
        tenant=context.tenant,
        model=context.model,
        messages=to_messages(body.messages),
        stateless=True,
        tools=tools,
        tool_choice=choice,
        sampling=to_sampling(
            body,
            max_tokens=body.max_completion_tokens or body.max_tokens,
            max_tokens_default=context.max_tokens_default,
            fresh_seed=context.fresh_seed,
            logprobs=0 if body.logprobs else None,
        ),
        grammar=_grammar(body),
        deadline_at=context.deadline_at(),
        started_at=context.now,
    )


def _choice(body: ChatBody) -> ToolChoice:
    if isinstance(body.tool_choice, NamedTool):
        return named_choice(body.tool_choice.function, "tool_choice.function")
    return ToolChoice(mode=body.tool_choice or "auto")


def _grammar(body: ChatBody) -> Grammar | None:
    by_format, structured = format_grammar(body.response_format), structured_grammar(body.structured_outputs)
    if by_format is not None and structured is not None:
        raise WireError(
            ErrorCode.BAD_REQUEST,
            "structured_outputs and response_format are two ways to say one thing",
            field="structured_outputs",
        )
    return by_format or structured


def grammar_field(body: ChatBody) -> str:
    """Which field a refused grammar came from."""
    return "structured_outputs" if body.structured_outputs is not None else "response_format"
