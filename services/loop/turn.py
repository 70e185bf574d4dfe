"""Pure: one turn of the agent, as a state machine. Events in, instructions out; the shell appends, sends and runs.

    OPENING --> GENERATING <--> WAITING          a retryable failure waits, then a new attempt goes on where it was cut
                    |   ^
                    v   +---------------------+
                RECORDING --> TOOLS --> ANSWERING
                    |                         |
                    +--------> CLOSING <------+
                                  |
                                  v
                                OVER

Every arrow into RECORDING, ANSWERING or CLOSING is an append to the session's log, and calls, results and the end are shown
only when that append came back. Text is shown before its step is recorded; that is sound because a resumed step says the
same tokens again (greedy, or seeded by count), and because tokens found on the trail are taken over as already emitted.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

from proto.chat import FinishReason, Grammar, ToolChoice
from proto.errors import RETRYABLE, ErrorCode, ErrorReply, WireError
from proto.generate import Generated, GenerateEvent, GenerateFailed, TokensOut, Working
from proto.receipt import StepReceipt
from proto.sessions import StepGenerated, ToolsAnswered, TurnClosed
from proto.tools import ToolResult
from proto.turns import TextDelta, TurnStarted
from services.loop.generation import TRIES_MAX, Generation, Target
from services.loop.grammar import call_grammar
from services.loop.session import OpenTurn, Session, finish_of, receipt_of, usage_of
from services.loop.step_text import StepText
from services.loop.trail import Trail, terminal_event
from services.loop.turn_events import (
    Append,
    Appended,
    Began,
    BusRestored,
    Cancelled,
    Confirm,
    Emit,
    Event,
    GiveUpTools,
    Heard,
    Instruction,
    Over,
    Revoke,
    RunTools,
    Submit,
    SubmitFailed,
    Submitted,
    Ticked,
    ToolsReturned,
)

# Attempts of one delivery of a turn; the next delivery starts at its own thousand, so attempts only grow.
ATTEMPTS_PER_DELIVERY = 1_000
assert TRIES_MAX < ATTEMPTS_PER_DELIVERY

RETRY_S = 0.25
# These say that the worker is gone, not that it is busy: go on elsewhere at once.
AT_ONCE = frozenset({ErrorCode.LOST, ErrorCode.DRAINING})


class Phase(Enum):
    """Where a turn stands."""

    OPENING = auto()
    GENERATING = auto()
    WAITING = auto()
    RECORDING = auto()
    TOOLS = auto()
    ANSWERING = auto()
    CLOSING = auto()
    OVER = auto()


class TurnMachine:
    """One turn. Reads the session, which the shell folds; mutated by `handle` only."""

    def __init__(
        self,
        session: Session,
        target: Target,
        *,
        reply_subject: Callable[[str], str],
        make_text: Callable[[str], StepText],
        delivery: int,
    ) -> None:
        assert session.opened is not None and session.turn is not None
        self._session, self._opened, self._turn = session, session.opened, session.turn
        self._target, self._reply_subject, self._make_text = target, reply_subject, make_text
        self._callers_tools = {tool.name for tool in self._opened.tools} - set(self._opened.server_tools)
        self._attempt = delivery * ATTEMPTS_PER_DELIVERY
        self._generation: Generation | None = None
        # Of the step that is generated.
        self._grammar: Grammar | None = None
        self._trail = Trail(self._turn.opened.turn_id, self._opened.session_id)
        self._results: tuple[ToolResult, ...] = ()
        self._cancelled = False
        self._error: ErrorReply | None = None
        self.phase = Phase.OPENING

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event in. After OVER everything is ignored."""
        if self.phase is Phase.OVER:
            return []
        match event:
            case Began():
                return self._begin(event)
            case Heard():
                return self._hear(event.event, event.now)
            case Submitted():
                return self._signed(event.now)
            case SubmitFailed():
                return self._failed(event.error, event.now)
            case Appended():
                return self._appended(event.now)
            case ToolsReturned():
                return self._answer(event)
            case Cancelled():
                return self._cancel(event.reason, event.now)
            case Ticked():
                return self._tick(event.now)
            case BusRestored():
                return [*self._trail.again()]

    # -- beginning, or going on after a crash

    def _begin(self, event: Began) -> list[Instruction]:
        assert self.phase is Phase.OPENING
        steps = self._turn.steps
        out: list[Instruction] = []
        if not steps:
            out.append(
                self._trail.emit(
                    0, 0, 0, TurnStarted(model=self._opened.model, prompt_tokens=len(self._session.tokens))
                )
            )
        for step in steps:
            out.extend(self._show(step))
        if steps and (self._turn.awaits_tools or not steps[-1].calls):
            return out + self._after_step(event.now)
        return out + self._generate(event.now, event.seen)

    def _show(self, step: StepGenerated) -> list[Instruction]:
        """Show a recorded step, as it was shown or would have been."""
        text = self._make_text(f"{self._turn.opened.turn_id}-{step.step}")
        pieces = text.feed(step.tokens).pieces
        held = text.flush()
        offset = len(step.tokens)
        return [
            self._trail.text(step.step, offset, TextDelta(token_ids=step.tokens[: len(pieces)], pieces=pieces)),
            *self._trail.held(step.step, offset, held),
            *self._trail.calls(step, run_here=self._runs_here(step)),
        ]

    # -- generating

    def _generate(self, now: float, seen: tuple[int, ...] = ()) -> list[Instruction]:
        opened = self._turn.opened
        if len(self._turn.steps) >= opened.max_steps:
            return self._close(now)
        prompt = len(self._session.tokens)
        if prompt >= self._target.context_tokens:
            return self._fail(_too_long(prompt, self._target.context_tokens), now)
        try:
            self._grammar = self._wanted_grammar()
        except WireError as impossible:
            return self._fail(impossible.reply, now)
        number = self._turn.next_step
        text = self._make_text(f"{opened.turn_id}-{number}")
        self._generation = Generation(
            number, self._opened, opened, self._session.tokens, target=self._target, text=text
        )
        self.phase = Phase.GENERATING
        return [*self._take(TokensOut(first=0, token_ids=seen)), *self._submit(now)]

    def _submit(self, now: float) -> list[Instruction]:
        """Ask (again) for what is missing, or record at once if nothing is."""
        generation = self._running()
        ended = generation.finish_by_tokens
        if ended is not None:
            return self._record(ended, generation.receipt(None, now), now)
        if generation.tries >= TRIES_MAX:
            message = f"no worker could finish the generation in {TRIES_MAX} tries"
            return self._fail(ErrorReply(code=ErrorCode.UNAVAILABLE, message=message), now)
        self._attempt += 1
        self.phase = Phase.GENERATING
        reply_subject = self._reply_subject(generation.generation_id)
        # Silence may mean that another replica has the turn, whose attempts count more than ours ever will.
        confirm = [Confirm()] if generation.tries else []
        return [*confirm, Submit(generation.submit(self._attempt, now, reply_subject, self._grammar))]

    def _wanted_grammar(self) -> Grammar | None:
        """The caller's grammar, or that of a forced call, which binds the first step only. Raises WireError BAD_REQUEST."""
        opened = self._turn.opened
        if opened.forced and not self._turn.steps:
            return None
        choice = ToolChoice() if self._turn.steps else opened.tool_choice
        return call_grammar(self._opened.tools, choice) or opened.grammar

    def _signed(self, now: float) -> list[Instruction]:
        if self._generation is not None:
            self._generation.hear(now)
        return []

    def _hear(self, event: GenerateEvent, now: float) -> list[Instruction]:
        generation = self._generation
        if generation is None or self.phase is not Phase.GENERATING:
            return []
        if (event.generation_id, event.attempt) != (generation.generation_id, generation.attempt):
            return []
        generation.hear(now)
        match event.body:
            case Working() as working:
                generation.note(working)
                return []
            case TokensOut() as tokens:
                if tokens.first > len(generation.emitted):
                    return self._again("events were lost on the way", now)
                shown = self._take(tokens)
                if not generation.text.is_stopped:
                    return shown
                revoked = Revoke(generation.revoke("a stop string came"))
                return [*shown, revoked, *self._record(FinishReason.STOP, generation.receipt(None, now), now)]
            case Generated() as done:
                if done.total != len(generation.emitted):
                    return self._again("the last tokens were lost on the way", now)
                return self._record(done.finish_reason, generation.receipt(done, now), now)
            case GenerateFailed() as failed:
                return self._failed(failed.error, now)
            case _:
                return []

    def _take(self, tokens: TokensOut) -> list[Instruction]:
        generation = self._running()
        delta = generation.take(tokens.first, tokens.token_ids, tokens.logprobs)
        return [self._trail.text(generation.step, len(generation.emitted), delta)] if delta else []

    # -- trouble

    def _failed(self, error: ErrorReply, now: float) -> list[Instruction]:
        if self.phase is not Phase.GENERATING:
            return []
        if error.code in RETRYABLE or (error.code is ErrorCode.DEADLINE and now < self._turn.opened.deadline_at):
            self.phase = Phase.WAITING
            wait_s = 0.0 if error.code in AT_ONCE else error.retry_after_s or RETRY_S
            self._running().retry_at = now + wait_s
            return self._tick(now)
        return self._fail(error, now)

    def _again(self, reason: str, now: float) -> list[Instruction]:
        return [Revoke(self._running().revoke(reason)), *self._submit(now)]

    def _tick(self, now: float) -> list[Instruction]:
        """Deadline, watchdog, and retries that are due."""
        if now >= self._turn.opened.deadline_at and self.phase in (Phase.GENERATING, Phase.WAITING, Phase.TOOLS):
            late = ErrorReply(code=ErrorCode.DEADLINE, message="the turn's deadline has passed")
            return [*self._revoked("deadline"), *self._fail(late, now)]
        if self.phase is Phase.WAITING and now >= self._running().retry_at:
            return self._submit(now)
        if self.phase is Phase.GENERATING and self._running().is_silent(now):
            return self._again("no sign of life", now)
        return []

    def _revoked(self, reason: str) -> list[Instruction]:
        return [Revoke(self._running().revoke(reason))] if self.phase is Phase.GENERATING else []

    def _cancel(self, reason: str, now: float) -> list[Instruction]:
        """Stop. What was delivered stays in the session; an append under way is followed by the close."""
        if self._cancelled:
            return []
        self._cancelled = True
        if self.phase in (Phase.GENERATING, Phase.WAITING):
            receipt = self._running().receipt(None, now)
            return [*self._revoked(reason), *self._record(FinishReason.CANCELLED, receipt, now)]
        if self.phase is Phase.TOOLS:
            return [GiveUpTools(self._turn.steps[-1].calls, reason)]
        return []

    def _fail(self, error: ErrorReply, now: float) -> list[Instruction]:
        self._error = error
        if self.phase is Phase.TOOLS:
            # The calls get answers first, so that the session stays valid (F-RST-01).
            return [GiveUpTools(self._turn.steps[-1].calls, error.message)]
        if self._generation is not None and self._generation.emitted:
            # What the caller has seen is part of the session; the error follows it.
            return self._record(FinishReason.CANCELLED, self._generation.receipt(None, now), now)
        return self._close(now)

    # -- recording

    def _record(self, reason: FinishReason, receipt: StepReceipt, now: float) -> list[Instruction]:
        generation = self._running()
        held = self._trail.held(generation.step, len(generation.emitted), generation.text.flush())
        calls = () if reason is FinishReason.CANCELLED else tuple(generation.text.calls)
        body = StepGenerated(
            turn_id=self._turn.opened.turn_id,
            step=generation.step,
            tokens=tuple(generation.emitted),
            text=generation.text.text,
            calls=calls,
            finish_reason=FinishReason.TOOL_CALLS if calls else reason,
            receipt=receipt,
        )
        if not calls:
            return [*held, *self._close(now, final=body)]
        self.phase = Phase.RECORDING
        return [*held, Append(body)]

    def _appended(self, now: float) -> list[Instruction]:
        match self.phase:
            case Phase.RECORDING:
                self._generation = None
                step = self._turn.steps[-1]
                return [*self._trail.calls(step, run_here=self._runs_here(step)), *self._after_step(now)]
            case Phase.ANSWERING:
                out: list[Instruction] = [*self._trail.results(self._turn.answered[-1].step, self._results)]
                self._results = ()
                is_ending = self._cancelled or self._error is not None
                return out + (self._close(now) if is_ending else self._generate(now))
            case Phase.CLOSING:
                self.phase = Phase.OVER
                closed = self._session.closed[self._turn.opened.turn_id]
                return [Emit(terminal_event(self._opened.session_id, closed)), Over()]
            case _:
                raise AssertionError(f"an append came back in {self.phase}")

    def _after_step(self, now: float) -> list[Instruction]:
        step = self._turn.steps[-1]
        if not step.calls or not self._runs_here(step):
            return self._close(now)
        self.phase = Phase.TOOLS
        if self._cancelled or self._error is not None:
            return [GiveUpTools(step.calls, "the turn was ended")]
        return [RunTools(step.calls)]

    def _runs_here(self, step: StepGenerated) -> bool:
        """Calls are run here unless one of them is the caller's; a malformed or unknown one is answered here."""
        return all(call.name not in self._callers_tools for call in step.calls)

    def _answer(self, event: ToolsReturned) -> list[Instruction]:
        if self.phase is not Phase.TOOLS:
            return []
        self.phase = Phase.ANSWERING
        self._results = event.results
        turn_id, step = self._turn.opened.turn_id, self._turn.next_step
        return [Append(ToolsAnswered(turn_id=turn_id, step=step, spans=event.spans, seconds=event.seconds))]

    def _close(self, now: float, final: StepGenerated | None = None) -> list[Instruction]:
        self.phase = Phase.CLOSING
        self._generation = None
        turn = self._turn.followed_by(final) if final else self._turn
        body = TurnClosed(
            turn_id=turn.opened.turn_id,
            final=final,
            steps=turn.next_step,
            finish_reason=None if self._error else self._finish(turn),
            error=self._error,
            usage=usage_of(turn),
            receipt=receipt_of(turn, now - turn.opened.opened_at),
            closed_at=now,
        )
        return [Append(body)]

    def _finish(self, turn: OpenTurn) -> FinishReason:
        if self._cancelled:
            return FinishReason.CANCELLED
        if turn.answered and len(turn.answered) == len(turn.steps):
            # The last allowed step made calls, and they were answered: the bound on steps ended the turn.
            return FinishReason.LENGTH
        return finish_of(turn)

    def _running(self) -> Generation:
        assert self._generation is not None, f"no generation runs in {self.phase}"
        return self._generation

    def check_integrity(self) -> None:
        """Assert what must hold between events."""
        self._session.check_integrity()
        self._trail.check_integrity()
        generating = self.phase in (Phase.GENERATING, Phase.WAITING, Phase.RECORDING)
        assert generating == (self._generation is not None), self.phase


def _too_long(prompt: int, window: int) -> ErrorReply:
    message = f"the prompt has {prompt} tokens; the window holds {window}, of which at least one is for the answer"
    return ErrorReply(code=ErrorCode.CONTEXT_LENGTH, message=message, field="messages")
