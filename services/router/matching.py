"""Pure: late binding. Which of the waiting generations goes to which worker with room, and with what plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from proto.fleet import ModelCard
from proto.generate import Plan, Stage
from services.router.holders import Holders
from services.router.policies import Ask, Hold, Offer, Policy, Reach, predict
from services.router.queue import Job
from services.router.workers import WorkerLife

# Placeable generations that one decision compares, from the head of the line; this bounds its cost.
SCAN_COUNT_MAX: Final = 64
# Workers priced for one generation besides those that hold its first block: the least busy ones.
OTHERS_PRICED_MAX: Final = 16
# Tokens of room that a generation needs beyond its prompt to be worth placing.
GROWTH_TOKENS: Final = 1


@dataclass(frozen=True, slots=True)
class Placement:
    """A generation, the worker it goes to, and why."""

    job: Job
    life: WorkerLife
    stage: Stage
    offer: Offer
    policy: str

    def plan(self) -> Plan:
        """As the worker is told; the shell fills in how long the decision took."""
        return Plan(
            policy=self.policy,
            segments=self.offer.reach.segments(),
            predicted_s=self.offer.predicted_s,
            blind=self.offer.is_blind,
        )


class Matcher:
    """Reads queue, workers and index; changes only a job's hold."""

    def __init__(
        self, holders: Holders, policy_name: str, policy: Policy, *, patience_s_max: float, prefill_tokens_min: int
    ) -> None:
        self._holders = holders
        self._policy_name = policy_name
        self._policy = policy
        self._patience_s_max = patience_s_max
        self._prefill_tokens_min = prefill_tokens_min
        # Who got the last decision, per stage.
        self._last = dict.fromkeys(Stage, "")

    def next(self, waiting: Iterable[Job], lives: dict[str, WorkerLife], now: float) -> Placement | None:
        """The next placement, None if nothing can be placed now."""
        decoders = [life for life in lives.values() if life.pull.stage is Stage.DECODE]
        prefillers = [life for life in lives.values() if life.pull.stage is Stage.PREFILL and life.room]
        can_decode = any(life.room for life in decoders)
        if not can_decode and not prefillers:
            return None
        best: Placement | None = None
        seen = 0
        for job in waiting:
            if self._is_held(job, lives, now):
                continue
            placement = self._place(job, decoders, prefillers, now)
            if placement is None:
                continue
            if best is None or self._rank(placement, now) < self._rank(best, now):
                best = placement
            seen += 1
            # In turn means in turn: the first of the line goes first.
            if seen >= SCAN_COUNT_MAX or self._policy_name == "round_robin":
                break
        if best is not None:
            self._last[best.stage] = best.life.worker_id
        return best

    def _rank(self, placement: Placement, now: float) -> tuple[bool, float, int]:
        """Who waited longer than the patience goes first, first come first; of the others the cheapest where it goes."""
        job = placement.job
        is_old = now - job.queued_at >= self._patience_s_max
        return (not is_old, 0.0 if is_old else placement.offer.predicted_s, job.order)

    def _is_held(self, job: Job, lives: dict[str, WorkerLife], now: float) -> bool:
        if job.held_for is None or now >= job.held_until:
            return False
        life = lives.get(job.held_for)
        return life is not None and life.room == 0

    def _place(
        self, job: Job, decoders: list[WorkerLife], prefillers: list[WorkerLife], now: float
    ) -> Placement | None:
        offers = self._offers(job, decoders, now)
        if prefillers and not job.is_prefill_over and self._wants_prefill(offers):
            staged = self._choose(job, prefillers, self._offers(job, prefillers, now), Stage.PREFILL, now)
            if staged is not None:
                return staged
        return self._choose(job, decoders, offers, Stage.DECODE, now)

    def _wants_prefill(self, offers: list[Offer]) -> bool:
        """Whether even the best decode worker would have to compute much, and there is a store to hand it over."""
        if not offers or not self._holders.has_shard:
            return False
        return min(offer.reach.new_tokens for offer in offers) >= self._prefill_tokens_min

    def _choose(
        self, job: Job, lives: list[WorkerLife], offers: list[Offer], stage: Stage, now: float
    ) -> Placement | None:
        if not offers:
            return None
        choice = self._policy(Ask(now, job.queued_at, offers, self._patience_s_max, self._last[stage]))
        if isinstance(choice, Hold):
            if stage is Stage.DECODE:
                job.held_for, job.held_until = choice.worker_id, choice.until
            return None
        if choice is None:
            return None
        life = next(life for life in lives if life.worker_id == choice.worker_id)
        return Placement(job, life, stage, choice, self._policy_name)

    # -- offers

    def _offers(self, job: Job, lives: list[WorkerLife], now: float) -> list[Offer]:
        """What each worker worth looking at would cost."""
        serving = [life for life in lives if now >= job.refused.get(life.worker_id, now) and life.serves(job.generate)]
        if not any(life.room for life in serving):
            # Nobody can take it; but what a prefill stage would save is still asked by the caller.
            serving = serving[: 1 + OTHERS_PRICED_MAX]
        runs = self._holders.index.device_runs(job.generate.keys)
        if len(serving) > OTHERS_PRICED_MAX:
            holding = [life for life in serving if runs.get(life.worker_id)]
            others = sorted(
                (life for life in serving if life.room and not runs.get(life.worker_id)),
                key=lambda life: (life.tokens_waiting, life.batch, life.worker_id),
            )
            is_in_turn = self._policy_name == "round_robin"
            serving = [*holding, *(others if is_in_turn else others[:OTHERS_PRICED_MAX])]
        offers = (self._offer(job, life, runs.get(life.worker_id, 0)) for life in serving)
        return [offer for offer in offers if offer is not None]

    def _offer(self, job: Job, life: WorkerLife, run: int) -> Offer | None:
        generate = job.generate
        tokens = len(generate.tokens)
        block_tokens = block_tokens_of(life.card, tokens, len(generate.keys))
        # The last token is always computed: its logits are the first result.
        usable = min(len(generate.keys), (tokens - 1) // block_tokens)
        resident = min(run, usable)
        fetched = self._holders.index.tier_runs(generate.keys, resident, usable)
        reach = Reach(block_tokens, tokens, resident, fetched)
        if not _fits(life, -(-(tokens + GROWTH_TOKENS) // block_tokens), resident, block_tokens):
            return None
        predicted_s, delay_s = predict(
            life.pull.price,
            reach,
            block_bytes=life.pull.block_bytes,
            tokens_waiting=life.tokens_waiting,
            batch=life.batch,
        )
        is_blind = life.card is None or not self._holders.knows(life.worker_id)
        return Offer(life.worker_id, life.room > 0, predicted_s, delay_s, reach, is_blind)


def block_tokens_of(card: ModelCard | None, tokens: int, keys: int) -> int:
    """Tokens of a block: the card's, else the power of two that makes so many full blocks of the prompt."""
    if card is not None:
        return card.block_tokens
    return next((size for size in (16, 32, 64, 128, 256, 8, 4, 2, 1) if tokens // size == keys), 16)


def _fits(life: WorkerLife, blocks: int, resident: int, block_tokens: int) -> bool:
    """Whether its free blocks are enough. An idle worker can free all it has, whatever it says is free."""
    if blocks > life.pull.blocks_total:
        return False
    on_their_way = sum(-(-sent.new_tokens // block_tokens) for sent in life.unseen)
    return life.batch == 0 or blocks - resident + on_their_way <= life.pull.blocks_free
