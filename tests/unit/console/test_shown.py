"""What the console shows, and how it keeps its files bounded."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from services.console import logs, processes
from services.console.control import is_locked, lock
from services.console.errors import ConsoleError
from services.console.gateway_client import GatewayClient, error_text
from services.console.render import duration, how_to, receipt_line, services_table, why_refused
from services.console.settings import gateway_address
from services.console.supervisor import free_port

DONE: dict[str, Any] = {
    "finish_reason": "stop",
    "usage": {"prompt_tokens": 80, "completion_tokens": 11},
    "receipt": {
        "tokens_by_source": {"computed": 16, "resident": 48, "nvme": 16},
        "tool_calls": 1,
        "seconds": {"tool": 0.25},
        "steps": [{"worker_id": "decode-0"}, {"worker_id": "decode-1"}, {"worker_id": "decode-0"}],
    },
}


def test_a_receipt_says_where_the_prompt_came_from() -> None:
    line = receipt_line(DONE, 0.5, 2.5)
    assert "prompt 80 (48 resident, 16 nvme, 16 computed)" in line
    assert "answer 11, stop" in line and "first token 0.50 s" in line and "5.0 tok/s" in line
    assert "tools 1 in 0.25 s" in line and line.endswith("decode-0 | decode-1")


def test_a_receipt_without_a_first_token() -> None:
    empty = DONE | {"usage": {"prompt_tokens": 0, "completion_tokens": 0}}
    empty["receipt"] = DONE["receipt"] | {"tokens_by_source": {}, "tool_calls": 0}
    assert receipt_line(empty, None, 1.0) == "prompt 0 (no tokens) | answer 0, stop | decode-0 | decode-1"


@pytest.mark.parametrize("key", [True, False])
def test_how_to_asks_for_a_key_only_where_one_is_needed(key: bool) -> None:
    environment = {"ROOST_GATEWAY_API_KEYS": '{"k": "t"}'} if key else {}
    words = how_to("http://127.0.0.1:8080", "/home", environment, roost="./r", detached=False)
    assert ("Authorization: Bearer" in words) == key
    assert "Ctrl-C or `./r down`" in words and "`./r chat`" in words


def test_how_to_without_a_gateway() -> None:
    assert "No gateway runs" in how_to(None, "/home", {}, roost="roost", detached=True)


def test_the_table_of_services_folds_in_a_narrow_terminal_and_loses_nothing() -> None:
    row = {
        "service": "decode", "instance": "decode-0", "state": "ready", "degraded": True, "reasons": ["no kvstore is heard"],
        "load": {"blocks_used": 0.25, "room": 8.0}, "pid": 4711, "metrics_port": 40123, "uptime_s": 61.0, "restarts": 2,
        "memory_bytes": 3 << 20,
    }  # fmt: skip
    console = Console(width=80)
    with console.capture() as shown:
        console.print(services_table({"services": [row]}, console.width))
    for word in ("decode-0", "degraded", "4711", "1m01s", "3 MiB", "room=8", "blocks_used=0.25"):
        assert word in shown.get()
    assert "…" not in shown.get() and ":40123" not in shown.get()
    with (wide := Console(width=150)).capture() as shown:
        wide.print(services_table({"services": [row]}, wide.width))
    assert ":40123" in shown.get() and "no kvstore is heard" in shown.get()


def test_durations() -> None:
    assert [duration(seconds) for seconds in (0.9, 59, 61, 3661)] == ["0s", "59s", "1m01s", "1h01m"]


def test_a_log_is_moved_aside_and_its_writer_goes_on_at_the_new_end(tmp_path: Path) -> None:
    file = tmp_path / "decode-0.log"
    with file.open("ab", buffering=0) as writer:
        writer.write(b"old\n" * 100)
        processes.rotate(file, 1_000)
        assert file.stat().st_size == 400
        processes.rotate(file, 100)
        writer.write(b"new\n")
    assert file.read_bytes() == b"new\n"
    assert (tmp_path / "decode-0.log.1").read_bytes() == b"old\n" * 100


def test_a_log_that_cannot_be_copied_is_emptied_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full, of logs perhaps. Half a copy is not left there either."""

    def no_room(_: Path, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    file = tmp_path / "decode-0.log"
    file.write_bytes(b"old\n" * 100)
    monkeypatch.setattr(processes.shutil, "copyfile", no_room)
    processes.rotate(file, 100)
    assert [(path.name, path.stat().st_size) for path in tmp_path.iterdir()] == [("decode-0.log", 0)]


def test_the_tail_of_a_log_is_bounded(tmp_path: Path) -> None:
    file = tmp_path / "x.log"
    file.write_bytes(b"a" * 10 * processes.TAIL_BYTES + b"\n" + b"ende\n" + b"\xff\n")
    assert processes.tail(file, 2) == ["ende", "\ufffd"]
    assert sum(map(len, processes.tail(file, 1_000))) <= processes.TAIL_BYTES
    assert processes.tail(tmp_path / "none.log", 5) == []


def test_logs_are_found_by_replica_service_or_all(tmp_path: Path) -> None:
    for name in ("decode-0", "decode-1", "nats"):
        (tmp_path / f"{name}.log").write_text(f"{name} says\n")
    assert [file.stem for file in logs.files_of(tmp_path, "decode")] == ["decode-0", "decode-1"]
    said: list[str] = []
    logs.show(logs.files_of(tmp_path, "nats"), 10, said.append)
    assert said == ["nats says"]
    assert len(logs.files_of(tmp_path, None)) == 3
    with pytest.raises(ConsoleError, match="decode-1, nats"):
        logs.files_of(tmp_path, "walrus")


def test_one_supervisor_a_home(tmp_path: Path) -> None:
    assert not is_locked(tmp_path / "none")
    handle = lock(tmp_path)
    assert is_locked(tmp_path)
    with pytest.raises(ConsoleError, match="already runs in"):
        lock(tmp_path)
    os.close(handle)
    assert not is_locked(tmp_path)
    os.close(lock(tmp_path))


@pytest.mark.parametrize("text", ["", "x", "70000", "-1", "８０"])
def test_a_gateway_port_that_is_none_is_named(text: str) -> None:
    with pytest.raises(ConsoleError, match="ROOST_GATEWAY_PORT"):
        gateway_address({"ROOST_GATEWAY_PORT": text})


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConsoleError, match="ROOST_X"):
            free_port("127.0.0.1", taken.getsockname()[1], "ROOST_X")


@pytest.mark.parametrize("url", ["", "localhost:8080", "ftp://x", "http://"])
def test_a_url_that_is_none_is_named(url: str) -> None:
    with pytest.raises(ConsoleError, match="not the URL"):
        GatewayClient(url, None)


def test_what_a_gateway_refused_is_said_in_its_words() -> None:
    body = b'{"error": {"message": "too long", "param": "content"}}'
    assert error_text(400, body) == "too long (field content)"
    assert "502" in error_text(502, b"<html>") and "500" in error_text(500, b"[1]")


def test_why_a_service_will_not_start() -> None:
    """What it wrote to standard error before it had a log, its last word in the log, or what a crash left."""
    assert (
        why_refused(["gateway: ROOST_GATEWAY_PROT: unknown setting"]) == "gateway: ROOST_GATEWAY_PROT: unknown setting"
    )
    said = ['{"event": "starting"}', '{"error": "no model \'m\'", "event": "refused_to_start"}', '{"event": "stopped"}']
    assert why_refused(said) == "no model 'm'"
    assert why_refused(["a", "b", "c", "d"]) == "b\n  c\n  d"
