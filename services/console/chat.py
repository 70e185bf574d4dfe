"""`roost chat`: a conversation in the terminal, streamed, with a receipt after each turn."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from services.console.errors import ConsoleError
from services.console.gateway_client import GatewayClient
from services.console.render import receipt_line


def chat(client: GatewayClient, session_id: str, out: Console) -> None:
    """Ask, answer, again, until the input ends."""
    out.print(f"session {session_id}; Ctrl-C stops an answer, Ctrl-D ends", style="dim", markup=False)
    while True:
        try:
            text = out.input("[bold]> [/bold]").strip()
        except (EOFError, KeyboardInterrupt):
            out.print()
            return
        if not text:
            continue
        try:
            _turn(client, session_id, text, out)
        except KeyboardInterrupt:
            # The connection is closed by then, and with on_disconnect=cancel the turn ends.
            out.print("\nstopped", style="dim")
        except ConsoleError as wrong:
            out.print(str(wrong), style="red", markup=False)


def _turn(client: GatewayClient, session_id: str, text: str, out: Console) -> None:
    began = time.monotonic()
    first_s: float | None = None
    for kind, data in client.stream_turn(session_id, text):
        if kind == "text":
            first_s = time.monotonic() - began if first_s is None else first_s
            out.out(data["text"], end="", highlight=False)
        elif kind == "done":
            line = receipt_line(data, first_s, time.monotonic() - began)
            out.print(f"\n{line}\n", style="dim", markup=False, soft_wrap=True)
        else:
            _show(kind, data, out)


def _show(kind: str, data: Mapping[str, Any], out: Console) -> None:
    match kind:
        case "tool_call":
            out.print(f"\ncalls {data['name']} {data['arguments']}", style="cyan", markup=False)
        case "tool_result":
            out.print(
                f"{data['name']}: {data['outcome']}, {data['seconds']:.2f} s\n{data['content']}",
                style="cyan", markup=False,
            )  # fmt: skip
        case "failed":
            raise ConsoleError(f"\n{data['error']['code']}: {data['error']['message']}")
