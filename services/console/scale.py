"""Pure: how many replicas of each service there shall be, from the words of a command line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from services.console.errors import ConsoleError
from shared.settings import SERVICES

REPLICAS_MAX: Final = 64
DEFAULT_REPLICAS: Final = 1


def parse_scale(words: Iterable[str]) -> dict[str, int]:
    """`decode=3` -> {"decode": 3}. Raises ConsoleError naming the word at fault."""
    wanted: dict[str, int] = {}
    for word in words:
        service, equals, count = word.partition("=")
        if not equals or not count.isascii() or not count.isdigit():
            raise ConsoleError(f"{word!r}: expected SERVICE=COUNT, such as decode=3")
        if service not in SERVICES:
            raise ConsoleError(f"{word!r}: no service is called {service!r}; there are {', '.join(SERVICES)}")
        if service in wanted:
            raise ConsoleError(f"{word!r}: {service} is scaled twice")
        # The length is looked at first: int() of a very long number is slow and then refused by Python itself.
        if len(count) > 6 or int(count) > REPLICAS_MAX:
            raise ConsoleError(f"{word!r}: at most {REPLICAS_MAX} replicas")
        wanted[service] = int(count)
    return wanted


def replicas_of(scaled: dict[str, int], left_out: Iterable[str] = ()) -> dict[str, int]:
    """Every service with its count: one, unless scaled or left out."""
    wanted = dict.fromkeys(SERVICES, DEFAULT_REPLICAS) | scaled
    for service in left_out:
        if service not in SERVICES:
            raise ConsoleError(f"no service is called {service!r}; there are {', '.join(SERVICES)}")
        wanted[service] = 0
    return wanted
