"""Time that only events move, and everything random from one seed. The same seed gives the same run, event for event."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable

# A storm says some thousand lines.
TRACE_LINES_MAX = 100_000


class Life:
    """One life of one node. What it had planned dies with it; a paused one does it late, as a stopped process would."""

    def __init__(self, node: str, epoch: int) -> None:
        self.node, self.epoch = node, epoch
        self.is_on = True
        self.paused_until = 0.0


class World:
    """The event queue. `now` is seconds, for all nodes both wall and monotonic time."""

    def __init__(self, seed: int, *, verbose: bool = False) -> None:
        self.seed, self.verbose = seed, verbose
        self.random = random.Random(seed)
        self.now = 0.0
        self.trace: deque[str] = deque(maxlen=TRACE_LINES_MAX)
        self._events: list[tuple[float, int, Life | None, Callable[[], None]]] = []
        self._count = 0

    def after(self, seconds: float, action: Callable[[], None], life: Life | None = None) -> None:
        """Do it later, if `life` then still lasts."""
        self._push(self.now + max(seconds, 0.0), life, action)

    def every(self, seconds: float, action: Callable[[], None], life: Life) -> None:
        """Do it now and again and again while `life` lasts."""

        def again() -> None:
            action()
            self.after(seconds, again, life)

        again()

    def run(self, until: float) -> None:
        """Let happen what happens up to this time."""
        while self._events and self._events[0][0] <= until:
            at, _, life, action = heapq.heappop(self._events)
            self.now = at
            if life is None:
                action()
            elif life.is_on and life.paused_until > at:
                self._push(life.paused_until, life, action)
            elif life.is_on:
                action()
        self.now = until

    def say(self, who: str, what: str) -> None:
        """A line of the trace."""
        line = f"{self.now:9.3f} {who:<10} {what}"
        self.trace.append(line)
        if self.verbose:
            print(line)

    def _push(self, at: float, life: Life | None, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (at, self._count, life, action))
