"""Structured logs: one line an event, carrying service, instance, session, turn, request and worker ids where known."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import structlog
from structlog.typing import FilteringBoundLogger

from shared.metrics import counter

Logger = FilteringBoundLogger

LINES_LOST = counter("roost_log_lines_lost_total", "Log lines that could not be written: a full disk, a closed pipe.")


class _Lines:
    """Writes lines to what is standard error when it is made. One that cannot be written is counted: no service ends of it."""

    def __init__(self) -> None:
        self._file = sys.stderr

    def write(self, line: str) -> None:
        """Write it now."""
        try:
            self._file.write(f"{line}\n")
            self._file.flush()
        except OSError:
            LINES_LOST.inc()

    # The names by which structlog calls its innermost logger.
    debug = info = warning = error = critical = write


def configure(*, service: str, instance: str, form: Literal["console", "json"], level: str) -> None:
    """Set up logging for this process; called once, before the first line."""
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer(sort_keys=False)
        if form == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=_Lines,
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service, instance=instance)


def get_logger() -> Logger:
    """A logger; every module may have its own."""
    logger: Logger = structlog.get_logger()
    return logger


@contextmanager
def context(**ids: str) -> Iterator[None]:
    """Carry these ids on every line logged inside, in this task and those it starts."""
    with structlog.contextvars.bound_contextvars(**ids):
        yield
