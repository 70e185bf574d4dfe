"""Storms of one kind, for what the mixed storm of a seed brings too seldom. Hand one to `checked(seed, prepare=...)`."""

from __future__ import annotations

from functools import partial

from tests.sim.loop_node import LoopNode
from tests.sim.system import STORM_S, System

# Longer than the queue waits for a sign of life, so that a turn is given to another loop while the first goes on.
APART_S = 6.0
LOSS = 0.1


def loops_cut_off(system: System) -> None:
    """Each loop in turn is heard by nobody for a while."""
    away = system.weather.cut_off
    for number, loop in enumerate(system.loops):
        for round_number in range(4):
            second = 2.0 + 8.0 * round_number + 3.0 * number
            assert second + APART_S < STORM_S
            system.world.after(second, partial(away.add, loop.name))
            system.world.after(second + APART_S, partial(away.discard, loop.name))


def loops_stalled(system: System) -> None:
    """Each loop in turn stops for a while, and then goes on where it was, with all that was said to it meanwhile."""

    def stall(loop: LoopNode) -> None:
        loop.life.paused_until = system.world.now + APART_S

    for number, loop in enumerate(system.loops):
        for round_number in range(4):
            second = 2.0 + 8.0 * round_number + 3.0 * number
            assert second + APART_S < STORM_S
            system.world.after(second, partial(stall, loop))


def much_lost(system: System) -> None:
    """One message of ten never comes."""
    system.world.after(0.1, partial(setattr, system.weather, "loss", LOSS))
