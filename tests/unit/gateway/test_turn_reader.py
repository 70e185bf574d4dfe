"""One client's way through one turn, whatever happens to the events on their way: every token once, one end."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest

from proto.chat import FinishReason, ToolCall
from proto.errors import ErrorCode
from proto.receipt import Receipt, StepReceipt, Usage
from proto.turns import BEFORE_EVERYTHING, Place, TextDelta, ToolCalled, TurnBody, TurnDone, TurnEvent, TurnFailed
from proto.turns import TurnStarted as Started
from services.gateway.events import (
    END_PART,
    HOLE_S_MAX,
    TRAIL_PAGE,
    Deliver,
    Ended,
    ReadTrail,
    TurnReader,
    Wait,
    cost_of,
    stream_id,
)

DEADLINE = 600.0
SEEDS = 300


def event(step: int, offset: int, part: int, body: TurnBody) -> TurnEvent:
    return TurnEvent(turn_id="t1", session_id="s1", step=step, offset=offset, part=part, body=body)


def text(first: int, last: int, step: int = 0) -> TurnEvent:
    """Tokens first..last-1 of a step; token n of step s is 1000*s + n."""
    tokens = range(1000 * step + first, 1000 * step + last)
    return event(step, last, 0, TextDelta(token_ids=tuple(tokens), pieces=tuple(f"{token} " for token in tokens)))


STARTED = event(0, 0, 0, Started(model="m", prompt_tokens=1))
DONE = event(9, 0, 0, TurnDone(finish_reason=FinishReason.STOP, usage=Usage(), receipt=Receipt()))


def call(step: int, offset: int, index: int = 0) -> TurnEvent:
    made = ToolCall(call_id=f"c{step}{index}", name="f", arguments="{}")
    return event(step, offset, 2 + index, ToolCalled(index=index, call=made, run_here=True))


def tokens_of(events: Iterable[TurnEvent]) -> list[int]:
    return [token for e in events if isinstance(e.body, TextDelta) for token in e.body.token_ids]


class Drive:
    """A reader with a clock, a trail and everything it delivered."""

    def __init__(self, *, after: Place | None = None, held_bytes_max: int = 1 << 20) -> None:
        self.now = 0.0
        self.trail: list[TurnEvent] = []
        self.is_trail_away = False
        self.reads = 0
        self.delivered: list[TurnEvent] = []
        self.ended: Ended | None = None
        self.reader = TurnReader("t1", "s1", now=0.0, deadline_at=DEADLINE, held_bytes_max=held_bytes_max, after=after)

    def hear(self, *events: TurnEvent) -> Drive:
        for heard in events:
            self.reader.hear(heard, self.now)
            self.reader.check_integrity()
        return self

    def step(self) -> bool:
        """Do one thing. False when there is only waiting left."""
        instruction = self.reader.next(self.now)
        match instruction:
            case Deliver(events):
                assert self.ended is None and events
                self.delivered += events
            case ReadTrail(after, limit):
                self.reads += 1
                if self.is_trail_away:
                    self.reader.trail_failed(self.now)
                else:
                    page = [(n, e) for n, e in enumerate(self.trail, 1) if n > after][:limit]
                    self.reader.trail_read(page, self.now)
            case Ended():
                assert self.ended in (None, instruction)
                self.ended = instruction
                return False
            case Wait(until):
                assert until > self.now
                return False
        self.reader.check_integrity()
        return True

    def settle(self) -> Drive:
        while self.step():
            pass
        return self

    def run(self, seconds: float) -> Drive:
        """Let time pass, doing what is due."""
        until = self.now + seconds
        while True:
            self.settle()
            instruction = self.reader.next(self.now)
            if not isinstance(instruction, Wait) or instruction.until > until:
                self.now = max(self.now, until)
                return self.settle()
            self.now = instruction.until

    @property
    def ids(self) -> list[str]:
        return [stream_id(e) for e in self.delivered]


def test_events_in_order_go_straight_through_without_reading_the_trail() -> None:
    """The ordinary turn: it listened first, and nothing was lost."""
    drive = Drive().hear(STARTED, text(0, 1), text(1, 3), call(0, 3), DONE).settle()
    assert drive.ids == ["0.0.0", "0.1.0", "0.3.0", "0.3.2", f"9.0.{END_PART}"]
    assert drive.ended == Ended(by_loop=True) and drive.reads == 0


def test_the_last_token_lost_on_its_way_is_read_from_the_trail() -> None:
    """No later text shows the hole, but the receipt at the end counts one token more."""
    steps = (StepReceipt(step=0, worker_id="w", prompt_tokens=1, generated_tokens=3),)
    done = event(1, 0, 0, TurnDone(finish_reason=FinishReason.STOP, usage=Usage(), receipt=Receipt(steps=steps)))
    drive = Drive().hear(STARTED, text(0, 2), done)
    drive.settle()
    assert drive.ended is None, "the trail has nothing yet"
    drive.trail = [STARTED, text(0, 2), text(2, 3), done]
    drive.run(1.0)
    assert tokens_of(drive.delivered) == [0, 1, 2] and drive.ended == Ended(by_loop=True)


def test_an_end_whose_receipt_counts_more_than_was_shown_comes_in_any_case() -> None:
    """Doubt costs a look at the trail and a bounded wait, never the end."""
    steps = (StepReceipt(step=0, worker_id="w", prompt_tokens=1, generated_tokens=9),)
    done = event(1, 0, 0, TurnDone(finish_reason=FinishReason.STOP, usage=Usage(), receipt=Receipt(steps=steps)))
    drive = Drive().hear(STARTED, text(0, 2), done).run(10.0)
    assert drive.ended == Ended(by_loop=True)


def test_a_resumed_loop_says_it_again_in_other_cuts() -> None:
    """Duplicates are dropped, overlaps trimmed by token, and the second end is not an end."""
    drive = Drive().hear(STARTED, text(0, 1), text(1, 3), STARTED, text(0, 5), text(4, 6), DONE, DONE).settle()
    assert tokens_of(drive.delivered) == list(range(6))
    assert [e.is_terminal for e in drive.delivered].count(True) == 1
    pieces = [p for e in drive.delivered if isinstance(e.body, TextDelta) for p in e.body.pieces]
    assert pieces == [f"{n} " for n in range(6)], "text is trimmed with its tokens"


def test_a_hole_is_filled_from_the_trail() -> None:
    """NATS dropped one message to this gateway; nothing behind the hole is shown before it is filled."""
    drive = Drive().hear(STARTED, text(0, 2), text(4, 6)).settle()
    assert tokens_of(drive.delivered) == [0, 1]
    drive.trail = [STARTED, text(0, 2), text(2, 4), text(4, 6)]
    drive.run(1.0)
    assert tokens_of(drive.delivered) == list(range(6))
    drive.hear(text(6, 7), DONE).settle()
    assert drive.ids[-2:] == ["0.7.0", f"9.0.{END_PART}"]


def test_a_hole_that_nobody_fills_is_said_to_be_a_loss() -> None:
    """The trail is gone too: the stream ends with `lost`, and not with tokens missing in the middle."""
    drive = Drive().hear(text(0, 2), text(4, 6)).run(HOLE_S_MAX + 3)
    assert tokens_of(drive.delivered) == [0, 1]
    last = drive.delivered[-1].body
    assert isinstance(last, TurnFailed) and last.error.code is ErrorCode.LOST
    assert drive.ended == Ended(by_loop=False)


def test_a_call_behind_missing_text_waits_for_it() -> None:
    """A call's place says how many tokens its step has."""
    drive = Drive().hear(text(0, 1), call(0, 3)).settle()
    assert drive.ids == ["0.1.0"]
    drive.trail = [text(0, 1), text(1, 3), call(0, 3)]
    assert drive.run(1.0).ids == ["0.1.0", "0.3.0", "0.3.2"]


def test_a_slow_client_costs_bounded_memory() -> None:
    """It takes nothing while a thousand events come; what did not fit is read back from the trail."""
    drive = Drive(held_bytes_max=20_000)
    said = [text(n, n + 1) for n in range(1_000)]
    drive.trail = [*said, DONE]
    for heard in said:
        drive.hear(heard)
        assert drive.reader._held_bytes <= 20_000 + cost_of(heard)
    drive.hear(DONE).run(5.0)
    assert tokens_of(drive.delivered) == list(range(1_000)) and drive.ended == Ended(by_loop=True)


@pytest.mark.parametrize("last", [0, 2, 3, 5])
def test_a_client_comes_back_with_its_last_event_id(last: int) -> None:
    """It gets exactly what it lacks, also when the trail is cut elsewhere."""
    drive = Drive(after=Place(0, last, 0) if last else BEFORE_EVERYTHING)
    drive.trail = [STARTED, text(0, 4), text(4, 5), DONE]
    drive.run(1.0)
    assert tokens_of(drive.delivered) == list(range(last, 5)) and drive.ended == Ended(by_loop=True)


def test_a_client_that_has_the_end_gets_nothing() -> None:
    assert Drive(after=Place(9, 0, END_PART)).settle().ended == Ended(by_loop=True)


def test_joining_a_turn_that_runs() -> None:
    """Live events are held until the trail explains them; the order is never mixed."""
    drive = Drive(after=BEFORE_EVERYTHING).hear(text(3, 4)).settle()
    drive.trail = [STARTED, text(0, 2)]
    drive.run(0.02)
    drive.trail += [text(2, 3), text(3, 4)]
    drive.run(1.0)
    assert tokens_of(drive.delivered) == [0, 1, 2, 3]
    assert not drive.reader.is_waiting_for_proof
    assert tokens_of(drive.hear(text(4, 5)).settle().delivered)[-1] == 4


def test_the_end_was_lost_and_is_found_on_the_trail() -> None:
    """Nothing is heard for a while: the reader looks."""
    drive = Drive().hear(STARTED, text(0, 1))
    drive.trail = [STARTED, text(0, 1), DONE]
    assert drive.run(6.0).ended == Ended(by_loop=True)


def test_nats_restarts_with_an_empty_trail() -> None:
    """The loop says everything again after it; what was delivered before stays delivered once."""
    drive = Drive().hear(STARTED, text(0, 3)).settle()
    drive.is_trail_away = True
    drive.reader.disturbed(drive.now)
    drive.run(2.0)
    drive.is_trail_away = False
    drive.reader.disturbed(drive.now)
    again = [STARTED, text(0, 2), text(2, 4), DONE]
    drive.trail = list(again)
    drive.hear(*again).run(3.0)
    assert tokens_of(drive.delivered) == [0, 1, 2, 3] and drive.ended == Ended(by_loop=True)


def test_a_turn_that_never_ends_is_given_up_at_its_deadline() -> None:
    """Every loop is dead. The client is told; the turn may still run."""
    drive = Drive().hear(STARTED).run(DEADLINE + 1)
    last = drive.delivered[-1].body
    assert isinstance(last, TurnFailed) and last.error.code is ErrorCode.DEADLINE
    assert drive.ended == Ended(by_loop=False)


def test_a_long_trail_is_read_page_by_page() -> None:
    drive = Drive(after=BEFORE_EVERYTHING)
    drive.trail = [text(n, n + 1) for n in range(3 * TRAIL_PAGE)] + [DONE]
    assert tokens_of(drive.run(1.0).delivered) == list(range(3 * TRAIL_PAGE))


def cuts(rng: random.Random, steps: Sequence[int]) -> list[TurnEvent]:
    """One life's way to say the whole turn."""
    said = [STARTED]
    for number, length in enumerate(steps):
        at = 0
        while at < length:
            to = min(length, at + rng.randint(1, 4))
            said.append(text(at, to, number))
            at = to
        if number < len(steps) - 1:
            said.append(call(number, length))
    return [*said, DONE]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_any_cutting_loss_and_repetition_delivers_each_token_once(seed: int) -> None:
    """Loops die and say things again in other cuts, messages are lost, repeated and late, NATS comes and goes, the client
    is slow. The trail has everything in the end. The client has each token once, in order, and one end."""
    rng = random.Random(seed)
    steps = [rng.randint(1, 12) for _ in range(rng.randint(1, 3))]
    drive = Drive(after=rng.choice([None, BEFORE_EVERYTHING]), held_bytes_max=rng.choice([1 << 20, 3_000]))
    lives = [cuts(rng, steps) for _ in range(rng.randint(1, 3))]
    script = [e for life in lives[:-1] for e in life[: rng.randint(1, len(life) - 1)]] + lives[-1]
    late: list[TurnEvent] = []
    for said, follower in zip(script, [*script[1:], DONE], strict=True):
        drive.trail.append(said)
        chance = rng.random()
        if chance < 0.6:
            drive.hear(said)
        elif chance < 0.7:
            drive.hear(said, said)
        elif isinstance(follower.body, TextDelta) and follower.step == said.step:
            # Lost without a word, or late: the next one shows the hole.
            late.append(said)
        else:
            drive.reader.disturbed(drive.now)
        if late and rng.random() < 0.3:
            drive.hear(late.pop(rng.randrange(len(late))))
        drive.is_trail_away = rng.random() < 0.2
        if rng.random() < 0.6:
            drive.run(rng.choice([0.0, 0.01, 0.5]))
    drive.is_trail_away = False
    drive.hear(*late).run(60.0)
    expected = [1000 * number + n for number, length in enumerate(steps) for n in range(length)]
    assert tokens_of(drive.delivered) == expected, f"seed {seed}"
    assert [e.is_terminal for e in drive.delivered].count(True) == 1 and drive.delivered[-1].is_terminal
    calls = [e.body.call.call_id for e in drive.delivered if isinstance(e.body, ToolCalled)]
    assert calls == [f"c{number}0" for number in range(len(steps) - 1)]
