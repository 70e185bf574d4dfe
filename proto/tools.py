"""Pure: loop <-> tools."""

from __future__ import annotations

from enum import StrEnum

from proto.chat import ToolSpec
from proto.ids import Id
from proto.message import Message


class ToolOutcome(StrEnum):
    """How a call ended. Everything but OK is still an answer to the model."""

    OK = "ok"
    ERROR = "error"  # ran and failed: exit status, exception
    BAD_CALL = "bad_call"  # no such tool, or arguments that do not fit its schema
    TIMEOUT = "timeout"
    KILLED = "killed"  # memory, processes or CPU bound
    OUTPUT_LIMIT = "output_limit"
    REFUSED = "refused"  # no sandbox, host not on the list
    UNKNOWN = "unknown"  # interrupted; nobody knows what it did


class RunTool(Message):
    """loop -> tools. `(session, turn, call)` is claimed durably before the tool runs, so it runs at most once."""

    session_id: Id
    turn_id: Id
    request_id: Id
    call_id: Id
    tenant: str
    name: str
    arguments: str
    deadline_at: float


class ToolResult(Message):
    """tools -> loop. `content` is bounded text for the model; `dropped_bytes` counts what did not fit."""

    call_id: str
    name: str
    outcome: ToolOutcome
    content: str
    dropped_bytes: int = 0
    seconds: float
    sandbox: str = ""


class ListTools(Message):
    """anyone -> tools."""


class ToolList(Message):
    """tools -> anyone: what can be run here, in canonical order, and by which sandbox rung."""

    tools: tuple[ToolSpec, ...]
    sandbox: str
