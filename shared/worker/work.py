"""Pure: one assignment in a worker's hands: where it stands, and what is said of it to loop and router.

    CLAIMING -> LOADING -> RUNNING -> (decode) gone
        |          |          |    -> (prefill) FLUSHING -> gone
        +----------+----------+--> gone, on cancel, deadline, failure

Where the prompt's KV came from is known when the prompt is done: until then other generations may seal blocks of the same
prefix, which are joined and not computed again. By then

    resident + loaded + computed == prompt tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum

from proto.errors import ErrorReply
from proto.fleet import ModelCard
from proto.generate import (
    Assignment,
    GenerateBody,
    Generated,
    GenerateEvent,
    RunningWork,
    Stage,
    WorkDone,
    Working,
    WorkOutcome,
)
from proto.ids import ROOT_KEY, BlockKey
from proto.receipt import CACHED_SOURCES, Source
from shared.engine.protocol import Claim, EngineRequest, PrefillProgress, RequestFinished, SealedBlock
from shared.limits import GENERATE_SIGN_EVERY_S
from shared.worker.events import FetchBlocks, Fetched, PutBlocks, Say


class Phase(StrEnum):
    """Where an assignment stands."""

    CLAIMING = "claiming"
    LOADING = "loading"
    RUNNING = "running"
    FLUSHING = "flushing"


class Work:
    """Mutable; owned by the worker's core. Its id is the assignment's, which is also the engine's request id."""

    def __init__(self, assignment: Assignment, card: ModelCard, *, now: float, deadline: float) -> None:
        self.assignment, self.generate = assignment, assignment.generate
        self.phase = Phase.CLAIMING
        # Whether the router has its answer.
        self.is_answered = False
        self.arrived_at, self.deadline = now, deadline
        # Prompt tokens by where their KV came from; empty until the prompt is done.
        self.sources: dict[Source, int] = {}
        self._card = card
        self._claim: Claim | None = None
        self._fetched = Fetched()
        self._computed_tokens = 0
        self._said_at = now
        self._claimed_at = self._started_at = now
        # First token, or with prefill only the prompt's end: what the router predicted.
        self._result_at: float | None = None
        self._first_key: BlockKey | None = None

    @property
    def assignment_id(self) -> str:
        """Its id."""
        return self.assignment.assignment_id

    @property
    def is_prefill(self) -> bool:
        """Only the prompt is wanted, and the loop is not told of its end."""
        return self.assignment.stage is Stage.PREFILL

    @property
    def sign_at(self) -> float:
        """When the loop must hear of it again."""
        return self._said_at + GENERATE_SIGN_EVERY_S

    @property
    def tokens_waiting(self) -> int:
        """Prompt tokens that are still to be computed, as far as is known."""
        if self.sources:
            return 0
        return max(len(self.generate.tokens) - self._cached_tokens - self._computed_tokens, 0)

    @property
    def _cached_tokens(self) -> int:
        resident = self._claim.resident_blocks if self._claim else 0
        return (resident + self._fetched.block_count) * self._card.block_tokens

    @property
    def _promised_blocks(self) -> int:
        return sum(part.block_count for part in self.assignment.plan.segments if part.source in CACHED_SOURCES)

    # -- what is asked of the engine and the kvstore

    def request(self) -> EngineRequest:
        """What the engine is asked."""
        generate = self.generate
        return EngineRequest(
            request_id=self.assignment_id,
            namespace=generate.namespace,
            tokens=generate.tokens,
            sampling=generate.sampling,
            emitted=generate.emitted,
            eos_token_ids=frozenset(generate.eos_token_ids),
            grammar=generate.grammar,
            forced=generate.forced,
            prefill_only=self.is_prefill,
        )

    def claimed(self, claim: Claim, now: float) -> None:
        """The engine holds its room, and the leading blocks that were here."""
        assert self.phase is Phase.CLAIMING
        self.phase, self._claim = Phase.LOADING, claim
        self._claimed_at = self._started_at = now
        self._first_key = claim.keys[0] if claim.keys else None

    def missing_tokens(self) -> int:
        """Tokens of the blocks that could be loaded."""
        assert self._claim is not None
        return (self._claim.usable_blocks - self._claim.resident_blocks) * self._card.block_tokens

    def fetch(self, *, within_s: float, stall_s: float) -> FetchBlocks:
        """Ask for every block that is not here, whatever the plan said: it may be older than the kvstore's last write."""
        assert self._claim is not None and self.phase is Phase.LOADING
        return FetchBlocks(
            assignment_id=self.assignment_id,
            namespace=self.generate.namespace,
            keys=self._claim.keys,
            tokens=self.generate.tokens,
            first=self._claim.resident_blocks,
            last=self._claim.usable_blocks,
            within_s=within_s,
            stall_s=stall_s,
        )

    def started(self, fetched: Fetched, now: float) -> float:
        """Loading is over; how many seconds it took."""
        assert self.phase is Phase.LOADING and self._claim is not None
        assert fetched.block_count <= self._claim.usable_blocks - self._claim.resident_blocks
        found = self._claim.resident_blocks + fetched.block_count
        promised = min(self._promised_blocks, self._claim.usable_blocks)
        if fetched.fallback is None and found < promised:
            fetched = replace(fetched, fallback=f"{promised} blocks were promised, {found} were found")
        self.phase, self._fetched, self._started_at = Phase.RUNNING, fetched, now
        return now - self._claimed_at

    def flushes(self) -> None:
        """The prompt is computed; the kvstore is still to take its blocks."""
        assert self.phase is Phase.RUNNING and self.is_prefill
        self.phase = Phase.FLUSHING

    def to_put(self, blocks: Sequence[SealedBlock]) -> PutBlocks | None:
        """What the kvstore is not known to have of blocks that were sealed just now."""
        assert self._claim is not None
        if self._first_key is None:
            self._first_key = next((block.key for block in blocks if block.parent == ROOT_KEY), None)
        first = self._claim.resident_blocks
        loaded = set(self._claim.keys[first : first + self._fetched.block_count])
        fresh = tuple(block for block in blocks if block.key not in loaded)
        if not fresh or self._first_key is None:
            return None
        return PutBlocks(self.generate.namespace, self._first_key, fresh)

    # -- what the engine says

    def progressed(self, progress: PrefillProgress, now: float) -> bool:
        """Prompt tokens were computed; True when it was the last one, and `sources` are known."""
        self._computed_tokens = progress.computed
        if progress.computed < progress.total:
            return False
        prompt, loaded = len(self.generate.tokens), self._fetched.block_count * self._card.block_tokens
        sources = {
            Source.RESIDENT: prompt - loaded - progress.total,
            Source.COMPUTED: progress.total,
            **{source: count * self._card.block_tokens for source, count in self._fetched.blocks.items()},
        }
        self.sources = {source: count for source, count in sources.items() if count}
        assert sum(self.sources.values()) == prompt and min(self.sources.values()) > 0, self.sources
        if self._result_at is None:
            self._result_at = now
        return True

    # -- what is said

    def running(self) -> RunningWork:
        """As pulls name it."""
        generate = self.generate
        return RunningWork(
            generation_id=generate.generation_id, attempt=generate.attempt, assignment_id=self.assignment_id
        )

    def say(self, body: GenerateBody, now: float) -> Say:
        """To the loop."""
        self._said_at = now
        event = GenerateEvent(generation_id=self.generate.generation_id, attempt=self.generate.attempt, body=body)
        return Say(self.generate.reply_subject, event)

    def working(self) -> Working:
        """A sign of life, with the sources as soon as they are known. A receipt has those of the decode stage only."""
        prefilled = len(self.generate.tokens) if self.sources else self._cached_tokens + self._computed_tokens
        sources = {} if self.is_prefill else self.sources
        return Working(worker_id=self._card.worker_id, prefilled_tokens=prefilled, tokens_by_source=sources)

    def generated(self, finished: RequestFinished) -> Generated:
        """The end, with all that the receipt needs."""
        assert sum(self.sources.values()) == len(self.generate.tokens), "a finished prompt has its sources"
        plan = self.assignment.plan
        return Generated(
            finish_reason=finished.reason,
            total=self.generate.emitted + finished.generated,
            worker_id=self._card.worker_id,
            prefill_worker_id=self.assignment.prefill_worker_id,
            prompt_tokens=len(self.generate.tokens),
            tokens_by_source=self.sources,
            bytes_moved=self._fetched.bytes_moved,
            frames_rejected=self._fetched.rejected,
            fallback=self._fetched.fallback,
            queue_s=self.assignment.queued_s,
            route_s=plan.decided_in_s,
            load_s=self._started_at - self._claimed_at,
            prefill_s=finished.prefill_s,
            decode_s=finished.decode_s,
            predicted_s=plan.predicted_s,
            policy=plan.policy,
        )

    def done(self, outcome: WorkOutcome, now: float, error: ErrorReply | None = None) -> WorkDone:
        """To the router: off our hands, and how well its plan foretold it."""
        plan = self.assignment.plan
        found = sum(count for source, count in self.sources.items() if source in CACHED_SOURCES)
        return WorkDone(
            worker_id=self._card.worker_id,
            epoch=self._card.epoch,
            assignment_id=self.assignment_id,
            generation_id=self.generate.generation_id,
            attempt=self.generate.attempt,
            outcome=outcome,
            error=error,
            promised_cached_tokens=self._promised_blocks * self._card.block_tokens,
            found_cached_tokens=found,
            predicted_s=plan.predicted_s,
            actual_s=(now if self._result_at is None else self._result_at) - self.arrived_at,
        )
