"""Pure: from the bytes of an HTTP body to a typed request, or to an error that names the field.

Types are strict: "5" is no number and 1.0 no count. Fields that nobody knows are kept aside: native routes refuse them,
OpenAI routes list them as a warning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from proto.errors import ErrorCode, WireError

# Unknown fields that are named in a warning; the rest is counted.
UNKNOWN_NAMED_MAX: Final = 20
# Free-form JSON (schemas, metadata) goes into msgpack, which knows no larger integers, and into recursive code.
JSON_DEPTH_MAX: Final = 64
JSON_INTEGER_MAX: Final = 2**63 - 1


class Body(BaseModel):
    """Base of all request models."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())


B = TypeVar("B", bound=Body)


def parse_body(data: bytes, kind: type[B]) -> B:
    """The request in these bytes. Raises BAD_MESSAGE naming the field, in the caller's own naming."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as invalid:
        field, message = _first_fault(invalid, data)
        raise WireError(ErrorCode.BAD_MESSAGE, message, field=field) from None


def _first_fault(invalid: ValidationError, data: bytes) -> tuple[str, str]:
    errors = invalid.errors(include_url=False, include_input=False)
    if errors[0]["type"] == "json_invalid":
        return "body", f"the body is not JSON: {errors[0]['msg'].removeprefix('Invalid JSON: ')}"
    parsed = pydantic_core.from_json(data)
    # Of the faults of a union's members, the one that got furthest is the one the caller meant.
    paths = [field_path(error["loc"], parsed, is_missing=error["type"] == "missing") for error in errors]
    best = max(range(len(errors)), key=lambda index: (len(paths[index]), -index))
    same = dict.fromkeys(_words(error) for error, path in zip(errors, paths, strict=True) if path == paths[best])
    return ".".join(map(str, paths[best])) or "body", "; or: ".join(list(same)[:3])


def field_path(location: Sequence[int | str], parsed: Any, *, is_missing: bool) -> list[int | str]:
    """The part of pydantic's location that is really in the body: names of union members are left out."""
    path: list[int | str] = []
    node = parsed
    for number, part in enumerate(location):
        is_key = isinstance(node, dict) and part in node
        is_index = isinstance(node, list) and isinstance(part, int) and part < len(node)
        if is_key or is_index:
            node = node[part]
        elif not (is_missing and number == len(location) - 1):
            continue
        path.append(part)
    return path


def _words(error: ErrorDetails) -> str:
    """What is wrong, without the names of our types."""
    context = error.get("ctx", {})
    match error["type"]:
        case "too_short":
            return f"at least {context['min_length']} needed, there are {context['actual_length']}"
        case "too_long":
            return f"at most {context['max_length']} allowed, there are more"
        case _:
            return error["msg"]


def unknown_fields(value: Any, prefix: str = "") -> list[str]:
    """Paths of all fields in a request that no model claims, outermost first."""
    found: list[str] = []
    if isinstance(value, Body):
        found.extend(f"{prefix}{name}" for name in value.model_extra or ())
        for name in type(value).model_fields:
            found.extend(unknown_fields(getattr(value, name), f"{prefix}{name}."))
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            found.extend(unknown_fields(item, f"{prefix}{index}."))
    return found


def refuse_unknown(body: Body) -> None:
    """For native routes. Raises BAD_MESSAGE naming the first unknown field."""
    unknown = unknown_fields(body)
    if unknown:
        raise WireError(ErrorCode.BAD_MESSAGE, f"unknown field {unknown[0]!r}", field=unknown[0])


def unknown_warnings(unknown: Sequence[str]) -> list[str]:
    """One warning a field, for OpenAI routes."""
    warnings = [f"{name}: unknown field, ignored" for name in unknown[:UNKNOWN_NAMED_MAX]]
    if len(unknown) > UNKNOWN_NAMED_MAX:
        warnings.append(f"{len(unknown) - UNKNOWN_NAMED_MAX} more unknown fields, ignored")
    return warnings


def check_json(value: Any, field: str, depth: int = 0) -> None:
    """Free-form JSON that can travel: bounded depth, 64-bit integers, finite numbers. Raises BAD_MESSAGE."""
    if depth > JSON_DEPTH_MAX:
        raise WireError(ErrorCode.BAD_MESSAGE, f"nested deeper than {JSON_DEPTH_MAX}", field=field)
    if isinstance(value, Mapping):
        for key, item in value.items():
            check_json(item, f"{field}.{key}", depth + 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            check_json(item, f"{field}.{index}", depth + 1)
    elif isinstance(value, int) and abs(value) > JSON_INTEGER_MAX:
        raise WireError(ErrorCode.BAD_MESSAGE, "an integer of more than 64 bits", field=field)
    elif isinstance(value, float) and not math.isfinite(value):
        raise WireError(ErrorCode.BAD_MESSAGE, "not a finite number", field=field)
