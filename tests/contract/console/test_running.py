"""A running system: crashes, scaling, what is shown, what is refused."""

from __future__ import annotations

import json
import os
import signal
import socket
import urllib.request

import pytest

from services.console import control
from services.console.errors import ConsoleError
from tests.contract.console.running import Home, until

NAMES = {"nats", "gateway-0", "router-0", "kvstore-0", "tools-0"}


def test_ps_shows_replicas_health_load_and_metrics(running: Home) -> None:
    shown = running.ps()
    assert running.names() == NAMES and shown["ready"] and not shown["late"]
    assert shown["replicas"]["decode"] == 0
    for row in shown["services"]:
        assert row["state"] == "ready" and row["pid"] and row["memory_bytes"] > 0
        if row["service"] != "nats":
            with urllib.request.urlopen(f"http://127.0.0.1:{row['metrics_port']}/metrics", timeout=10) as answer:
                assert f'service="{row["service"]}"' in answer.read().decode()
    assert json.loads(running.roost("ps", "--json").stdout).keys() == shown.keys()
    table = running.roost("ps").stdout
    assert all(name in table for name in NAMES) and "SERVICE" in table and "queue=0" in table


@pytest.mark.parametrize("name", ["router-0", "nats"])
def test_a_killed_process_is_started_again_and_the_others_stay(running: Home, name: str) -> None:
    before = {row["instance"]: row for row in running.ps()["services"]}
    os.kill(before[name]["pid"], signal.SIGKILL)
    until(lambda: running.is_ready(name) and running.row(name)["pid"] != before[name]["pid"])
    until(lambda: running.ps()["ready"] and all(row["state"] == "ready" for row in running.ps()["services"]))
    after = {row["instance"]: row for row in running.ps()["services"]}
    assert after[name]["restarts"] == before[name]["restarts"] + 1
    assert all(after[other]["pid"] == before[other]["pid"] for other in NAMES - {name})


def test_each_crash_in_a_row_waits_longer(running: Home) -> None:
    for _ in range(3):
        until(lambda: running.is_ready("tools-0"))
        was = running.row("tools-0")["restarts"]
        assert running.roost("kill", "tools-0").returncode == 0
        until(lambda was=was: running.row("tools-0")["restarts"] > was)  # type: ignore[misc]
    until(lambda: running.is_ready("tools-0"))
    said = (running.path / "logs" / "up.log").read_text()
    assert [f"tools-0 ended with -9; again in {wait} s" in said for wait in ("0.2", "0.4", "0.8")] == [True] * 3


def test_scaling_while_running(running: Home) -> None:
    kept = running.row("router-0")["pid"]
    assert running.roost("scale", "router=3", "tools=2").returncode == 0
    until(lambda: running.ps()["ready"])
    assert running.names() == NAMES | {"router-1", "router-2", "tools-1"}
    assert running.roost("scale", "router=1", "tools=1").returncode == 0
    until(lambda: running.names() == NAMES)
    assert running.row("router-0")["pid"] == kept and running.row("router-0")["state"] == "ready"


def test_a_second_gateway_has_the_next_port(running: Home) -> None:
    assert running.roost("scale", "gateway=2").returncode == 0
    until(lambda: running.ps()["ready"])
    port = int(running.environment["ROOST_GATEWAY_PORT"]) + 1
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=10) as answer:
        assert answer.status == 200
    assert running.roost("scale", "gateway=1").returncode == 0
    until(lambda: running.names() == NAMES)


def test_restart_is_orderly_and_counts(running: Home) -> None:
    before = running.row("kvstore-0")
    assert running.roost("restart", "kvstore-0").returncode == 0
    until(lambda: running.is_ready("kvstore-0") and running.row("kvstore-0")["pid"] != before["pid"])
    assert '"draining"' in "".join(running.roost("logs", "kvstore-0", "-n", "200").stdout)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("scale", "decoder=2"), "'decoder'"),
        (("scale", "decode=many"), "'decode=many'"),
        (("scale", "nats=2"), "'nats'"),
        (("kill", "decode-7"), "'decode-7'"),
        (("logs", "nobody"), "nobody"),
        (("up", "--detach", "--scale", "decoder=3"), "'decoder'"),
        (("up", "--without", "walrus"), "'walrus'"),
    ],
)
def test_bad_words_are_named(running: Home, words: tuple[str, ...], named: str) -> None:
    refused = running.roost(*words)
    assert refused.returncode == 2 and named in refused.stderr and "Traceback" not in refused.stderr


@pytest.mark.parametrize("words", [("up",), ("up", "--detach")])
def test_a_second_up_in_the_same_home_is_refused(running: Home, words: tuple[str, ...]) -> None:
    before = running.pids()
    refused = running.roost(*words)
    assert refused.returncode == 2
    assert "already runs in" in refused.stderr and "roost down" in refused.stderr
    assert running.pids() == before


def test_logs_of_one_of_a_service_and_of_all(running: Home) -> None:
    assert '"service": "router"' in running.roost("logs", "router").stdout
    every = running.roost("logs", "-n", "2").stdout
    assert {line.split()[0] for line in every.splitlines()} >= NAMES


@pytest.mark.parametrize("request_", [b"{}", b"[]", b"no json", b'{"command": "dance"}', b'{"command": "scale"}'])
def test_the_control_socket_refuses_what_is_no_command(running: Home, request_: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(str(control.socket_path(running.path)))
        connection.sendall(request_ + b"\n")
        assert "error" in json.loads(connection.makefile("rb").readline())
    assert running.ps()["ready"]


def test_only_this_user_may_open_the_socket(running: Home) -> None:
    assert control.socket_path(running.path).stat().st_mode & 0o077 == 0


def test_a_session_by_the_gateway_of_this_home(running: Home) -> None:
    refused = running.roost("turn", "Hello", "--session", "a b")
    assert refused.returncode == 2 and "session_id" in refused.stderr
    with pytest.raises(ConsoleError):
        control.ask(running.path, "restart", instance="nobody")
