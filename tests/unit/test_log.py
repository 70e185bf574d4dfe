"""Logs must never be the reason that a service ends."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from shared import log
from shared.metrics import REGISTRY


@pytest.fixture(autouse=True)
def unconfigured() -> Iterator[None]:
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def lost() -> float:
    return REGISTRY.get_sample_value("roost_log_lines_lost_total") or 0.0


def test_a_full_disk_costs_lines_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that the supervisor opened for our standard error has no room."""
    before = lost()
    full = Path("/dev/full").open("w", buffering=1)  # noqa: SIM115 - its close must fail
    monkeypatch.setattr(sys, "stderr", full)
    log.configure(service="loop", instance="loop-0", form="json", level="info")
    for _ in range(3):
        log.get_logger().warning("append_waits", error="no room")
    monkeypatch.undo()
    assert lost() == before + 3
    with pytest.raises(OSError, match="No space"):
        full.close()


def test_a_line_carries_who_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(service="loop", instance="loop-0", form="json", level="info")
    with log.context(session="s1"):
        log.get_logger().info("opened", tokens=3)
    log.get_logger().debug("not at this level")
    (line,) = capsys.readouterr().err.splitlines()
    said = json.loads(line)
    expected = {
        "event": "opened",
        "tokens": 3,
        "session": "s1",
        "service": "loop",
        "instance": "loop-0",
        "level": "info",
    }
    assert {name: said[name] for name in expected} == expected
