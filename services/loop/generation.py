"""Pure: one generation of a turn over all its attempts: what was emitted, what to ask for next, when to worry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proto.chat import FinishReason, Grammar
from proto.generate import CancelGenerate, Generate, Generated, Working
from proto.ids import NamespaceDigest
from proto.receipt import Seconds, Source, StepReceipt
from proto.sessions import SessionOpened, TurnOpened
from proto.turns import TextDelta
from services.loop.step_text import StepText
from shared.block_hash import chain_keys
from shared.limits import GENERATE_SILENT_AFTER_S

# Tries of one generation that end in a retryable failure or silence before the turn is failed. With the deadline this
# bounds the work; a killed worker costs one.
TRIES_MAX = 60


@dataclass(frozen=True, slots=True)
class Target:
    """The model a turn runs on, from a worker's card."""

    namespace: NamespaceDigest
    salt: bytes
    block_tokens: int
    context_tokens: int
    eos_token_ids: tuple[int, ...]


class Generation:
    """Mutable; owned by one TurnMachine for one step."""

    def __init__(
        self,
        step: int,
        opened: SessionOpened,
        turn: TurnOpened,
        prompt: Sequence[int],
        *,
        target: Target,
        text: StepText,
    ) -> None:
        self.step = step
        self.generation_id = f"{turn.turn_id}-{step}"
        self.text = text
        self.emitted: list[int] = []
        # Number of the attempt whose events count; 0 before the first.
        self.attempt = 0
        self.tries = 0
        self.retry_at = 0.0
        self._heard_at = 0.0
        self._opened, self._turn, self._prompt, self._target = opened, turn, tuple(prompt), target
        self._sources: dict[Source, int] = {}
        self._worker_id = ""
        self._started_at = 0.0

    @property
    def max_tokens(self) -> int:
        """What was asked for, cut to what the window still holds."""
        return min(self._turn.sampling.max_tokens, self._target.context_tokens - len(self._prompt))

    @property
    def finish_by_tokens(self) -> FinishReason | None:
        """How the tokens themselves say that it is over, whether or not a worker got to say it."""
        sampling = self._turn.sampling
        if self.text.is_stopped:
            return FinishReason.STOP
        if not self.emitted:
            return None
        enders = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(self._target.eos_token_ids))
        if self.emitted[-1] in enders and len(self.emitted) >= sampling.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.emitted) >= self.max_tokens else None

    def submit(self, attempt: int, now: float, reply_subject: str, grammar: Grammar | None) -> Generate:
        """The request of a new attempt: prompt plus what was emitted, so that it goes on where the last one was cut."""
        assert attempt > self.attempt, "attempts only grow"
        self.attempt = attempt
        self.tries += 1
        self._heard_at = now
        if self.tries == 1:
            self._started_at = now
        tokens = (*self._prompt, *self.emitted)
        return Generate(
            generation_id=self.generation_id,
            attempt=attempt,
            session_id=self._opened.session_id,
            turn_id=self._turn.turn_id,
            request_id=self._turn.request_id,
            tenant=self._opened.tenant,
            model=self._opened.model,
            namespace=self._target.namespace,
            salt=self._target.salt,
            tokens=tokens,
            keys=chain_keys(self._target.namespace, tokens, self._target.block_tokens),
            emitted=len(self.emitted),
            # Stop strings are matched here, where the text is; workers see tokens only.
            sampling=self._turn.sampling.model_copy(update={"max_tokens": self.max_tokens, "stop": ()}),
            eos_token_ids=self._target.eos_token_ids,
            grammar=grammar,
            forced=self._turn.forced if self.step == 0 else (),
            deadline_at=self._turn.deadline_at,
            submitted_at=now,
            reply_subject=reply_subject,
        )

    def revoke(self, reason: str) -> CancelGenerate:
        """Stop every attempt so far."""
        return CancelGenerate(generation_id=self.generation_id, through_attempt=self.attempt, reason=reason)

    def hear(self, now: float) -> None:
        """A sign of life of the current attempt."""
        self._heard_at = now

    def is_silent(self, now: float) -> bool:
        """Whoever had it has not said so for too long."""
        return now - self._heard_at > GENERATE_SILENT_AFTER_S

    def note(self, working: Working) -> None:
        """Keep what a receipt needs even if the loop ends the step itself."""
        self._worker_id = working.worker_id
        # The first attempt's numbers are those of the prompt the caller sent; a retry's include emitted tokens.
        if working.tokens_by_source and not self._sources and not self.emitted:
            self._sources = dict(working.tokens_by_source)

    def take(self, first: int, token_ids: Sequence[int], logprobs: Sequence[float] | None) -> TextDelta | None:
        """New tokens in; what is to be shown of them. None if all were known. `first` must not lie beyond what is here."""
        skip = len(self.emitted) - first
        assert skip >= 0, "the caller checks for holes"
        fresh = token_ids[skip:]
        if not fresh:
            return None
        pieces = self.text.feed(fresh).pieces
        taken = tuple(fresh[: len(pieces)])
        self.emitted.extend(taken)
        shown = tuple(logprobs[skip : skip + len(taken)]) if logprobs else None
        return TextDelta(token_ids=taken, pieces=pieces, logprobs=shown)

    def receipt(self, done: Generated | None, now: float) -> StepReceipt:
        """What it cost. Without the worker's word, what is not known is left out."""
        known = StepReceipt(
            step=self.step,
            worker_id=self._worker_id,
            attempts=self.tries,
            prompt_tokens=len(self._prompt),
            generated_tokens=len(self.emitted),
            tokens_by_source=self._sources,
            seconds=Seconds(total=now - self._started_at),
        )
        if done is None:
            return known
        timed = Seconds(
            queue=done.queue_s,
            route=done.route_s,
            load=done.load_s,
            prefill=done.prefill_s,
            decode=done.decode_s,
            total=now - self._started_at,
        )
        return known.model_copy(
            update={
                "worker_id": done.worker_id,
                "prefill_worker_id": done.prefill_worker_id,
                "tokens_by_source": self._sources or self._only_prompt(done),
                "bytes_moved": done.bytes_moved,
                "frames_rejected": done.frames_rejected,
                "fallback": done.fallback,
                "predicted_s": done.predicted_s,
                "policy": done.policy,
                "seconds": timed,
            }
        )

    def _only_prompt(self, done: Generated) -> dict[Source, int]:
        """The worker's numbers, if they are those of the whole prompt and not of a retry's longer one."""
        return done.tokens_by_source if done.prompt_tokens == len(self._prompt) else {}
