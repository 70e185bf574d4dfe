"""Logits -> one token id. Greedy, or seeded sampling whose randomness depends on (seed, token index) alone.

The draw for token i of a generation is a hash of the seed and i, turned into a number in [0, 1) and looked up in the
cumulative filtered distribution, which is sorted by (probability falling, id rising) and added up in float64. So a token does
not depend on what else is in the batch, on the attempt, or on how many draws were made before: a generation that is
placed again with its emitted tokens goes on with the same ones.

Order of steps: repetition penalty, grammar and minimum length, temperature, top_k, top_p, min_p. Log-probabilities are
those of the model itself, before all of that.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from proto.chat import Sampling
from shared.engine.batch import Broken, Choice, Sequence

# Enough of the distribution's head to decide nearly every draw without sorting the whole vocabulary.
_HEAD_COUNT: Final = 256
_UNIT: Final = 2.0**-53

Logits = NDArray[np.float32]
Scores = NDArray[np.float64]


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments; 53 bits."""
    digest = blake3(seed.to_bytes(8, "little") + index.to_bytes(8, "little")).digest(8)
    return (int.from_bytes(digest, "little") >> 11) * _UNIT


def choose(row: Logits, sequence: Sequence) -> Choice | Broken:
    """The token that follows the sequence, given the logits [vocab] after its last one. Updates `sequence.seen`."""
    request, sampling = sequence.request, sequence.request.sampling
    index = sequence.next_index
    if damage := damage_of(row):
        return damage
    if index < len(request.forced):
        token = request.forced[index]
    else:
        blocked = blocked_ids(sequence, width=len(row))
        penalized = _penalized(row, sequence)
        if blocked is not None:
            if blocked.all():
                return Broken("the grammar allows no token here", kv_suspect=False)
            penalized = np.where(blocked, np.float32(-np.inf), penalized)
        token = pick(penalized, sampling, index)
    return Choice(token, None if sampling.logprobs is None else log_probability(row, token))


def damage_of(row: Logits) -> Broken | None:
    """What is wrong with the logits [vocab] of a token, if anything."""
    if np.isfinite(row.max()):
        return None
    return Broken("the model's logits are not finite", kv_suspect=True)


def pick(row: Logits, sampling: Sampling, index: int) -> int:
    """Greedy at temperature 0 (the lowest id among equals), else the seeded draw for token `index`."""
    if sampling.temperature == 0.0:
        return int(row.argmax())
    scores = row.astype(np.float64) / sampling.temperature
    return _draw(scores, sampling, uniform(sampling.seed, index))


def log_probability(row: Logits, token: int) -> float:
    """Natural logarithm of the model's own probability of `token`."""
    scores = row.astype(np.float64)
    highest = scores.max()
    return float(scores[token] - highest - np.log(np.exp(scores - highest).sum()))


def blocked_ids(sequence: Sequence, *, width: int) -> NDArray[np.bool_] | None:
    """Ids [width] that may not come now: outside the grammar, or ending the answer before its minimum length.

    A grammar that can only end goes before the minimum length.
    """
    request, sampling = sequence.request, sequence.request.sampling
    blocked = None
    if sequence.grammar is not None:
        enders = frozenset() if sampling.ignore_eos else request.eos_token_ids
        blocked = np.ones(width, dtype=np.bool_)
        allowed = sequence.grammar.allowed(enders)[:width]
        np.logical_not(allowed, out=blocked[: len(allowed)])
    if sequence.next_index < sampling.min_tokens:
        enders = frozenset(sampling.stop_token_ids) | request.eos_token_ids
        longer = np.zeros(width, dtype=np.bool_) if blocked is None else blocked.copy()
        longer[[token for token in enders if token < width]] = True
        if blocked is None or not longer.all():
            return longer
    return blocked


def _penalized(row: Logits, sequence: Sequence) -> Logits:
    """The row with the logits of everything said so far (prompt too) made smaller; the row itself is left alone."""
    penalty = np.float32(sequence.request.sampling.repetition_penalty)
    if penalty == 1.0:
        return row
    if sequence.seen is None:
        sequence.seen = np.zeros(len(row), dtype=np.bool_)
    sequence.seen[sequence.tokens[sequence.seen_count :]] = True
    sequence.seen_count = sequence.length
    return np.where(sequence.seen, np.where(row < 0, row * penalty, row / penalty), row)


def _draw(scores: Scores, sampling: Sampling, unit: float) -> int:
    """Inverse of the cumulative filtered distribution at `unit`. Sorts only the head where that decides it."""
    weights = np.exp(scores - scores.max())
    possible = int(np.count_nonzero(weights))
    assert possible >= 1
    if not sampling.top_k:
        ids = _best(scores, min(possible, _HEAD_COUNT))
        position = _position(np.cumsum(weights[ids]), float(weights.sum()), sampling, unit)
        if position is not None:
            return int(ids[position])
    ids = _best(scores, min(possible, sampling.top_k or possible))
    sums = np.cumsum(weights[ids])
    position = _position(sums, float(sums[-1]), sampling, unit)
    return int(ids[len(ids) - 1 if position is None else position])


def _position(sums: Scores, total: float, sampling: Sampling, unit: float) -> int | None:
    """Where the draw falls in a distribution of which `sums` are the running sums of its highest weights; None if beyond.

    The highest weight is 1. Both filters keep a run of the highest: top_p the shortest run that has that share of the
    total, min_p the weights of at least that share of the highest. A filter that keeps all that we see may keep more.
    """
    kept = len(sums)
    if sampling.top_p < 1.0:
        kept = min(kept, int(np.searchsorted(sums, sampling.top_p * total, side="left")) + 1)
    if sampling.min_p > 0.0:
        kept = min(kept, int(np.count_nonzero(np.diff(sums, prepend=0.0) >= sampling.min_p)))
    cut = kept < len(sums)
    filtered = sampling.top_p < 1.0 or sampling.min_p > 0.0
    if filtered and not cut and total > sums[-1]:
        return None
    mass = float(sums[kept - 1]) if cut else total
    position = int(np.searchsorted(sums[:kept], unit * mass, side="right"))
    if position < kept:
        return position
    return kept - 1 if cut else None


def _best(scores: Scores, count: int) -> NDArray[np.intp]:
    """Ids of the `count` highest scores, by (score falling, id rising)."""
    threshold = np.partition(scores, len(scores) - count)[len(scores) - count]
    ids = np.flatnonzero(scores >= threshold)
    return ids[np.argsort(-scores[ids], kind="stable")][:count]
