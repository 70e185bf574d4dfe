"""Pure: stop strings in a stream of text pieces (F-STR-01, F-STR-04).

Only the suffix that may still become a stop string is held back. When a stop string is complete, nothing of it is given
out; when it does not come, what was held is given out in full.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """One stream. `feed` returns the text that is safe to show; `is_stopped` once a stop string was complete."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.is_stopped = False

    def feed(self, text: str) -> str:
        """Take text in. Raises nothing; after the stop everything is swallowed."""
        if self.is_stopped:
            return ""
        if not self._stops:
            return text
        self._held += text
        found = [position for stop in self._stops if (position := self._held.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            shown, self._held = self._held[: min(found)], ""
            return shown
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def _overlap(self, stop: str) -> int:
        """Length of the longest suffix of what is held that begins `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)

    def flush(self) -> str:
        """The stream has ended without a stop: what was held is text after all."""
        shown, self._held = self._held, ""
        return "" if self.is_stopped else shown
