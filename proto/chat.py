"""Pure: what a conversation is made of. Messages, tools, sampling and grammars, as gateway, loop and workers say them."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from pydantic import Field, model_validator

from proto.message import Message, Tokens


class Role(StrEnum):
    """Who speaks."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class ToolCall(Message):
    """One call that the model (or the caller, by a forced choice) made. `arguments` is the JSON text as generated."""

    call_id: str
    name: str
    arguments: str


class ChatMessage(Message):
    """One message of a conversation. `tool_call_id` names the call that a tool message answers."""

    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


class ToolSpec(Message):
    """A tool as the model is told of it. `parameters` is a JSON Schema of type object."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})


class ToolChoice(Message):
    """Whether and what the model must call. `arguments` (JSON text) forces the whole call, not only its name."""

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str | None = None
    arguments: str | None = None

    @model_validator(mode="after")
    def _named_has_a_name(self) -> ToolChoice:
        if (self.mode == "named") != (self.name is not None):
            raise ValueError("name is given exactly when mode is 'named'")
        if self.arguments is not None and self.name is None:
            raise ValueError("arguments need a named tool")
        return self


class Grammar(Message):
    """A constraint on the generated text. `text` is a JSON Schema, a regular expression, or a Lark grammar (llguidance)."""

    kind: Literal["json_schema", "json_object", "regex", "lark"]
    text: str = ""


class Sampling(Message):
    """How the next token is chosen. Temperature 0 is greedy. The seed makes a stream repeatable wherever it runs."""

    max_tokens: int = Field(default=256, ge=1)
    min_tokens: int = Field(default=0, ge=0)
    temperature: float = Field(default=0.0, ge=0.0, le=2.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    repetition_penalty: float = Field(default=1.0, gt=0.0, le=10.0)
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    stop: tuple[str, ...] = ()
    stop_token_ids: Tokens = ()
    ignore_eos: bool = False
    # How many alternatives to report beside the chosen token; None reports no log-probabilities at all.
    logprobs: int | None = Field(default=None, ge=0, le=20)


class FinishReason(StrEnum):
    """Why a generation or a turn ended well."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"
