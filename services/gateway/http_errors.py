"""Pure: one table from every ErrorCode to its HTTP answer, in OpenAI's error envelope.

The same envelope is used on all routes, in answers and in streams:

    {"error": {"message": ..., "type": ..., "param": <the field at fault or null>, "code": ...}}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from proto.errors import RETRYABLE, ErrorCode, ErrorReply


class HttpError(NamedTuple):
    """How one error code is said over HTTP."""

    status: int
    type: str
    code: str


HTTP_ERRORS: Final[Mapping[ErrorCode, HttpError]] = {
    ErrorCode.BAD_MESSAGE: HttpError(400, "invalid_request_error", "invalid_request"),
    ErrorCode.BAD_REQUEST: HttpError(400, "invalid_request_error", "bad_request"),
    ErrorCode.NOT_FOUND: HttpError(404, "invalid_request_error", "not_found"),
    ErrorCode.MODEL_NOT_FOUND: HttpError(404, "invalid_request_error", "model_not_found"),
    ErrorCode.CONTEXT_LENGTH: HttpError(400, "invalid_request_error", "context_length_exceeded"),
    ErrorCode.TOO_LARGE: HttpError(413, "invalid_request_error", "request_too_large"),
    ErrorCode.BAD_GRAMMAR: HttpError(400, "invalid_request_error", "bad_grammar"),
    ErrorCode.CONFLICT: HttpError(409, "conflict_error", "conflict"),
    ErrorCode.UNAUTHORIZED: HttpError(401, "authentication_error", "invalid_api_key"),
    ErrorCode.OVERLOADED: HttpError(429, "rate_limit_error", "overloaded"),
    ErrorCode.UNAVAILABLE: HttpError(503, "server_error", "unavailable"),
    ErrorCode.DEADLINE: HttpError(504, "timeout_error", "deadline_exceeded"),
    # The client has usually gone by then; the number is the one that proxies log for it.
    ErrorCode.CANCELLED: HttpError(499, "cancelled_error", "cancelled"),
    ErrorCode.DRAINING: HttpError(503, "server_error", "draining"),
    ErrorCode.LOST: HttpError(502, "server_error", "lost"),
    ErrorCode.INTERNAL: HttpError(500, "server_error", "internal_error"),
}
assert set(HTTP_ERRORS) == set(ErrorCode), "every error has its HTTP answer"

REASONS: Final[Mapping[int, str]] = {499: "Client Closed Request"}

RETRY_AFTER_S_DEFAULT: Final = 1.0


def envelope(reply: ErrorReply) -> dict[str, Any]:
    """The error as a JSON body."""
    row = HTTP_ERRORS[reply.code]
    return {"error": {"message": reply.message, "type": row.type, "param": reply.field, "code": row.code}}


def status_of(reply: ErrorReply) -> int:
    """The HTTP status of an error that comes before any other answer."""
    return HTTP_ERRORS[reply.code].status


def headers_of(reply: ErrorReply) -> dict[str, str]:
    """`Retry-After` where waiting helps, and a word to clients that would retry by the status alone."""
    headers = {"x-should-retry": "true" if reply.code in RETRYABLE else "false"}
    if reply.code in RETRYABLE:
        wait_s = RETRY_AFTER_S_DEFAULT if reply.retry_after_s is None else reply.retry_after_s
        headers["Retry-After"] = str(max(1, math.ceil(wait_s)))
    if reply.code is ErrorCode.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    return headers
