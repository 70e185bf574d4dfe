"""Pure: what this worker's work takes. A shape is measured once at start; its scale follows the steps that really ran."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from proto.generate import WorkerPrice

# New prefill tokens, decode streams, context tokens, seconds: EngineStats.recent_steps.
Step = tuple[int, int, int, float]

# Fewer steps of a kind than this say nothing: the first one after a pause is often slow.
STEPS_COUNT_MIN: Final = 3
# A scale beyond these is a stall (a laptop that slept), not a price.
SCALE_MIN, SCALE_MAX = 0.1, 10.0
# Weight of the newest load in the running mean.
LOAD_WEIGHT: Final = 0.2
# No slope of a line through measured points is taken to be smaller: a price of nothing would attract everything.
SLOPE_MIN: Final = 1e-7


@dataclass(frozen=True, slots=True)
class _Line:
    base: float
    slope: float


def fit(steps: Iterable[Step], otherwise: WorkerPrice) -> WorkerPrice:
    """Seconds from a few steps of different sizes; what they do not show stays as in `otherwise`."""
    taken = list(steps)
    prefill = _line([(new, seconds) for new, streams, _, seconds in taken if new and not streams])
    decode = _line([(streams, seconds) for new, streams, _, seconds in taken if streams and not new])
    update: dict[str, float] = {}
    if prefill is not None:
        update |= {"prefill_base_s": prefill.base, "prefill_token_s": prefill.slope}
    if decode is not None:
        update |= {"decode_base_s": decode.base, "decode_stream_s": decode.slope}
    return otherwise.model_copy(update=update)


def _line(points: Sequence[tuple[int, float]]) -> _Line | None:
    """Through the medians of the smallest and the largest size; through one size, and the origin, if there is one."""
    if not points:
        return None
    sizes = sorted({size for size, _ in points})
    small, large = (median(seconds for size, seconds in points if size == end) for end in (sizes[0], sizes[-1]))
    if sizes[0] == sizes[-1]:
        return _Line(0.0, max(small / sizes[0], SLOPE_MIN))
    slope = max((large - small) / (sizes[-1] - sizes[0]), SLOPE_MIN)
    return _Line(max(small - slope * sizes[0], 0.0), slope)


class PriceKeeper:
    """The current price. Mutable; owned by the worker's core."""

    def __init__(self, shape: WorkerPrice) -> None:
        self._shape = shape
        self._prefill_scale = self._decode_scale = 1.0
        self._load_byte_s = shape.load_byte_s

    @property
    def price(self) -> WorkerPrice:
        """What to say in pulls."""
        shape, prefill, decode = self._shape, self._prefill_scale, self._decode_scale
        return WorkerPrice(
            prefill_base_s=shape.prefill_base_s * prefill,
            prefill_token_s=shape.prefill_token_s * prefill,
            prefill_context_s=shape.prefill_context_s * prefill,
            decode_base_s=shape.decode_base_s * decode,
            decode_stream_s=shape.decode_stream_s * decode,
            decode_context_s=shape.decode_context_s * decode,
            load_base_s=shape.load_base_s,
            load_byte_s=self._load_byte_s,
        )

    def hear_steps(self, steps: Iterable[Step]) -> None:
        """The engine's last steps. Those that did both kinds of work say nothing about either."""
        taken = [step for step in steps if step[3] > 0]
        prefills = [step for step in taken if step[0] and not step[1]]
        decodes = [step for step in taken if step[1] and not step[0]]
        self._prefill_scale = _scale([s / self._prefill_s(n, c) for n, _, c, s in prefills], self._prefill_scale)
        self._decode_scale = _scale([s / self._decode_s(b, c) for _, b, c, s in decodes], self._decode_scale)

    def hear_load(self, size_bytes: int, seconds: float) -> None:
        """So many bytes came from a tier in so many seconds."""
        if size_bytes > 0:
            seen = max(seconds - self._shape.load_base_s, 0.0) / size_bytes
            self._load_byte_s += LOAD_WEIGHT * (seen - self._load_byte_s)

    def compute_s(self, tokens: int) -> float:
        """What computing so many prompt tokens would take."""
        return self.price.prefill_base_s + tokens * self.price.prefill_token_s

    def _prefill_s(self, new: int, context: int) -> float:
        shape = self._shape
        return max(shape.prefill_base_s + new * (shape.prefill_token_s + shape.prefill_context_s * context), SLOPE_MIN)

    def _decode_s(self, streams: int, context: int) -> float:
        shape = self._shape
        seconds = shape.decode_base_s + shape.decode_stream_s * streams + shape.decode_context_s * context
        return max(seconds, SLOPE_MIN)


def _scale(ratios: Sequence[float], before: float) -> float:
    if len(ratios) < STEPS_COUNT_MIN:
        return before
    return min(max(median(ratios), SCALE_MIN), SCALE_MAX)
