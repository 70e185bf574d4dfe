"""Prices: what a few steps show, and that they follow what really ran."""

from __future__ import annotations

import pytest

from proto.generate import WorkerPrice
from shared.worker.price import SCALE_MAX, PriceKeeper, fit


def test_a_line_goes_through_the_measured_sizes() -> None:
    """0.01 s and 0.001 s a token; 0.03 s and 0.002 s a stream. Mixed steps say nothing."""
    steps = [(16, 0, 16, 0.026), (128, 0, 128, 0.138), (0, 1, 9, 0.032), (0, 4, 40, 0.038), (64, 4, 0, 9.0)]
    price = fit(steps, WorkerPrice(load_base_s=0.5))
    assert price.prefill_base_s == pytest.approx(0.01) and price.prefill_token_s == pytest.approx(0.001)
    assert price.decode_base_s == pytest.approx(0.03) and price.decode_stream_s == pytest.approx(0.002)
    assert price.load_base_s == 0.5
    assert fit([], WorkerPrice()) == WorkerPrice()


def test_one_size_is_all_slope_and_slopes_stay_positive() -> None:
    """A larger step that was quicker by chance must not make work free."""
    assert fit([(10, 0, 0, 0.1)], WorkerPrice()).prefill_token_s == pytest.approx(0.01)
    assert fit([(10, 0, 0, 0.1), (20, 0, 0, 0.05)], WorkerPrice()).prefill_token_s > 0


def test_the_price_follows_the_machine() -> None:
    """Twice as slow in both; a stall of an hour is cut; two steps are not enough."""
    keeper = PriceKeeper(
        WorkerPrice(prefill_base_s=0.0, prefill_token_s=0.001, decode_base_s=0.03, decode_stream_s=0.0)
    )
    keeper.hear_steps([(100, 0, 0, 0.2)] * 2)
    assert keeper.price.prefill_token_s == 0.001
    keeper.hear_steps([(100, 0, 0, 0.2)] * 3 + [(0, 1, 0, 0.06)] * 3)
    assert keeper.price.prefill_token_s == pytest.approx(0.002) and keeper.price.decode_base_s == pytest.approx(0.06)
    assert keeper.compute_s(100) == pytest.approx(0.2)
    keeper.hear_steps([(100, 0, 0, 3600.0)] * 3)
    assert keeper.price.prefill_token_s == pytest.approx(0.001 * SCALE_MAX)
    before = keeper.price.load_byte_s
    keeper.hear_load(0, 1.0)
    assert keeper.price.load_byte_s == before
    keeper.hear_load(1_000_000, 1.0)
    assert keeper.price.load_byte_s > before
