"""Sampling: the same token for the same (logits, seed, index), whatever else happens; filters as users know them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proto.chat import Sampling
from shared.engine.batch import Broken, Choice, Sequence
from shared.engine.sampler import choose, log_probability, pick, uniform
from tests.tiny_model import request_of


def sequence_of(*tokens: int, **changes: Any) -> Sequence:
    """A sequence about to choose its next token."""
    grammar = changes.pop("state", None)
    request = request_of("r", tokens, **changes)
    return Sequence(
        request=request,
        tokens=list(tokens),
        keys=[],
        block_tokens=16,
        blocks=[],
        grammar=grammar,
        already_over=False,
    )


def naive_draw(row: np.ndarray[Any, Any], sampling: Sampling, unit: float) -> int:
    """The definition, with a whole sort."""
    scores = row.astype(np.float64) / sampling.temperature
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    if sampling.top_k:
        order = order[: sampling.top_k]
    weights = [float(np.exp(scores[index] - scores[order[0]])) for index in order]
    kept = len(order)
    if sampling.top_p < 1:
        sums = np.cumsum(weights)
        kept = min(kept, int(np.argmax(sums >= sampling.top_p * sums[-1])) + 1)
    if sampling.min_p > 0:
        kept = min(kept, sum(weight >= sampling.min_p for weight in weights))
    sums = np.cumsum(weights[:kept])
    return order[min(int(np.searchsorted(sums, unit * sums[-1], side="right")), kept - 1)]


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**63 - 1),
    index=st.integers(0, 10_000),
    temperature=st.sampled_from([0.05, 0.7, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.1]),
    top_k=st.sampled_from([0, 1, 5, 300]),
    min_p=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    spread=st.sampled_from([0.01, 1.0, 6.0]),
)
def test_the_fast_draw_is_the_defined_one(
    seed: int, index: int, temperature: float, top_p: float, top_k: int, min_p: float, spread: float
) -> None:
    """Only the head of the vocabulary is sorted where that is enough; the token is that of the whole sort."""
    row = (np.random.default_rng(seed % 2**32).standard_normal(1500) * spread).astype(np.float32)
    row[3] = row[4]
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed)
    assert pick(row, sampling, index) == naive_draw(row, sampling, uniform(seed, index))


def test_draws_follow_the_distribution() -> None:
    """Many seeds: the share of each token is its probability (chi square over three tokens)."""
    row = np.log(np.array([0.5, 0.3, 0.2], dtype=np.float32))
    counts = np.zeros(3)
    for seed in range(4_000):
        counts[pick(row, Sampling(temperature=1.0, seed=seed), 3)] += 1
    assert np.abs(counts / counts.sum() - [0.5, 0.3, 0.2]).max() < 0.03


def test_uniform_is_fixed_for_ever() -> None:
    """A new version must go on with a stream that an old one began: these numbers never change."""
    assert uniform(0, 0) == 0.044677981169000125
    assert uniform(2**63 - 1, 10**6) == 0.17188522153261654


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    """As torch.argmax does, so that greedy answers equal plain transformers."""
    assert pick(np.array([1.0, 3.0, 3.0], dtype=np.float32), Sampling(), 0) == 1


def test_not_finite_logits_fail_the_request_and_taint_its_kv() -> None:
    """A damaged weight gives NaN: the request is told, and nobody reuses what it computed."""
    row = np.array([0.0, np.nan, 1.0], dtype=np.float32)
    assert choose(row, sequence_of(1)) == Broken("the model's logits are not finite", kv_suspect=True)


def test_minimum_length_keeps_the_answer_going() -> None:
    """min_tokens counts from the generation's first token, over all attempts."""
    row = np.array([0.0, 5.0, 1.0], dtype=np.float32)
    sampling = Sampling(max_tokens=9, min_tokens=2, stop_token_ids=(2,))
    enders = frozenset({1})
    assert choose(row, sequence_of(7, sampling=sampling, eos_token_ids=enders)) == Choice(0, None)
    assert choose(row, sequence_of(7, 0, emitted=1, sampling=sampling, eos_token_ids=enders)) == Choice(0, None)
    assert choose(row, sequence_of(7, 0, 0, emitted=2, sampling=sampling, eos_token_ids=enders)) == Choice(1, None)


def test_repetition_penalty_counts_prompt_and_answer() -> None:
    """Tokens of the prompt and those just said are made less likely, whichever sign their logit has."""
    row = np.array([2.0, 1.9, -0.5, -0.6], dtype=np.float32)
    sampling = Sampling(repetition_penalty=1.5)
    sequence = sequence_of(0, sampling=sampling)
    assert choose(row, sequence) == Choice(1, None)
    sequence.tokens.append(1)
    assert choose(row, sequence) == Choice(0, None)
    assert choose(np.array([-0.5, -0.6], dtype=np.float32), sequence_of(0, sampling=sampling)) == Choice(1, None)


def test_log_probability_is_the_models_own() -> None:
    """Whatever temperature chose the token, its log-probability is that of the untouched distribution."""
    row = np.log(np.array([0.7, 0.2, 0.1], dtype=np.float32))
    choice = choose(row, sequence_of(5, sampling=Sampling(temperature=2.0, top_k=1, logprobs=0)))
    assert isinstance(choice, Choice) and choice.logprob == pytest.approx(np.log(0.7), abs=1e-6)
    assert log_probability(row, 2) == pytest.approx(np.log(0.1), abs=1e-6)


def test_forced_tokens_are_said_instead() -> None:
    """Replay of a recorded turn: the token at each index is the recorded one, then sampling goes on."""
    row = np.array([9.0, 0.0, 0.0], dtype=np.float32)
    assert choose(row, sequence_of(5, forced=(2, 1))) == Choice(2, None)
    assert choose(row, sequence_of(5, 2, emitted=1, forced=(2, 1))) == Choice(1, None)
    assert choose(row, sequence_of(5, 2, 1, emitted=2, forced=(2, 1))) == Choice(0, None)


def test_minimum_length_gives_way_to_a_grammar_that_can_only_end() -> None:
    """min_tokens beside a grammar that is complete: the answer ends instead of failing."""

    class Ended:
        """Only the end may come."""

        ended = False

        def allowed(self, eos_token_ids: frozenset[int]) -> np.ndarray[Any, np.dtype[np.bool_]]:
            return np.array([False, True, False])

        def advance(self, token: int) -> bool:
            return True

    row = np.array([5.0, 0.0, 1.0], dtype=np.float32)
    sampling = Sampling(max_tokens=9, min_tokens=5)
    assert choose(row, sequence_of(2, sampling=sampling, eos_token_ids=frozenset({1}), state=Ended())) == Choice(
        1, None
    )
