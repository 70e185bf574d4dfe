"""Time as something that is handed in, so that cores and simulations never read the real clock."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Where shells get `now` from."""

    def now(self) -> float:
        """Seconds since 1970; comparable between machines, may be set back."""
        ...

    def monotonic(self) -> float:
        """Seconds since some moment of this process; never goes back."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        ...


class RealClock:
    """The machine's clock. The only caller of `time` and `asyncio.sleep` on the way of a turn."""

    def now(self) -> float:
        """See Clock."""
        return time.time()

    def monotonic(self) -> float:
        """See Clock."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """See Clock."""
        await asyncio.sleep(seconds)
