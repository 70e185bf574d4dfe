"""Pure: every NATS subject once: its shape, who says it, who hears it, message and reply. docs/wire.md is made from it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from pydantic import BaseModel

from proto.errors import ErrorReply
from proto.fleet import FleetPing, Heartbeat
from proto.generate import (
    Assignment,
    AssignReply,
    CancelGenerate,
    Generate,
    GenerateAccepted,
    GenerateEvent,
    Pull,
    RouterHello,
    WorkDone,
)
from proto.ids import ID_REGEX
from proto.kv import KvRejected, KvTouched
from proto.residency import ResidencyDelta, ResidencySnapshot, SnapshotRequest
from proto.retrieval import DocumentOp, Passages, Search
from proto.sessions import CreateSession, GetSession, Record, SessionInfo
from proto.tools import ListTools, RunTool, ToolList, ToolResult
from proto.turns import CancelTurn, StartTurn, TurnEvent


class Plane(StrEnum):
    """How a subject is carried."""

    PUBLISH = "publish"  # fire and forget, all listeners
    REQUEST = "request"  # one answer, from one member of the queue group
    WORK = "work queue"  # JetStream, fsynced, acknowledged when done
    LOG = "log"  # JetStream, fsynced, optimistic concurrency by subject
    TRAIL = "trail"  # core NATS, and kept in a memory stream so that a reader can catch up


@dataclass(frozen=True, slots=True)
class Subject:
    """One row of the table. `template` has `{names}` for the parts that vary."""

    name: str
    template: str
    plane: Plane
    says: str
    hears: str
    message: type[BaseModel]
    reply: type[BaseModel] | None
    about: str

    def at(self, **parts: str) -> str:
        """The subject with its parts filled in. Raises ValueError on a part that is no plain id."""
        for name, part in parts.items():
            if not ID_REGEX.match(part):
                raise ValueError(f"{name}={part!r} cannot be part of a subject")
        return self.template.format(**parts)

    @property
    def wildcard(self) -> str:
        """The subject that hears all of them."""
        return re.sub(r"\{[a-z_]+\}", "*", self.template)


START_TURN = Subject(
    "START_TURN", "roost.turn.start", Plane.WORK, "gateway", "loop", StartTurn, None, "run a turn; full is a refusal"
)
TURN_EVENT = Subject(
    "TURN_EVENT",
    "roost.turn.event.{turn_id}",
    Plane.TRAIL,
    "loop",
    "gateway",
    TurnEvent,
    None,
    "what a turn does, in order",
)
CANCEL_TURN = Subject(
    "CANCEL_TURN",
    "roost.turn.cancel",
    Plane.PUBLISH,
    "gateway",
    "loop",
    CancelTurn,
    None,
    "stop a turn, whoever runs it",
)
SESSION_LOG = Subject(
    "SESSION_LOG", "roost.session.log.{session_id}", Plane.LOG, "loop", "loop", Record, None, "a session's records"
)
CREATE_SESSION = Subject(
    "CREATE_SESSION",
    "roost.session.create",
    Plane.REQUEST,
    "gateway",
    "loop",
    CreateSession,
    SessionInfo,
    "open a session",
)
GET_SESSION = Subject(
    "GET_SESSION", "roost.session.get", Plane.REQUEST, "gateway", "loop", GetSession, SessionInfo, "describe a session"
)
GENERATE = Subject(
    "GENERATE",
    "roost.router.generate",
    Plane.REQUEST,
    "loop",
    "router",
    Generate,
    GenerateAccepted,
    "queue a generation",
)
PULL = Subject("PULL", "roost.router.pull", Plane.PUBLISH, "prefill, decode", "router", Pull, None, "I have room")
WORK_DONE = Subject(
    "WORK_DONE", "roost.router.done", Plane.PUBLISH, "prefill, decode", "router", WorkDone, None, "an assignment ended"
)
ROUTER_HELLO = Subject(
    "ROUTER_HELLO",
    "roost.router.hello",
    Plane.PUBLISH,
    "router",
    "prefill, decode, kvstore, loop",
    RouterHello,
    None,
    "a new router life: pull again",
)
ASSIGN = Subject(
    "ASSIGN",
    "roost.worker.assign.{worker_id}",
    Plane.REQUEST,
    "router",
    "prefill, decode",
    Assignment,
    AssignReply,
    "do this work",
)
GENERATE_EVENT = Subject(
    "GENERATE_EVENT",
    "roost.generate.event.{loop_id}.{generation_id}",
    Plane.PUBLISH,
    "router, prefill, decode",
    "loop",
    GenerateEvent,
    None,
    "tokens and signs of life, straight to the loop that asked",
)
CANCEL_GENERATE = Subject(
    "CANCEL_GENERATE",
    "roost.generate.cancel",
    Plane.PUBLISH,
    "loop, router",
    "router, prefill, decode",
    CancelGenerate,
    None,
    "stop a generation up to an attempt",
)
RESIDENCY = Subject(
    "RESIDENCY",
    "roost.residency.delta",
    Plane.PUBLISH,
    "prefill, decode, kvstore",
    "router",
    ResidencyDelta,
    None,
    "blocks that came and went",
)
SNAPSHOT = Subject(
    "SNAPSHOT",
    "roost.residency.snapshot.{holder_id}",
    Plane.REQUEST,
    "router",
    "prefill, decode, kvstore",
    SnapshotRequest,
    ResidencySnapshot,
    "all blocks of a holder, page by page",
)
KV_TOUCHED = Subject(
    "KV_TOUCHED",
    "roost.kv.touched",
    Plane.PUBLISH,
    "prefill, decode",
    "kvstore",
    KvTouched,
    None,
    "blocks read in place",
)
KV_REJECTED = Subject(
    "KV_REJECTED",
    "roost.kv.rejected",
    Plane.PUBLISH,
    "prefill, decode",
    "kvstore",
    KvRejected,
    None,
    "a frame failed a check",
)
RUN_TOOL = Subject(
    "RUN_TOOL", "roost.tools.run", Plane.REQUEST, "loop", "tools", RunTool, ToolResult, "run one call, at most once"
)
LIST_TOOLS = Subject(
    "LIST_TOOLS", "roost.tools.list", Plane.REQUEST, "loop, gateway", "tools", ListTools, ToolList, "what can be run"
)
DOCUMENTS = Subject(
    "DOCUMENTS",
    "roost.documents.op",
    Plane.LOG,
    "gateway",
    "retrieval",
    DocumentOp,
    None,
    "documents, in order, durable",
)
SEARCH = Subject(
    "SEARCH",
    "roost.retrieval.search",
    Plane.REQUEST,
    "loop, tools",
    "retrieval",
    Search,
    Passages,
    "passages for a question",
)
HEARTBEAT = Subject(
    "HEARTBEAT",
    "roost.fleet.heartbeat.{service}",
    Plane.PUBLISH,
    "every service",
    "who needs them",
    Heartbeat,
    None,
    "alive, how well, and the card of what it serves or holds",
)
FLEET_PING = Subject(
    "FLEET_PING",
    "roost.fleet.ping",
    Plane.PUBLISH,
    "console, gateway",
    "every service",
    FleetPing,
    None,
    "say your heartbeat now",
)

SUBJECTS: tuple[Subject, ...] = (
    START_TURN, TURN_EVENT, CANCEL_TURN, SESSION_LOG, CREATE_SESSION, GET_SESSION, GENERATE, PULL, WORK_DONE, ROUTER_HELLO,
    ASSIGN, GENERATE_EVENT, CANCEL_GENERATE, RESIDENCY, SNAPSHOT, KV_TOUCHED, KV_REJECTED, RUN_TOOL, LIST_TOOLS, DOCUMENTS,
    SEARCH, HEARTBEAT, FLEET_PING,
)  # fmt: skip

# NATS headers that go with every message where the sender knows them.
HEADER_ERROR = "Roost-Error"  # set on a reply that is an ErrorReply
ERROR_MESSAGE = ErrorReply


@dataclass(frozen=True, slots=True)
class Bucket:
    """A JetStream key-value bucket. `ttl_s` 0 keeps entries until they are deleted."""

    name: str
    says: str
    hears: str
    ttl_s: float
    in_memory: bool
    # Reserved in the server at creation; full is a refusal.
    max_bytes: int
    about: str


LEASES = Bucket(
    "roost_leases",
    "router",
    "router",
    3.0,
    True,
    1 << 20,
    "router.active -> who is the active replica; gone when not renewed",
)
DIGESTS = Bucket(
    "roost_digests",
    "loop",
    "loop",
    7 * 86_400.0,
    False,
    1 << 30,
    "digest of a message list -> session and record it was logged as",
)
TOOL_CLAIMS = Bucket(
    "roost_tool_claims",
    "tools",
    "tools",
    86_400.0,
    False,
    1 << 28,
    "session.turn.call -> claim or result; a call runs at most once",
)
BUCKETS: tuple[Bucket, ...] = (LEASES, DIGESTS, TOOL_CLAIMS)
