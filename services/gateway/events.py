"""Pure: one reader of one turn's events. Every token once, no gap, exactly one terminal event.

Events come by two ways. *Live*, as the loop says them: fast, but lost while NATS is away, or when this client is slow.
From the *trail*, where NATS keeps what was said: complete and in order, but a moment behind. A turn that is resumed after
a crash says things again, cut differently. So the reader keeps the place of what it has delivered last, and

    at or before that place     dropped
    a text over that place      trimmed, token by token
    a text beyond the next one  a hole: not delivered before the trail has filled it

A reader is *settled* while each live event is known to follow what was delivered. It starts settled when it listened
before the turn was asked for. It is unsettled by a hole, a lost connection or an overflow, and by joining a turn that runs.
Then live events are held until the trail was read up to the first of them, which proves that nothing lies between.

The terminal event is delivered wherever its place is: nothing follows it. If by its receipt tokens are missing before it (live
events were lost and no later one showed the hole), the trail is read first. Its id in a stream ends in `END_PART`, so that
a client that comes back with it is known to have everything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from proto.errors import ErrorCode, ErrorReply
from proto.turns import BEFORE_EVERYTHING, Place, TextDelta, ToolCalled, TurnDone, TurnEvent, TurnFailed

TRAIL_PAGE: Final = 256
# The trail lags the live events by about a millisecond; each further try waits twice as long.
TRAIL_LAG_S: Final = 0.02
TRAIL_LAG_S_MAX: Final = 1.0
# Held events that the trail does not show are believed after this time, if they continue what was delivered.
UNPROVEN_S_MAX: Final = 2.0
# A hole that the trail does not fill in this time is a loss, and said to be one.
HOLE_S_MAX: Final = 10.0
assert HOLE_S_MAX > UNPROVEN_S_MAX > TRAIL_LAG_S_MAX
# A silent turn's trail is looked at now and then, in case its last event was lost; at most this often, and this seldom.
SILENCE_S: Final = 5.0
SILENCE_S_MAX: Final = 20.0
# The last part that a place may have; see Place.parse.
END_PART: Final = 999_999_999
# What an event costs in memory beside its text.
EVENT_COST_BYTES: Final = 512
TOKEN_COST_BYTES: Final = 100


@dataclass(frozen=True, slots=True)
class Deliver:
    """Give these to the client, in this order."""

    events: tuple[TurnEvent, ...]


@dataclass(frozen=True, slots=True)
class ReadTrail:
    """Read up to `limit` entries after sequence number `after`, and answer with `trail_read` or `trail_failed`."""

    after: int
    limit: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do before `until` (monotonic seconds), unless something is heard."""

    until: float


@dataclass(frozen=True, slots=True)
class Ended:
    """The terminal event was delivered. `by_loop` is False if the reader made it up itself: the turn may still run."""

    by_loop: bool


Instruction = Deliver | ReadTrail | Wait | Ended


def cost_of(event: TurnEvent) -> int:
    """Bytes of memory that an event takes, about."""
    if isinstance(event.body, TextDelta):
        return EVENT_COST_BYTES + TOKEN_COST_BYTES * len(event.body.token_ids) + 4 * sum(map(len, event.body.pieces))
    return EVENT_COST_BYTES + 4 * len(repr(event.body))


def stream_id(event: TurnEvent) -> str:
    """The event's id in a stream."""
    return str(Place(event.step, event.offset, END_PART) if event.is_terminal else event.place)


class TurnReader:
    """Owns what one client has been given of one turn and what waits for it. `now` is monotonic seconds."""

    def __init__(
        self,
        turn_id: str,
        session_id: str,
        *,
        now: float,
        deadline_at: float,
        held_bytes_max: int,
        after: Place | None = None,
    ) -> None:
        """`after` None: the reader listened before the turn was asked for. Else it joins, and goes on behind that place."""
        self.turn_id, self.session_id = turn_id, session_id
        self.deadline_at = deadline_at
        # Place of the last thing delivered.
        self.seen = BEFORE_EVERYTHING if after is None else after
        # Live events that wait, without a gap between them, and their cost.
        self._held: deque[TurnEvent] = deque()
        self._held_bytes = 0
        self._held_bytes_max = held_bytes_max
        # From the trail, next to be delivered.
        self._ready: list[TurnEvent] = []
        self._settled = after is None
        # The held events were dropped; live ones are not taken before the next read of the trail begins.
        self._overflowed = False
        self._ended: Ended | None = None
        # The trail: last sequence number read, whether this pass over it met a hole, when the next read is due, whether one
        # is under way (and void, as the trail it reads is gone), and the lag so far.
        self._trail_after = 0
        self._hole_met = False
        self._read_at = now
        self._reading = False
        self._read_is_void = False
        self._lag_s = TRAIL_LAG_S
        self._silence_s = SILENCE_S
        # When a read of the trail first left held events unexplained; starts again with each event that it brings.
        self._unproven_since: float | None = None
        self._is_lost = False
        self._end_was_doubted = False
        self._heard_at = now
        if after is not None and after.part == END_PART:
            self._ended = Ended(by_loop=True)

    # -- what happens

    def hear(self, event: TurnEvent, now: float) -> None:
        """A live event arrived."""
        if self._ended is not None or event.turn_id != self.turn_id:
            return
        self._heard_at = now
        self._silence_s = SILENCE_S
        self.session_id = event.session_id
        if self._overflowed:
            return
        self._hold(event)
        if self._held_bytes > self._held_bytes_max:
            self._overflow()
            self._unsettle(now)
        elif not self._settled and len(self._held) == 1:
            # The first one to be explained by the trail, which needs a moment to have it.
            self._lag_s = TRAIL_LAG_S
            self._read_at = min(self._read_at, now + self._lag_s)

    def disturbed(self, now: float) -> None:
        """The connection was lost and is back: live events may be missing, and the trail may have been made anew."""
        if self._settled:
            self._take_held(now)
        self._drop_held()
        if self._ended is None:
            self._read_is_void = self._reading
            self._trail_after = 0
            self._unsettle(now)

    def trail_read(self, entries: Sequence[tuple[int, TurnEvent]], now: float) -> None:
        """Entries of the trail as asked for, oldest first, with their sequence numbers. A short page is the last one."""
        assert self._reading
        self._reading = False
        if self._ended is not None:
            return
        seen_before = self.seen
        for sequence, event in entries:
            self._trail_after = sequence
            self.session_id = event.session_id
            if self._is_beyond(event):
                self._hole_met = True
            else:
                self._take(event)
        if self.seen != seen_before:
            self._unproven_since = None
        if self._read_is_void:
            self._trail_after, self._read_is_void, self._read_at = 0, False, now
        elif len(entries) == TRAIL_PAGE:
            self._read_at = now
        else:
            self._settle(now)

    def trail_failed(self, now: float) -> None:
        """The trail could not be read; NATS is away or slow."""
        assert self._reading
        self._reading = self._read_is_void = False
        self._read_at = now + TRAIL_LAG_S_MAX

    # -- what to do

    def next(self, now: float) -> Instruction:
        """The next thing to do. Mutates: what it says to deliver counts as delivered."""
        if self._settled:
            self._take_held(now)
        if self._ready:
            events, self._ready = tuple(self._ready), []
            return Deliver(events)
        if self._ended is not None:
            return self._ended
        if now >= self.deadline_at:
            return Deliver((self._give_up(ErrorCode.DEADLINE, "the turn's deadline has passed without an end"),))
        if self._reading:
            return Wait(self.deadline_at)
        if self._is_lost:
            return Deliver(
                (
                    self._give_up(
                        ErrorCode.LOST, "a part of this stream is lost; GET the session to read the whole turn"
                    ),
                )
            )
        if now >= self._read_due():
            return self._begin_read(now)
        return Wait(min(self.deadline_at, self._read_due()))

    @property
    def is_waiting_for_proof(self) -> bool:
        """Live events are held until the trail explains them."""
        return not self._settled

    def _read_due(self) -> float:
        return self._heard_at + self._silence_s if self._settled else self._read_at

    def _begin_read(self, now: float) -> ReadTrail:
        if self._settled:
            # Only looking: what is delivered stays right whatever the trail says.
            self._heard_at = now
            self._silence_s = min(self._silence_s * 1.5, SILENCE_S_MAX)
        self._overflowed = False
        self._reading = True
        return ReadTrail(self._trail_after, TRAIL_PAGE)

    # -- inside

    def _hold(self, event: TurnEvent) -> None:
        self._held.append(event)
        self._held_bytes += cost_of(event)

    def _overflow(self) -> None:
        self._drop_held()
        self._overflowed = True
        self._settled = False

    def _drop_held(self) -> None:
        self._held.clear()
        self._held_bytes = 0

    def _unsettle(self, now: float) -> None:
        self._settled = False
        self._read_at = now
        self._lag_s = TRAIL_LAG_S
        self._unproven_since = None

    def _settle(self, now: float) -> None:
        """The trail's end was reached: decide whether live events follow from here."""
        if self._settled or self._ended is not None:
            return
        if self._hole_met:
            # What fills it may have been said later: begin again.
            self._trail_after, self._hole_met = 0, False
        elif not self._held and not self._overflowed:
            self._unproven_since = None
            self._read_at = now + self._silence_s
            self._silence_s = min(self._silence_s * 1.5, SILENCE_S_MAX)
            return
        if self._unproven_since is None:
            self._unproven_since = now
        waited_s = now - self._unproven_since
        if self._held and self._is_explained(self._held[0], waited_s):
            self._settled = True
            self._unproven_since = None
            self._take_held(now)
            return
        self._is_lost = waited_s >= HOLE_S_MAX
        self._read_at = now + self._lag_s
        self._lag_s = min(self._lag_s * 2, TRAIL_LAG_S_MAX)

    def _is_explained(self, first: TurnEvent, waited_s: float) -> bool:
        """Whether nothing can lie between what was delivered and the first held event."""
        if first.is_terminal:
            # Its place proves nothing. The trail will show it, with everything before it.
            return waited_s >= UNPROVEN_S_MAX
        return first.place <= self.seen or (waited_s >= UNPROVEN_S_MAX and not self._is_beyond(first))

    def _take_held(self, now: float) -> None:
        while self._held and self._ended is None:
            if self._is_beyond(self._held[0]) or self._is_doubtful_end(self._held[0]):
                self._unsettle(now)
                return
            event = self._held.popleft()
            self._held_bytes -= cost_of(event)
            self._take(event)

    def _is_beyond(self, event: TurnEvent) -> bool:
        """Whether tokens are missing between what was delivered and this event."""
        known = self.seen.offset if event.step == self.seen.step else 0
        if event.step < self.seen.step:
            return False
        match event.body:
            case TextDelta():
                return event.offset - len(event.body.token_ids) > known
            case ToolCalled():
                return event.offset > known
            case _:
                return False

    def _is_doubtful_end(self, event: TurnEvent) -> bool:
        """The end came, and by its receipt tokens are missing: the trail is asked, once."""
        if self._end_was_doubted or not isinstance(event.body, TurnDone) or not event.body.receipt.steps:
            return False
        last = event.body.receipt.steps[-1]
        known = self.seen.offset if self.seen.step == last.step else 0
        self._end_was_doubted = self.seen.step <= last.step and known < last.generated_tokens
        return self._end_was_doubted

    def _take(self, event: TurnEvent) -> None:
        """Make it ready to be delivered: whole, trimmed, or not at all."""
        if self._ended is not None:
            return
        if event.is_terminal:
            self._ready.append(event)
            self._ended = Ended(by_loop=True)
            self._drop_held()
            return
        if event.place <= self.seen:
            return
        fresh = self._trimmed(event)
        if fresh is not None:
            self._ready.append(fresh)
        self.seen = event.place

    def _trimmed(self, event: TurnEvent) -> TurnEvent | None:
        body = event.body
        if not isinstance(body, TextDelta) or event.step != self.seen.step:
            return event
        surplus = self.seen.offset - (event.offset - len(body.token_ids))
        assert surplus >= 0, "a hole is held back before it gets here"
        if surplus == 0:
            return event
        if surplus >= len(body.pieces):
            return None
        rest = TextDelta(
            token_ids=body.token_ids[surplus:],
            pieces=body.pieces[surplus:],
            logprobs=body.logprobs[surplus:] if body.logprobs is not None else None,
        )
        return event.model_copy(update={"body": rest})

    def _give_up(self, code: ErrorCode, message: str) -> TurnEvent:
        self._ended = Ended(by_loop=False)
        self._drop_held()
        return TurnEvent(
            turn_id=self.turn_id,
            session_id=self.session_id,
            step=max(self.seen.step, 0),
            offset=self.seen.offset,
            part=self.seen.part,
            body=TurnFailed(error=ErrorReply(code=code, message=message)),
        )

    def check_integrity(self) -> None:
        """Assert what must hold between events."""
        assert self._held_bytes == sum(map(cost_of, self._held))
        assert not (self._overflowed and self._held), "an overflow drops what was held"
        assert not (self._overflowed and self._settled), "after an overflow the trail is read"
        assert self._ended is None or not self._held, "nothing follows the end"
        assert self._unproven_since is None or not self._settled
