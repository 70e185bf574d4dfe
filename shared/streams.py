"""Pure: the JetStream streams and what bounds each. The bus creates them; whoever starts first does so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from proto.subjects import DOCUMENTS, SESSION_LOG, START_TURN, TURN_EVENT, Subject
from shared.limits import MIB, TURN_DEADLINE_S_MAX, TURN_QUEUE_COUNT_MAX


@dataclass(frozen=True, slots=True)
class Stream:
    """One stream. `work` gives each message to one consumer and removes it when acknowledged."""

    name: str
    subject: Subject
    work: bool
    in_memory: bool
    max_age_s: float
    max_bytes: int
    max_messages: int
    # When full: refuse the new message (True) or forget the oldest (False).
    refuses_when_full: bool


DAY_S: Final = 86_400.0

# A turn that nobody took by its latest possible deadline has no reader left.
TURNS = Stream("TURNS", START_TURN, True, False, TURN_DEADLINE_S_MAX, 1024 * MIB, TURN_QUEUE_COUNT_MAX, True)
# Events are replayed to a client that reconnects; the session log stays the truth, so memory and the oldest-first rule do.
TRAILS = Stream("TRAILS", TURN_EVENT, False, True, TURN_DEADLINE_S_MAX, 256 * MIB, 1_000_000, False)
# A session that was idle for a month is forgotten; a full store refuses new turns rather than cutting an old prefix.
SESSIONS = Stream("SESSIONS", SESSION_LOG, False, False, 30 * DAY_S, 8 * 1024 * MIB, 10_000_000, True)
DOCUMENT_LOG = Stream("DOCUMENTS", DOCUMENTS, False, False, 0.0, 8 * 1024 * MIB, 1_000_000, True)

STREAMS: Final = (TURNS, TRAILS, SESSIONS, DOCUMENT_LOG)


def stream_of(subject: Subject) -> Stream:
    """The stream that keeps this subject. Raises KeyError for one that is not kept."""
    for stream in STREAMS:
        if stream.subject is subject:
            return stream
    raise KeyError(subject.name)
