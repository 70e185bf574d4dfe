"""What the C library keeps of memory that is not in use any more."""

from __future__ import annotations

import ctypes
from typing import Final

# Only glibc has it; elsewhere nothing is given back.
_TRIM: Final = getattr(ctypes.CDLL(None), "malloc_trim", None)


def release_free_memory() -> None:
    """Give freed memory back to the system: after parsing something large once, never on the way of a turn."""
    if _TRIM is not None:
        _TRIM(0)
