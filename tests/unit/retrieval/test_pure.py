"""Passages and rankings are reproducible: they end up in prompts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.retrieval.chunker import passages
from services.retrieval.fusion import fuse


@given(st.text(max_size=3_000), st.integers(10, 500))
def test_passages_are_bounded_complete_and_the_same_each_time(text: str, size: int) -> None:
    """Whatever the document looks like, no passage is too long and no word is lost."""
    parts = passages(text, size)
    assert all(0 < len(part) <= size for part in parts)
    assert "".join("".join(parts).split()) == "".join(text.split())
    assert passages(text, size) == parts


def test_paragraphs_are_kept_together_where_they_fit() -> None:
    """A document of short paragraphs is cut between them, not through them."""
    assert passages("one two\n\nthree four\n\nfive six", 20) == ["one two\nthree four", "five six"]


def test_equal_scores_have_one_order() -> None:
    """F-TOK-06: two passages with equal scores never change places."""
    assert [key for key, _ in fuse([[("b", 0)], [("a", 1)]])] == [("a", 1), ("b", 0)]
    assert [key for key, _ in fuse([[("a", 1)], [("b", 0)]])] == [("a", 1), ("b", 0)]


def test_a_passage_that_is_in_both_rankings_wins() -> None:
    """Second in words and second in vectors beats first in only one of them."""
    assert fuse([[1, 2], [3, 2]])[0][0] == 2
