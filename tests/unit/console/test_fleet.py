"""The supervisor's core: whatever happens in whatever order, what shall run does, and a stop ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.console.control import SOCKET_PATH_BYTES_MAX, socket_path
from services.console.errors import ConsoleError
from services.console.fleet import BACKOFF_S, BACKOFF_S_MAX, HEALTHY_S, Finish, Fleet, Kill, Phase, Start, Terminate
from services.console.gateway_client import parse_events
from services.console.scale import parse_scale, replicas_of
from shared.settings import SERVICES


def started(**scaled: int) -> Fleet:
    fleet = Fleet(replicas_of(scaled), with_nats=True, term_s=12.0, stop_s=30.0)
    fleet.begin(0.0)
    for instance_id in list(fleet.children):
        fleet.ready(instance_id, 1.0)
    return fleet


def test_a_crash_is_restarted_with_a_back_off_that_doubles_and_is_forgotten_after_health() -> None:
    fleet, now, waits = started(), 1.0, []
    for _ in range(8):
        assert fleet.exited("decode-0", -9, now) == []
        assert fleet.wake_at is not None
        waits.append(round(fleet.wake_at - now, 3))
        now = fleet.wake_at
        assert fleet.wake(now) == [Start("decode-0", "decode")]
    assert waits == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, BACKOFF_S_MAX, BACKOFF_S_MAX]
    fleet.ready("decode-0", now)
    fleet.exited("decode-0", 1, now + HEALTHY_S)
    assert fleet.wake_at == pytest.approx(now + HEALTHY_S + BACKOFF_S)
    assert fleet.children["decode-0"].restarts == 8


def test_a_stop_goes_in_order_and_nats_goes_last() -> None:
    fleet, order = started(decode=2), []
    asked = fleet.stop(10.0)
    while True:
        if isinstance(asked[0], Finish):
            break
        stage = {order.instance_id for order in asked if isinstance(order, Terminate)}
        order.append(stage)
        asked = [instruction for name in stage for instruction in fleet.exited(name, 0, 11.0)]
    assert order[0] == {"gateway-0"} and order[1] == {"loop-0"} and order[-2:] == [{"kvstore-0"}, {"nats"}]
    assert {"decode-0", "decode-1"} < order[2]
    assert asked == [Finish(0, None)]


def test_bad_settings_stop_everything_and_name_the_culprit() -> None:
    fleet = Fleet(replicas_of({}), with_nats=True, term_s=12.0, stop_s=30.0)
    fleet.begin(0.0)
    asked = fleet.exited("tools-0", 2, 5.0)
    assert asked == [Terminate("gateway-0")]
    assert fleet.stop(6.0).count(Kill("nats")) == 1
    last = [instruction for name in list(fleet.children) for instruction in fleet.exited(name, -9, 7.0)]
    assert last == [Finish(2, "tools-0")]


def test_a_replica_that_refuses_later_leaves_the_others_alone() -> None:
    fleet = started(decode=2)
    assert fleet.exited("decode-1", 2, 5.0) == []
    assert not fleet.is_stopping and fleet.late() == ["decode-1"]
    assert fleet.wake(5.0 + BACKOFF_S) == [Start("decode-1", "decode")]


def test_a_hung_child_is_killed_and_a_stop_has_an_end() -> None:
    fleet = started()
    assert fleet.restart("loop-0", 10.0) == [Terminate("loop-0")]
    assert fleet.wake_at == 22.0 and fleet.wake(22.0) == [Kill("loop-0")]
    assert fleet.exited("loop-0", -9, 22.1) == [Start("loop-0", "loop")]
    fleet.stop(30.0)
    assert fleet.wake(60.0) == [Kill(name) for name in fleet.children]
    assert fleet.wake_at is None


def test_scaling_down_and_up_again_before_the_child_has_ended() -> None:
    fleet = started(decode=2)
    assert fleet.scale("decode", 1, 5.0) == [Terminate("decode-1")]
    assert fleet.scale("decode", 3, 6.0) == [Start("decode-2", "decode")]
    assert fleet.exited("decode-1", 0, 7.0) == [Start("decode-1", "decode")]


ACTIONS = st.tuples(
    st.sampled_from(("exit", "ready", "scale", "restart", "wake", "stop")),
    st.integers(0, 30),
    st.integers(0, 3),
    st.floats(0.0, 20.0),
)


@given(st.lists(ACTIONS, max_size=60))
def test_any_order_of_events_keeps_the_invariants(actions: list[tuple[str, int, int, float]]) -> None:
    """Processes are counted from the instructions alone: no replica twice, none forgotten, and the end is said once."""
    fleet, now, finishes = Fleet(replicas_of({}), with_nats=True, term_s=2.0, stop_s=9.0), 0.0, 0
    alive: set[str] = set()

    def act(instructions: list[object]) -> None:
        nonlocal finishes
        for instruction in instructions:
            if isinstance(instruction, Start):
                assert instruction.instance_id not in alive, "started twice"
                alive.add(instruction.instance_id)
            elif isinstance(instruction, Finish):
                finishes += 1
                assert not alive

    act(list(fleet.begin(now)))
    for verb, which, count, pause in actions:
        now += pause
        names = sorted(alive)
        name = names[which % len(names)] if names else None
        if verb == "exit" and name:
            alive.discard(name)
            act(list(fleet.exited(name, (0, 1, -9, 2)[count], now)))
        elif verb == "ready" and name:
            fleet.ready(name, now)
        elif verb == "scale":
            act(list(fleet.scale(SERVICES[which % 8], count, now)))
        elif verb == "restart" and name:
            act(list(fleet.restart(name, now)))
        elif verb == "wake":
            act(list(fleet.wake(now)))
        elif verb == "stop":
            act(list(fleet.stop(now)))
        fleet.check_integrity()
        assert alive == {child.instance_id for child in fleet.children.values() if child.phase is not Phase.WAITING}
    if not fleet.is_stopping:
        act(list(fleet.stop(now)))
    while alive:
        act(list(fleet.exited(alive.pop(), 0, now)))
    assert finishes == 1


@pytest.mark.parametrize(
    "word", ["decode", "decode=", "decode=-1", "decode=x", "decode=65", "decoder=1", "=1", "decode=9999999"]
)
def test_a_bad_scale_is_named(word: str) -> None:
    with pytest.raises(ConsoleError) as refused:
        parse_scale([word])
    assert repr(word) in str(refused.value)


def test_scale_twice_is_refused_and_without_leaves_out() -> None:
    with pytest.raises(ConsoleError):
        parse_scale(["decode=1", "decode=2"])
    assert replicas_of(parse_scale(["decode=3"]), ["retrieval"]) == dict.fromkeys(SERVICES, 1) | {
        "decode": 3,
        "retrieval": 0,
    }


def test_a_long_home_has_a_short_socket(tmp_path) -> None:  # type: ignore[no-untyped-def]
    long = tmp_path / ("x" * 120)
    assert len(str(socket_path(long))) <= SOCKET_PATH_BYTES_MAX
    assert socket_path(long) != socket_path(tmp_path / ("y" * 120))


def test_events_are_read_and_comments_are_not() -> None:
    lines = [
        b": here\n",
        b"\n",
        b"id: 0.1.0\n",
        b"event: text\n",
        b'data: {"text":"a"}\n',
        b"\n",
        b"data: [DONE]\n",
        b"\n",
    ]
    assert list(parse_events(iter(lines))) == [("text", {"text": "a"})]
