"""Pure: what a generation would cost at a worker, and how a worker is chosen: a table of functions by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from proto.generate import Segment, WorkerPrice
from proto.receipt import Source
from services.router.index import TierRun


@dataclass(frozen=True, slots=True)
class Reach:
    """Where a prompt's blocks are, seen from one worker: `resident` there, then `fetched`, the rest is computed."""

    block_tokens: int
    prompt_tokens: int
    resident: int = 0
    fetched: tuple[TierRun, ...] = ()

    @property
    def fetched_blocks(self) -> int:
        """Blocks that come from a tier."""
        return sum(run.count for run in self.fetched)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that need no compute."""
        return (self.resident + self.fetched_blocks) * self.block_tokens

    @property
    def new_tokens(self) -> int:
        """Prompt tokens to compute; at least one, for the first logits."""
        return max(1, self.prompt_tokens - self.cached_tokens)

    def segments(self) -> tuple[Segment, ...]:
        """The plan's segments; together they cover the prompt, its partial last block included."""
        segments = []
        if self.resident:
            segments.append(Segment(first_block=0, block_count=self.resident, source=Source.RESIDENT))
        segments += [
            Segment(first_block=run.first, block_count=run.count, source=run.source, holder_id=run.holder_id)
            for run in self.fetched
        ]
        first = self.resident + self.fetched_blocks
        count = -(-self.prompt_tokens // self.block_tokens) - first
        if count > 0:
            segments.append(Segment(first_block=first, block_count=count, source=Source.COMPUTED))
        return tuple(segments)


def predict(
    price: WorkerPrice, reach: Reach, *, block_bytes: int, tokens_waiting: int, batch: int
) -> tuple[float, float]:
    """`predicted_s` and `delay_s` of an Offer.

    The first are seconds to the first token at a worker, what it has to do before included, and one decode step of its
    batch, which makes equal workers differ by their load.
    """
    fetched = reach.fetched_blocks
    load = price.load_base_s + price.load_byte_s * block_bytes * fetched if fetched else 0.0
    token_s = price.prefill_token_s + price.prefill_context_s * reach.prompt_tokens
    prefill = price.prefill_base_s + reach.new_tokens * token_s
    step = price.decode_base_s + price.decode_stream_s * (batch + 1) + price.decode_context_s * reach.prompt_tokens
    return tokens_waiting * price.prefill_token_s + load + prefill + step, batch * prefill


@dataclass(frozen=True, slots=True)
class Offer:
    """One worker that could take the generation, now or when it has room.

    `delay_s` is what the streams that the worker has already would wait for this prompt, all together.
    """

    worker_id: str
    has_room: bool
    predicted_s: float
    delay_s: float
    reach: Reach
    is_blind: bool

    @property
    def cost_s(self) -> float:
        """Seconds that all who are concerned wait."""
        return self.predicted_s + self.delay_s


@dataclass(frozen=True, slots=True)
class Ask:
    """The question to a policy. `offers` is not empty; `last_worker_id` got the decision before this one."""

    now: float
    queued_at: float
    offers: Sequence[Offer]
    patience_s_max: float
    last_worker_id: str


@dataclass(frozen=True, slots=True)
class Hold:
    """Wait for this busy worker, but not longer than until then."""

    worker_id: str
    until: float


Policy = Callable[[Ask], Offer | Hold | None]


def residency(ask: Ask) -> Offer | Hold | None:
    """The worker where it costs the least, to itself and to the streams there: computing again what lies elsewhere delays them.

    A busy one is waited for as long as going elsewhere would cost more, within the patience.
    """
    best = min(ask.offers, key=_cost)
    if best.has_room:
        return best
    free = [offer for offer in ask.offers if offer.has_room]
    if not free:
        return None
    here = min(free, key=_cost)
    until = ask.queued_at + min(here.cost_s - best.cost_s, ask.patience_s_max)
    return here if ask.now >= until else Hold(best.worker_id, until)


def round_robin(ask: Ask) -> Offer | Hold | None:
    """The next worker with room, by id, whatever it holds."""
    free = sorted((offer for offer in ask.offers if offer.has_room), key=lambda offer: offer.worker_id)
    if not free:
        return None
    return next((offer for offer in free if offer.worker_id > ask.last_worker_id), free[0])


def _cost(offer: Offer) -> tuple[float, str]:
    return offer.cost_s, offer.worker_id


POLICIES: dict[str, Policy] = {"residency": residency, "round_robin": round_robin}
