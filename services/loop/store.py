"""Sessions in JetStream: loaded by folding their log, appended to with optimistic concurrency, cached in memory.

The cache is a copy and may be old; an append that expects an old head fails and changes nothing. Then the session is read
again. An append whose acknowledgement was lost is recognised when it is tried again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Final

from proto.errors import ErrorCode, WireError
from proto.sessions import Record, RecordBody
from proto.subjects import SESSION_LOG
from services.loop.session import Session
from shared.bus import Bus
from shared.errors import SequenceConflict
from shared.log import get_logger

RETRY_S: Final = 0.3

log = get_logger()


class SessionStore:
    """All access of one replica to session logs."""

    def __init__(self, bus: Bus, *, sessions_max: int, tokens_max: int) -> None:
        self._bus = bus
        self._sessions_max, self._tokens_max = sessions_max, tokens_max
        self._cache: OrderedDict[str, Session] = OrderedDict()

    async def load(self, session_id: str, *, refresh: bool) -> Session:
        """The session as of its log; one that does not exist is a Session with nothing in it.

        With `refresh` records that other replicas wrote since are read; without, a cached copy is returned as it is.
        """
        session = self._cache.get(session_id)
        if session is None:
            session = Session()
        elif not refresh:
            self._cache.move_to_end(session_id)
            return session
        await self.refresh(session_id, session)
        return session

    async def refresh(self, session_id: str, session: Session) -> None:
        """Apply what was written since. Several tasks may refresh one session; each record is applied once."""
        for entry in await self._bus.read_log(SESSION_LOG, Record, after=session.head, session_id=session_id):
            if entry.sequence > session.head:
                session.apply(entry.sequence, entry.record)
        if session.opened is not None:
            self._keep(session_id, session)

    async def load_until(self, session_id: str, sequence: int) -> Session:
        """A fold of its own, of the records up to `sequence`: for a fork."""
        session = Session()
        for entry in await self._bus.read_log(SESSION_LOG, Record, session_id=session_id):
            if entry.sequence > sequence:
                break
            session.apply(entry.sequence, entry.record)
        return session

    async def append(self, session_id: str, session: Session, body: RecordBody, *, give_up_at: float) -> int:
        """Append and apply; returns its sequence number. Waits for NATS until `give_up_at` (loop time).

        Raises SequenceConflict if someone else wrote.
        """
        record = Record(body=body)
        loop = asyncio.get_running_loop()
        # Once: a reader of the same session may fold this very record in while its acknowledgement is lost.
        expected = session.head
        while True:
            try:
                sequence = await self._bus.append(SESSION_LOG, record, expected=expected, session_id=session_id)
                break
            except SequenceConflict:
                sequence = await self._own_earlier(session_id, expected, record)
                if sequence:
                    break
                self.forget(session_id)
                raise
            except WireError as away:
                if away.code is not ErrorCode.UNAVAILABLE or loop.time() >= give_up_at:
                    raise
                log.warning("append_waits", session=session_id, error=str(away))
                await asyncio.sleep(RETRY_S)
        # A reader of the same session may have refreshed it meanwhile.
        if sequence > session.head:
            session.apply(sequence, record)
        self._keep(session_id, session)
        return sequence

    async def _own_earlier(self, session_id: str, head: int, record: Record) -> int:
        """Sequence number of this very record if an earlier try had stored it; 0 if someone else's stands there."""
        entries = await self._bus.read_log(SESSION_LOG, Record, after=head, limit=1, session_id=session_id)
        return entries[0].sequence if entries and entries[0].record == record else 0

    def forget(self, session_id: str) -> None:
        """Drop the cached copy; the next load reads the whole log."""
        self._cache.pop(session_id, None)

    def _keep(self, session_id: str, session: Session) -> None:
        self._cache[session_id] = session
        self._cache.move_to_end(session_id)
        while len(self._cache) > 1 and (
            len(self._cache) > self._sessions_max
            or sum(len(kept.tokens) for kept in self._cache.values()) > self._tokens_max
        ):
            self._cache.popitem(last=False)
