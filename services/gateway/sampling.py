"""Pure: sampling and output-format fields that chat and native requests share, and what they mean.

Unset means: greedy, without a length beyond the gateway's default. With a temperature and no seed the gateway draws one,
so that two equal requests differ, and either can be repeated exactly by the seed in its session record.
"""

from __future__ import annotations

import json
from typing import Any, Final, Literal

import pydantic_core
from pydantic import Field

from proto.chat import Grammar, Sampling
from proto.errors import ErrorCode, WireError
from services.gateway.bodies import Body, check_json

STOPS_COUNT_MAX: Final = 16
STOP_CHARACTERS_MAX: Final = 256
STOP_TOKENS_COUNT_MAX: Final = 64
CHOICES_COUNT_MAX: Final = 500
TOKENS_MAX: Final = 2**31 - 1
SEED_MAX: Final = 2**63 - 1


class SchemaFormat(Body):
    """OpenAI's named schema. `strict` is accepted; an answer always follows the schema."""

    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """What the answer must look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None


class StructuredOutputs(Body):
    """The same in vLLM's way: exactly one of these."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: tuple[str, ...] | None = Field(default=None, min_length=1, max_length=CHOICES_COUNT_MAX)
    grammar: str | None = None
    json_object: bool | None = None


class SamplingFields(Body):
    """How the next token is chosen, and when to stop."""

    max_tokens: int | None = Field(default=None, ge=1, le=TOKENS_MAX)
    min_tokens: int | None = Field(default=None, ge=0, le=TOKENS_MAX)
    temperature: float | None = Field(default=None, ge=0.0, le=2.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    top_k: int | None = Field(default=None, ge=-1, le=TOKENS_MAX)
    min_p: float | None = Field(default=None, ge=0.0, le=1.0)
    repetition_penalty: float | None = Field(default=None, gt=0.0, le=10.0)
    seed: int | None = Field(default=None, ge=-(2**63), le=SEED_MAX)
    stop: str | tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = Field(default=None, max_length=STOP_TOKENS_COUNT_MAX)
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None


def to_sampling(
    fields: SamplingFields, *, max_tokens: int | None, max_tokens_default: int, fresh_seed: int, logprobs: int | None
) -> Sampling:
    """`max_tokens` is what the caller asked for under any of its names. Raises BAD_REQUEST naming the field."""
    temperature = fields.temperature or 0.0
    seed = fields.seed
    if seed is None:
        seed = fresh_seed if temperature > 0 else 0
    length = max_tokens_default if max_tokens is None else max_tokens
    if (fields.min_tokens or 0) > length:
        raise WireError(ErrorCode.BAD_REQUEST, f"min_tokens is above max_tokens, which is {length}", field="min_tokens")
    chosen: dict[str, Any] = {
        "max_tokens": length,
        "min_tokens": fields.min_tokens,
        "temperature": temperature,
        "top_p": fields.top_p,
        # -1 is how some clients say that there is no bound.
        "top_k": None if fields.top_k is None else max(0, fields.top_k),
        "min_p": fields.min_p,
        "repetition_penalty": fields.repetition_penalty,
        "seed": seed & SEED_MAX,
        "stop": _stops(fields.stop),
        "stop_token_ids": _stop_tokens(fields.stop_token_ids or ()),
        "ignore_eos": fields.ignore_eos,
        "logprobs": logprobs,
    }
    return Sampling(**{name: value for name, value in chosen.items() if value is not None})


def _stops(stop: str | tuple[str, ...] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else stop or ()
    if len(stops) > STOPS_COUNT_MAX:
        raise WireError(ErrorCode.BAD_REQUEST, f"at most {STOPS_COUNT_MAX} stop texts", field="stop")
    for text in stops:
        if not 0 < len(text) <= STOP_CHARACTERS_MAX:
            raise WireError(
                ErrorCode.BAD_REQUEST, f"a stop text has 1 to {STOP_CHARACTERS_MAX} characters", field="stop"
            )
    return stops


def _stop_tokens(token_ids: tuple[int, ...]) -> tuple[int, ...]:
    if any(not 0 <= token <= TOKENS_MAX for token in token_ids):
        raise WireError(ErrorCode.BAD_REQUEST, f"a token id is 0 to {TOKENS_MAX}", field="stop_token_ids")
    return token_ids


def format_grammar(form: ResponseFormat | None) -> Grammar | None:
    """The grammar that `response_format` asks for. Raises BAD_REQUEST."""
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return Grammar(kind="json_object")
    if form.json_schema is None:
        raise WireError(ErrorCode.BAD_REQUEST, "type json_schema needs a schema", field="response_format.json_schema")
    return schema_grammar(form.json_schema.json_schema, "response_format.json_schema.schema")


def structured_grammar(asked: StructuredOutputs | None) -> Grammar | None:
    """The grammar that `structured_outputs` asks for. Raises BAD_REQUEST unless it is exactly one."""
    if asked is None:
        return None
    given = {name for name in StructuredOutputs.model_fields if getattr(asked, name) not in (None, False)}
    if len(given) != 1:
        raise WireError(
            ErrorCode.BAD_REQUEST,
            "exactly one of json, regex, choice, grammar and json_object",
            field="structured_outputs",
        )
    if asked.json_ is not None:
        return schema_grammar(asked.json_, "structured_outputs.json")
    if asked.regex is not None:
        return Grammar(kind="regex", text=asked.regex)
    if asked.choice is not None:
        return Grammar(
            kind="lark", text="start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in asked.choice)
        )
    if asked.grammar is not None:
        return Grammar(kind="lark", text=asked.grammar)
    return Grammar(kind="json_object")


def schema_grammar(schema: dict[str, Any] | str, field: str) -> Grammar:
    """The grammar of a JSON Schema, whose keys keep their order. Raises BAD_REQUEST for text that is no JSON object."""
    if isinstance(schema, str):
        try:
            schema = pydantic_core.from_json(schema)
        except ValueError as broken:
            raise WireError(ErrorCode.BAD_REQUEST, f"the schema is not JSON: {broken}", field=field) from None
    if not isinstance(schema, dict):
        raise WireError(ErrorCode.BAD_REQUEST, "the schema is not a JSON object", field=field)
    check_json(schema, field)
    return Grammar(kind="json_schema", text=json.dumps(schema, ensure_ascii=False, separators=(",", ":")))
