"""Pure: what the console shows: the table of services, the receipt of a turn, the words after a start."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.table import Table
from rich.text import Text

COLOURS: Final[Mapping[str, str]] = {
    "ready": "green", "starting": "yellow", "draining": "yellow", "waiting": "red", "silent": "red", "stopped": "dim",
}  # fmt: skip
HEADS: Final = ("SERVICE", "REPLICA", "STATE", "PID", "UP", "RESTARTS", "MEMORY", "METRICS", "LOAD, WHY")
NUMBERS: Final = frozenset(("PID", "UP", "RESTARTS", "MEMORY", "METRICS"))
TABLE_WIDTH_OF_ALL: Final = 120
SOURCES: Final = ("resident", "ram", "nvme", "pool", "shipped", "computed")
QUESTION: Final = "What is the capital of France?"
# Whoever sets keys for the gateway must send one.
KEYS_VARIABLE: Final = "ROOST_GATEWAY_API_KEYS"
# The event of shared/service.py by which a service says why it will not start.
REFUSED: Final = "refused_to_start"


def services_table(shown: Mapping[str, Any], width: int) -> Table:
    """`roost ps`, in so many characters. A narrow one leaves out what can be read elsewhere; only the last column folds."""
    left_out = () if width >= TABLE_WIDTH_OF_ALL else ("SERVICE", "METRICS")
    table = Table(box=None, pad_edge=False, header_style="bold")
    heads = [head for head in HEADS if head not in left_out]
    for head in heads:
        table.add_column(
            head, justify="right" if head in NUMBERS else "left", no_wrap=head != HEADS[-1], overflow="fold"
        )
    for row in shown["services"]:
        state = "degraded" if row["degraded"] and row["state"] == "ready" else row["state"]
        load = " ".join(f"{name}={value:g}" for name, value in sorted(row["load"].items()))
        cells = (
            row["service"],
            row["instance"],
            Text(state, style=COLOURS.get(state, "yellow")),
            str(row["pid"] or "-"),
            duration(row["uptime_s"]),
            str(row["restarts"]),
            f"{row['memory_bytes'] / 2**20:.0f} MiB",
            f":{row['metrics_port']}" if row["metrics_port"] else "-",
            Text("; ".join(part for part in (load, *row["reasons"]) if part)),
        )
        table.add_row(*(cell for head, cell in zip(HEADS, cells, strict=True) if head in heads))
    return table


def duration(seconds: float) -> str:
    """Short, to two units."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def why_refused(lines: Sequence[str]) -> str:
    """The reason that a service gave in the last lines of its log; without one, the last three of them."""
    for line in reversed(lines):
        if REFUSED in line:
            return str(json.loads(line)["error"]) if line.startswith("{") else line
    return "\n  ".join(lines[-3:])


def receipt_line(done: Mapping[str, Any], first_s: float | None, whole_s: float) -> str:
    """Where the prompt's KV came from and how fast the answer was, of a `done` event. Times are as the client saw them."""
    receipt, usage = done["receipt"], done["usage"]
    tokens = receipt["tokens_by_source"]
    came = ", ".join(f"{tokens[source]} {source}" for source in SOURCES if tokens.get(source))
    parts = [f"prompt {usage['prompt_tokens']} ({came or 'no tokens'})"]
    count = usage["completion_tokens"]
    parts.append(f"answer {count}, {done['finish_reason']}")
    if first_s is not None:
        parts.append(f"first token {first_s:.2f} s")
        if count > 1 and whole_s > first_s:
            parts.append(f"{(count - 1) / (whole_s - first_s):.1f} tok/s")
    if receipt["tool_calls"]:
        parts.append(f"tools {receipt['tool_calls']} in {receipt['seconds']['tool']:.2f} s")
    workers = dict.fromkeys(step["worker_id"] for step in receipt["steps"])
    return " | ".join([*parts, *workers])


def how_to(gateway_url: str | None, home: str, environment: Mapping[str, str], *, roost: str, detached: bool) -> str:
    """What to type next, once everything is ready. `roost` is how this command is called from here."""
    stop = f"Stop with {'' if detached else 'Ctrl-C or '}`{roost} down`. Everything is kept in {home}."
    if gateway_url is None:
        return f"No gateway runs: --scale gateway=1 starts one.\n{stop}\n"
    key = " -H 'Authorization: Bearer YOUR-KEY'" if KEYS_VARIABLE in environment else ""
    turn = json.dumps({"content": QUESTION, "temperature": 0})
    return (
        f"The API is at {gateway_url}. Open a session and send it a turn:\n\n"
        f"""  curl {gateway_url}/v1/sessions{key} -d '{{"session_id": "demo"}}'\n"""
        f"  curl -N {gateway_url}/v1/sessions/demo/turns{key} -d '{turn}'\n\n"
        f"or talk to it with `{roost} chat`. See also `{roost} ps`, `{roost} logs -f`, `{roost} scale decode=2`.\n"
        f"{stop}\n"
    )
