"""Pure: tokens of one step -> what of it is shown, in one pipeline: detokenize -> stop strings -> tool calls (F-STR-05).

The result depends on the tokens only, not on how they were cut into deltas, so a resumed step says the same again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from proto.chat import ToolCall
from services.loop.stops import StopMatcher
from services.loop.tool_parsing import ToolCallParser


class Detokenizer(Protocol):
    """The part of shared.tokenizer.IncrementalDecoder that is needed here."""

    def feed(self, token_id: int) -> str:
        """Text that became final."""
        ...

    def flush(self) -> str:
        """What was held."""
        ...


@dataclass(frozen=True, slots=True)
class Shown:
    """Pieces for the tokens that were taken; fewer than were fed when a stop string ended the step among them."""

    pieces: tuple[str, ...]


class StepText:
    """One step's text and calls."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str], parser: ToolCallParser) -> None:
        self._detokenizer = detokenizer
        self._stops = StopMatcher(stops)
        self._parser = parser
        self.calls: list[ToolCall] = []
        self._text: list[str] = []

    @property
    def is_stopped(self) -> bool:
        """A stop string was completed."""
        return self._stops.is_stopped

    @property
    def text(self) -> str:
        """Everything shown so far."""
        return "".join(self._text)

    def feed(self, token_ids: Sequence[int]) -> Shown:
        """Take tokens in, up to the one that completes a stop string."""
        pieces = []
        for token_id in token_ids:
            pieces.append(self._through(self._detokenizer.feed(token_id)))
            if self.is_stopped:
                break
        return Shown(tuple(pieces))

    def _through(self, text: str) -> str:
        parsed = self._parser.feed(self._stops.feed(text))
        self.calls.extend(parsed.calls)
        self._text.append(parsed.text)
        return parsed.text

    def flush(self) -> str:
        """The step has ended: what was held is shown, an unfinished call is a malformed one."""
        held = self._through(self._detokenizer.flush())
        parsed = self._parser.feed(self._stops.flush())
        last = self._parser.flush()
        self.calls.extend((*parsed.calls, *last.calls))
        self._text.extend((parsed.text, last.text))
        return held + parsed.text + last.text
