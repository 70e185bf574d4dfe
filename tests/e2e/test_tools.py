"""Tools that Roost runs itself: in the sandbox, once, and never beyond their bounds."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.client import Answer, Session
from tests.e2e.system import System


def forced(system: System, code: str) -> Answer:
    """A turn whose first step is made to call `python` with this code; the small model would not find it by itself.

    It would go on calling it, though: the second step is the last one.
    """
    session = Session(system.url, tools=["python"])
    choice = {"name": "python", "arguments": {"code": code}}
    return session.turn("Use the tool.", tool_choice=choice, max_tokens=96, max_steps=2)


def result_of(answer: Answer) -> dict[str, Any]:
    """What the forced call came to; it ran once."""
    calls = [event for _, kind, event in answer.events if kind == "tool_call"]
    results = [event for _, kind, event in answer.events if kind == "tool_result"]
    assert results, answer.events
    assert [call["call_id"] for call in calls].count(results[0]["call_id"]) == 1
    assert [result["call_id"] for result in results].count(results[0]["call_id"]) == 1
    return results[0]


def test_a_forced_call_runs_once_and_the_turn_goes_on(system: System) -> None:
    answer = forced(system, "print(6 * 7)")
    result = result_of(answer)
    assert result["outcome"] == "ok" and "42" in result["content"]
    assert len(answer.done["receipt"]["steps"]) == 2


# Case -> code, and how it must end.
HOSTILE = {
    "loops for ever": ("while True: pass", ("timeout", "killed")),
    "forks": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", ("killed", "timeout")),
    "allocates 10 GB": ("x = bytearray(10 * 2**30)\nprint('o' + 'pen')", ("error", "killed")),
    "prints 1 GB": ("for _ in range(1024): print('x' * 2**20)", ("output_limit",)),
    "opens a socket": (
        "import socket\nsocket.create_connection(('127.0.0.1', PORT), 2)\nprint('o' + 'pen')", ("error",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_code_ends_within_its_bounds(system: System, case: str) -> None:
    code, outcomes = HOSTILE[case]
    # A port on which somebody does listen, outside of the sandbox.
    answer = forced(system, code.replace("PORT", str(system.nats.port)))
    result = result_of(answer)
    assert result["outcome"] in outcomes, result
    assert len(result["content"]) < 200_000 and result["seconds"] < 60
    assert "open" not in result["content"].splitlines()
    assert answer.done["finish_reason"]
