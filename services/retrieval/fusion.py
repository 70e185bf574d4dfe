"""Pure: one ranking from several, by reciprocal rank (Cormack, Clarke and Buettcher, SIGIR 2009: 1 / (60 + rank))."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final, TypeVar

RANK_CONSTANT: Final = 60

K = TypeVar("K", bound=Hashable)


def fuse(rankings: Sequence[Sequence[K]]) -> list[tuple[K, float]]:
    """Keys with their fused scores, best first. Equal scores keep the order of the keys, so the answer is reproducible."""
    scores: dict[K, float] = {}
    for ranking in rankings:
        for rank, key in enumerate(ranking, start=1):
            scores[key] = scores.get(key, 0.0) + 1.0 / (RANK_CONSTANT + rank)
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))
