"""Pure: from messages to spans of tokens that are appended to a session, and the keys of the prompt they make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from proto.chat import ChatMessage, Role, ToolSpec
from proto.sessions import Span
from services.loop.template import ChatTemplate, Piece


class Encoder(Protocol):
    """The part of shared.tokenizer.Tokenizer that is needed here."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end an answer."""
        ...

    def encode_content(self, text: str) -> tuple[int, ...]:
        """Ids of untrusted text."""
        ...

    def encode_markup(self, text: str) -> tuple[int, ...]:
        """Ids of the template's text."""
        ...

    def text_of_special(self, token_id: int) -> str:
        """How a control token is written."""
        ...


class ContextBuilder:
    """Makes the spans that a turn or its tool results add. Holds no session."""

    def __init__(self, template: ChatTemplate, encoder: Encoder) -> None:
        self._template = template
        self._encoder = encoder

    def opening(self, system: str, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> tuple[Span, ...]:
        """Spans of a session's first turn."""
        head = (ChatMessage(role=Role.SYSTEM, content=system),) if system else ()
        return self._spans(self._template.opening((*head, *messages), tools), messages[-1].role)

    def following(self, messages: Sequence[ChatMessage], last_token: int) -> tuple[Span, ...]:
        """Spans that follow an answer which ended with `last_token`; its end marker is not said twice."""
        pieces = self._template.following(messages)
        if last_token in self._encoder.eos_token_ids and pieces and pieces[0].is_markup:
            marker = self._encoder.text_of_special(last_token)
            text = pieces[0].text
            pieces[0] = Piece(text.removeprefix(marker), is_markup=True)
        return self._spans(pieces, messages[-1].role)

    def _spans(self, pieces: Sequence[Piece], role: Role) -> tuple[Span, ...]:
        spans = []
        for piece in pieces:
            encode = self._encoder.encode_markup if piece.is_markup else self._encoder.encode_content
            tokens = encode(piece.text)
            if tokens:
                spans.append(Span(role=Role.SYSTEM if piece.is_markup else role, tokens=tokens, text=piece.text))
        return tuple(spans)


def tokens_of(spans: Sequence[Span]) -> tuple[int, ...]:
    """The spans' tokens, in order."""
    return tuple(token for span in spans for token in span.tokens)
