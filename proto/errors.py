"""Pure: the only errors that cross the wire, and the exception that carries one inside a process."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict


class ErrorCode(StrEnum):
    """Why a request was refused or failed. The gateway maps each to one HTTP status (services/gateway/http_errors.py)."""

    # The caller can mend these.
    BAD_MESSAGE = "bad_message"  # not decodable, or a field is wrong
    BAD_REQUEST = "bad_request"  # decodable, but makes no sense
    NOT_FOUND = "not_found"
    MODEL_NOT_FOUND = "model_not_found"
    CONTEXT_LENGTH = "context_length_exceeded"
    TOO_LARGE = "too_large"
    BAD_GRAMMAR = "bad_grammar"
    CONFLICT = "conflict"  # another turn of the session runs, or the id is taken
    UNAUTHORIZED = "unauthorized"
    # Ask again later.
    OVERLOADED = "overloaded"
    UNAVAILABLE = "unavailable"  # nobody serves this subject at the moment
    DEADLINE = "deadline_exceeded"
    CANCELLED = "cancelled"
    DRAINING = "draining"
    # Ours.
    LOST = "lost"  # the worker died; the caller may retry under a new attempt
    INTERNAL = "internal"


RETRYABLE = frozenset({ErrorCode.OVERLOADED, ErrorCode.UNAVAILABLE, ErrorCode.DRAINING, ErrorCode.LOST})


class ErrorReply(BaseModel):
    """An error as it travels: in a reply, or as the terminal event of a turn or generation."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    code: ErrorCode
    message: str
    # The request field at fault, in the caller's own naming ("messages.0.content"), where there is one.
    field: str | None = None
    retry_after_s: float | None = None


class WireError(Exception):
    """An operating error that may cross the wire; `reply` is what the other side will read."""

    def __init__(
        self, code: ErrorCode, message: str, *, field: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(f"{code}: {message}" + (f" (field {field})" if field else ""))
        self.reply = ErrorReply(code=code, message=message, field=field, retry_after_s=retry_after_s)

    @classmethod
    def from_reply(cls, reply: ErrorReply) -> WireError:
        """The exception for an error that came over the wire."""
        return cls(reply.code, reply.message, field=reply.field, retry_after_s=reply.retry_after_s)

    @property
    def code(self) -> ErrorCode:
        """Short for `reply.code`."""
        return self.reply.code
