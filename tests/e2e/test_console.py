"""`roost turn` and `roost chat` against the whole system."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.e2e.system import System

WITHIN_S = 110.0


def roost(system: System, *words: str, said: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "services.console", *words, "--url", system.url],
        input=said, capture_output=True, text=True, timeout=WITHIN_S, check=False,
    )  # fmt: skip


def test_turn_prints_json(system: System) -> None:
    ran = roost(system, "turn", "What is the capital of France?")
    assert ran.returncode == 0, ran.stderr
    answer = json.loads(ran.stdout)
    assert answer["status"] == "done" and answer["text"] and answer["receipt"]["steps"]


def test_chat_streams_and_shows_a_receipt_after_each_turn(system: System) -> None:
    ran = roost(system, "chat", said="What is the capital of France?\n\nAnd of Italy?\n")
    assert ran.returncode == 0, ran.stderr
    receipts = [line for line in ran.stdout.splitlines() if line.startswith("prompt ")]
    assert len(receipts) == 2
    assert all("computed" in line and "decode-0" in line for line in receipts)
    assert "resident" in receipts[1]


def test_a_gateway_that_is_not_there_is_said(system: System) -> None:
    refused = subprocess.run(
        [sys.executable, "-P", "-m", "services.console", "turn", "x", "--url", "http://127.0.0.1:9"],
        capture_output=True, text=True, timeout=WITHIN_S, check=False,
    )  # fmt: skip
    assert refused.returncode == 2 and "http://127.0.0.1:9" in refused.stderr and "Traceback" not in refused.stderr
