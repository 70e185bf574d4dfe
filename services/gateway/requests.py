"""Pure: bodies of the native routes, and the messages they become. Unknown fields are refused."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field

from proto.chat import ChatMessage, Grammar, Role, ToolChoice
from proto.errors import ErrorCode, WireError
from proto.ids import Id
from proto.retrieval import DeleteDocument, DocumentOp, PutDocument
from proto.sessions import CreateSession
from proto.turns import StartTurn
from services.gateway.bodies import Body
from services.gateway.messages import (
    MESSAGES_COUNT_MAX,
    TOOLS_COUNT_MAX,
    ApiMessage,
    ApiTool,
    NamedFunction,
    named_choice,
    to_messages,
    to_tools,
)
from services.gateway.sampling import SamplingFields, format_grammar, schema_grammar, to_sampling
from services.gateway.turn_context import DEADLINE_MS_MAX, TurnContext

METADATA_COUNT_MAX: Final = 64
METADATA_CHARACTERS_MAX: Final = 1_024
STEPS_MAX: Final = 64


class SessionBody(Body):
    """`POST /v1/sessions`."""

    system: str = ""
    # Names of tools that Roost runs itself, such as python.
    tools: tuple[str, ...] = Field(default=(), max_length=TOOLS_COUNT_MAX)
    # Tools whose calls go back to the caller.
    client_tools: tuple[ApiTool, ...] = Field(default=(), max_length=TOOLS_COUNT_MAX)
    model: str | None = None
    session_id: Id | None = None


class GrammarBody(Body):
    """A constraint on the answer: a JSON Schema, a regular expression or a Lark grammar."""

    kind: Literal["json_schema", "json_object", "regex", "lark"]
    text: str = ""


class TurnBody(SamplingFields):
    """`POST /v1/sessions/{id}/turns`. What is new: either `content` (one user message) or `messages`."""

    content: str | None = None
    messages: tuple[ApiMessage, ...] | None = Field(default=None, min_length=1, max_length=MESSAGES_COUNT_MAX)
    tool_choice: Literal["auto", "none", "required"] | NamedFunction = "auto"
    grammar: GrammarBody | None = None
    max_steps: int = Field(default=8, ge=1, le=STEPS_MAX)
    # False: wait, and answer with one JSON object.
    stream: bool = True
    deadline_ms: int | None = Field(default=None, ge=1, le=DEADLINE_MS_MAX)
    # The caller's own name for this turn; a second request with the same name attaches to the same turn.
    turn_id: str | None = Field(default=None, min_length=1, max_length=512)
    # What becomes of the turn when the client goes away before its end.
    on_disconnect: Literal["continue", "cancel"] = "continue"
    return_token_ids: bool = False
    logprobs: bool = False


class DocumentBody(Body):
    """`POST /v1/documents`."""

    text: str = Field(min_length=1)
    title: str = ""
    document_id: Id | None = None
    metadata: dict[str, str] = Field(default_factory=dict, max_length=METADATA_COUNT_MAX)


def to_create_session(body: SessionBody, *, session_id: str, tenant: str, model: str) -> CreateSession:
    """Raises BAD_REQUEST naming the field."""
    if len(set(body.tools)) != len(body.tools):
        raise WireError(ErrorCode.BAD_REQUEST, "a tool is named twice", field="tools")
    return CreateSession(
        session_id=session_id,
        tenant=tenant,
        model=model,
        system=body.system,
        tools=to_tools(body.client_tools, "client_tools"),
        server_tools=body.tools,
    )


def to_start_turn(body: TurnBody, context: TurnContext) -> StartTurn:
    """Raises BAD_REQUEST naming the field."""
    return StartTurn(
        turn_id=context.turn_id,
        session_id=context.session_id,
        request_id=context.request_id,
        tenant=context.tenant,
        model=context.model,
        messages=_new_messages(body),
        tool_choice=_choice(body),
        sampling=to_sampling(
            body,
            max_tokens=body.max_tokens,
            max_tokens_default=context.max_tokens_default,
            fresh_seed=context.fresh_seed,
            logprobs=0 if body.logprobs else None,
        ),
        grammar=_grammar(body),
        max_steps=body.max_steps,
        deadline_at=context.deadline_at(body.deadline_ms),
        started_at=context.now,
    )


def _new_messages(body: TurnBody) -> tuple[ChatMessage, ...]:
    if (body.content is None) == (body.messages is None):
        raise WireError(ErrorCode.BAD_REQUEST, "exactly one of content and messages", field="messages")
    if body.messages is not None:
        return to_messages(body.messages)
    assert body.content is not None
    return (ChatMessage(role=Role.USER, content=body.content),)


def _choice(body: TurnBody) -> ToolChoice:
    if isinstance(body.tool_choice, NamedFunction):
        return named_choice(body.tool_choice, "tool_choice")
    return ToolChoice(mode=body.tool_choice)


def _grammar(body: TurnBody) -> Grammar | None:
    by_format = format_grammar(body.response_format)
    if body.grammar is None:
        return by_format
    if by_format is not None:
        raise WireError(
            ErrorCode.BAD_REQUEST, "grammar and response_format are two ways to say one thing", field="grammar"
        )
    if body.grammar.kind == "json_schema":
        return schema_grammar(body.grammar.text, "grammar.text")
    return Grammar(kind=body.grammar.kind, text=body.grammar.text)


def grammar_field(body: TurnBody) -> str:
    """Which field a refused grammar came from."""
    return "response_format" if body.grammar is None else "grammar.text"


def to_put_document(body: DocumentBody, *, document_id: str, tenant: str) -> DocumentOp:
    """Raises BAD_REQUEST naming the field."""
    for name, value in body.metadata.items():
        if len(name) > METADATA_CHARACTERS_MAX or len(value) > METADATA_CHARACTERS_MAX:
            raise WireError(
                ErrorCode.BAD_REQUEST,
                f"names and values have at most {METADATA_CHARACTERS_MAX} characters",
                field=f"metadata.{name[:40]}",
            )
    return DocumentOp(
        put=PutDocument(
            document_id=document_id, tenant=tenant, title=body.title, text=body.text, metadata=body.metadata
        )
    )


def to_delete_document(*, document_id: str, tenant: str) -> DocumentOp:
    """The entry of the documents log that removes one."""
    return DocumentOp(delete=DeleteDocument(document_id=document_id, tenant=tenant))
