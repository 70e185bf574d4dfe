"""What goes into a step: streams first, prompts share the rest, nobody starves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.engine.batch import Phase, Sequence, StepBudget, plan_step
from tests.tiny_model import prompt_of, request_of

BUDGET = StepBudget(alone_tokens=100, shared_tokens=40, bite_tokens=8)


def sequence_of(phase: Phase, length: int, computed: int = 0) -> Sequence:
    """A sequence with so many tokens."""
    tokens = prompt_of(length)
    return Sequence(
        request=request_of("r", tokens),
        tokens=list(tokens),
        keys=[],
        block_tokens=16,
        blocks=[],
        grammar=None,
        already_over=False,
        phase=phase,
        computed=computed,
    )


def test_prompts_alone_share_the_large_budget() -> None:
    """Nobody waits for tokens: big steps. A short prompt leaves its share to the others."""
    prompts = [sequence_of(Phase.PREFILLING, length) for length in (10, 500, 500)]
    assert [chunk.count for chunk in plan_step(prompts, BUDGET)] == [10, 45, 45]
    assert [chunk.count for chunk in plan_step(prompts[:1], BUDGET)] == [10]


def test_streams_all_get_their_token_however_many_they_are() -> None:
    """F-RES-03: a long prompt beside streams gets small bites, and at least one bite, so it ends too (F-RES-04)."""
    stream, prompt = sequence_of(Phase.DECODING, 20, 19), sequence_of(Phase.PREFILLING, 500)
    assert [chunk.count for chunk in plan_step([prompt, stream], BUDGET)] == [1, 39]
    assert [chunk.count for chunk in plan_step([prompt, *[stream] * 90], BUDGET)] == [1] * 90 + [8]


@given(
    prompts=st.lists(st.integers(1, 300), max_size=30),
    streams=st.integers(0, 60),
)
def test_a_step_is_bounded_and_makes_progress(prompts: list[int], streams: int) -> None:
    """Whatever is there: within the budget, one chunk a sequence, empty only when there is nothing."""
    sequences = [sequence_of(Phase.PREFILLING, length) for length in prompts]
    decoding = [sequence_of(Phase.DECODING, 5, 4) for _ in range(streams)]
    chunks = plan_step([*sequences, *decoding], BUDGET)
    assert bool(chunks) == bool(prompts or streams)
    assert len({id(chunk.sequence) for chunk in chunks}) == len(chunks)
    prefill = sum(chunk.count for chunk in chunks if chunk.sequence.phase is Phase.PREFILLING)
    assert prefill <= (max(BUDGET.shared_tokens - streams, BUDGET.bite_tokens) if streams else BUDGET.alone_tokens)
    assert len(chunks) - streams == 0 if not prompts else len(chunks) > streams
