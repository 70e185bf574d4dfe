"""Pure: documents -> passages. The same text gives the same passages, always, since they end up in prompts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

# Where a text may be cut, best first: paragraph, line, sentence, word.
BREAKS: Final = (re.compile(r"\n\s*\n"), re.compile(r"\n"), re.compile(r"(?<=[.!?])\s+"), re.compile(r"\s+"))


def _parts(text: str, size: int, level: int = 0) -> Iterator[str]:
    """Runs of text of at most `size` characters, cut at the best break that makes them small enough."""
    if len(text) <= size:
        yield text
        return
    if level == len(BREAKS):
        yield from (text[start : start + size] for start in range(0, len(text), size))
        return
    for part in BREAKS[level].split(text):
        yield from _parts(part, size, level + 1)


def passages(text: str, size: int) -> list[str]:
    """Passages of at most `size` characters, in order. Small neighbours are joined; blanks at the ends go."""
    joined: list[str] = []
    for part in _parts(text, size):
        part = part.strip()
        if not part:
            continue
        if joined and len(joined[-1]) + 1 + len(part) <= size:
            joined[-1] = f"{joined[-1]}\n{part}"
        else:
            joined.append(part)
    return joined
