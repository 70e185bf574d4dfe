"""What every simulated node has: lives with epochs, heartbeats, and a tick when its core is due."""

from __future__ import annotations

from collections.abc import Callable

from proto.fleet import FleetPing, Heartbeat, KvStoreCard, ModelCard, ServiceState
from proto.subjects import FLEET_PING, HEARTBEAT
from shared.limits import HEARTBEAT_S
from tests.sim.bus import Bus
from tests.sim.world import Life, World

# How late a shell may notice that its core is due.
TICK_S = 0.05
TICK_IDLE_S = 1.0


class Node:
    """A process that can be killed and started."""

    def __init__(self, name: str, world: World, bus: Bus) -> None:
        self.name, self.world, self.bus = name, world, bus
        self.life = Life(name, 0)
        self.life.is_on = False
        self._ticked_at = 0.0

    @property
    def is_on(self) -> bool:
        return self.life.is_on

    def start(self) -> None:
        """Begin a life."""
        assert not self.life.is_on
        self.life = Life(self.name, self.life.epoch + 1)
        self.world.say(self.name, f"life {self.life.epoch} begins")
        self.born()
        self.bus.subscribe(FLEET_PING, self.life, lambda _: self.beat())
        self.world.every(HEARTBEAT_S, self.beat, self.life)

    def kill(self) -> None:
        """kill -9."""
        if self.life.is_on:
            self.world.say(self.name, f"life {self.life.epoch} killed")
            self.life.is_on = False
            self.bus.forget(self.life)
            self.died()

    def born(self) -> None:
        """Make a core and listen."""
        raise NotImplementedError

    def died(self) -> None:
        """What the world does about it."""

    def cards(self) -> dict[str, ModelCard | KvStoreCard]:
        """For heartbeats."""
        return {}

    def residency_seq(self) -> int | None:
        """For heartbeats."""
        return None

    def beat(self) -> None:
        beat = Heartbeat(
            service=self.name.split("-")[0], instance_id=self.name, epoch=self.life.epoch, state=ServiceState.READY, host="h",
            pid=1, metrics_port=1, started_at=0.0, sent_at=self.world.now, residency_seq=self.residency_seq(), **self.cards(),  # type: ignore[arg-type]
        )  # fmt: skip
        self.bus.publish(self.name, HEARTBEAT, beat)

    def ask_for_cards(self) -> None:
        self.bus.publish(self.name, FLEET_PING, FleetPing(asked_by=self.name))

    def tick_when_due(self, wake_at: Callable[[], float | None], tick: Callable[[], None]) -> None:
        """Tick when the core says so, and each second."""

        def look() -> None:
            due = wake_at()
            if (due is not None and due <= self.world.now) or self.world.now >= self._ticked_at + TICK_IDLE_S:
                self._ticked_at = self.world.now
                tick()

        self.world.every(TICK_S, look, self.life)
