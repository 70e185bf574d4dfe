"""Beginnings and ends: Ctrl-C, `down`, a killed supervisor, and starts that cannot succeed."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from services.console import control
from tests.contract.console.running import WITHIN_S, Home, lives, until
from tests.nats_server import NatsServer


def test_ctrl_c_drains_and_leaves_nothing(home: Home) -> None:
    process = home.up_here("--scale", "router=2")
    pids = home.pids()
    assert len(pids) == 1 + 6
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 0
    assert "Roost is ready after" in said and "curl -N http://127.0.0.1:" in said and "draining" in said
    assert not any(lives(pid) for pid in pids)
    assert not control.socket_path(home.path).exists()
    for log in home.path.glob("logs/*-[0-9].log"):
        assert '"stopped"' in log.read_text(), f"{log.name}: it was not asked to drain"


def test_detach_and_down(home: Home) -> None:
    started = home.up()
    assert started.returncode == 0 and "in the background" in started.stdout, started.stderr
    pids = home.pids()
    stopped = home.roost("down")
    assert stopped.returncode == 0 and "stopped" in stopped.stdout
    until(lambda: not any(lives(pid) for pid in pids))
    again = home.roost("down")
    assert again.returncode == 0 and "nothing runs in" in again.stdout
    assert home.roost("ps").returncode == 2


def test_a_killed_supervisor_takes_its_children_along_and_can_be_started_again(home: Home) -> None:
    assert home.up().returncode == 0
    supervisor, *children = home.pids()
    os.kill(supervisor, signal.SIGKILL)
    until(lambda: not any(lives(pid) for pid in (supervisor, *children)), "a child outlived the supervisor")
    assert home.roost("ps").returncode == 2
    started = home.up()
    assert started.returncode == 0, started.stdout + started.stderr
    assert not set(home.pids()) & set(children)


def test_a_second_ctrl_c_kills(home: Home) -> None:
    process = home.up_here()
    pids = home.pids()
    # Stopped processes cannot drain: only SIGKILL ends them.
    stuck = [row["pid"] for row in home.ps()["services"] if row["service"] == "gateway"]
    for pid in stuck:
        os.kill(pid, signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    until(lambda: home.ps_or_none() is not None and home.ps()["stopping"])
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=WITHIN_S)
    assert "killing all" in said and not any(lives(pid) for pid in pids)


@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [
        ("ROOST_TOOLS_CALLS_MAX", "many", "tools-0 refused to start"),
        ("ROOST_ROUTER_POLICY", "best", "router-0 refused to start"),
        ("ROOST_CONSOLE_STOP_S", "-1", "ROOST_CONSOLE_STOP_S"),
        ("ROOST_METRICS_PORT", "9000", "ROOST_METRICS_PORT"),
        ("ROOST_GATEWAY_PORT", "99999", "ROOST_GATEWAY_PORT"),
        ("ROOST_WALRUS", "1", "ROOST_WALRUS"),
    ],
)
def test_a_bad_setting_stops_the_start_and_is_named(home: Home, variable: str, value: str, named: str) -> None:
    home.environment[variable] = value
    refused = home.roost("up", *home.without())
    assert refused.returncode == 2
    assert named in refused.stderr and variable in refused.stderr and "Traceback" not in refused.stderr


def test_a_taken_gateway_port_is_named(home: Home) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(home.environment["ROOST_GATEWAY_PORT"])))
        taken.listen()
        refused = home.up()
    assert refused.returncode == 2 and "ROOST_GATEWAY_PORT" in refused.stderr


def test_a_nats_server_of_ones_own_is_used_and_left_alone(home: Home, nats_server: NatsServer) -> None:
    home.environment["ROOST_NATS_URL"] = nats_server.url
    started = home.up()
    assert started.returncode == 0, started.stderr
    assert "nats" not in home.names() and home.ps()["nats_url"] == nats_server.url
    assert home.roost("down").returncode == 0
    assert lives(nats_server.pid)


def test_nats_is_started_as_roost_needs_it(home: Home) -> None:
    assert home.up().returncode == 0
    text = (home.path / "nats.conf").read_text()
    assert "sync_interval: always" in text and f"max_payload: {8 << 20}" in text
    assert any((home.path / "jetstream").rglob("*.blk")) or (home.path / "jetstream" / "jetstream").is_dir()


def test_a_home_with_a_long_path_works(tmp_path: Path) -> None:
    home = Home(tmp_path / ("long" * 30))
    try:
        started = home.up()
        assert started.returncode == 0, started.stderr
        assert home.ps()["ready"]
    finally:
        home.close()
