"""Two decode workers, eight sessions of five turns, all at once: what residency finds in caches, beside round robin.

Simulated engines: what is compared is where turns go. `scripts/bench_turn --real` shows the same with the model.
"""

from __future__ import annotations

from pathlib import Path

from scripts.bench_turn import SESSIONS, Results, cached_share


def test_residency_finds_what_round_robin_computes_again(models: Path) -> None:
    results = Results()
    for policy in ("residency", "round_robin"):
        cached_share(models, policy, SESSIONS, results, engine="sim")
    print(results.checks)
    residency, round_robin = results.checks["cached_share_residency"], results.checks["cached_share_round_robin"]
    assert residency is not None and round_robin is not None
    # How much is given up for an idle worker depends on what computing costs; these made-up prices are low.
    assert residency > round_robin
