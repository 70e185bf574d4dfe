"""Pure: which child processes to start, end and start again, and when. The supervisor acts on what is said here.

A child is in one of three phases:

    running     started; when it ends unasked it is started again, after a back-off that doubles with each failure
    waiting     ended; starts again at `restart_at`
    stopping    was told to end; killed at `kill_at`. Started again at once if it is wanted by then (a restart)

The whole fleet ends in STOP_ORDER, one stage after another, so that a turn under way finds everything it needs until its
end. An exit with EXIT_SETTINGS means that another start would fail the same way: until all have been ready once, everything
stops, with the reason. Later it is a failure like another: what runs goes on without that replica.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

NATS: Final = "nats"
STOP_ORDER: Final[tuple[tuple[str, ...], ...]] = (
    ("gateway",),
    ("loop",),
    ("router", "prefill", "decode", "tools", "retrieval"),
    ("kvstore",),
    (NATS,),
)
BACKOFF_S: Final = 0.2
BACKOFF_S_MAX: Final = 10.0
# Ready for this long, and earlier failures are forgotten.
HEALTHY_S: Final = 30.0
# See shared.service; not imported, as that brings the whole bus.
EXIT_SETTINGS: Final = 2
EXIT_OK: Final = 0


class Phase(StrEnum):
    """Where a child is in its life."""

    RUNNING = "running"
    WAITING = "waiting"
    STOPPING = "stopping"


@dataclass(slots=True)
class Child:
    """One replica, over all its lives."""

    instance_id: str
    service: str
    phase: Phase
    started_at: float
    ready_at: float | None = None
    failures: int = 0
    restarts: int = 0
    restart_at: float = 0.0
    kill_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Start:
    """Start this replica."""

    instance_id: str
    service: str


@dataclass(frozen=True, slots=True)
class Terminate:
    """Ask it to end (SIGTERM)."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class Kill:
    """End it (SIGKILL)."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class Finish:
    """All have ended; so does the supervisor. `culprit` is who refused to start, if that was the reason."""

    status: int
    culprit: str | None


Instruction = Start | Terminate | Kill | Finish


def backoff_s(failures: int) -> float:
    """How long to wait after this many failures in a row before."""
    return float(min(BACKOFF_S * 2.0 ** min(failures, 16), BACKOFF_S_MAX))


class Fleet:
    """Owns what shall run. `now` is monotonic seconds."""

    def __init__(self, replicas: Mapping[str, int], *, with_nats: bool, term_s: float, stop_s: float) -> None:
        """`term_s`: SIGTERM to SIGKILL of one child. `stop_s`: the same for the whole fleet."""
        self.replicas = dict(replicas) | ({NATS: 1} if with_nats else {})
        self.children: dict[str, Child] = {}
        self._term_s, self._stop_s = term_s, stop_s
        self._stage: int | None = None  # of STOP_ORDER, while everything ends
        self._kill_all_at = 0.0
        self._status = EXIT_OK
        self._culprit: str | None = None
        self._is_finished = False
        self._was_ready = False

    # -- what is asked

    def begin(self, now: float) -> list[Instruction]:
        """Start everything, NATS first."""
        instructions: list[Instruction] = []
        for service in sorted(self.replicas, key=lambda name: name != NATS):
            instructions += self._fill(service, now)
        return instructions

    def scale(self, service: str, count: int, now: float) -> list[Instruction]:
        """Have this many replicas from now on. The highest numbers go first."""
        assert service in self.replicas and service != NATS and count >= 0
        if self.is_stopping:
            return []
        self.replicas[service] = count
        instructions: list[Instruction] = []
        for child in self._of((service,)):
            if not self._is_wanted(child):
                instructions += self._end(child, now)
        return instructions + self._fill(service, now)

    def restart(self, instance_id: str, now: float) -> list[Instruction]:
        """End it in an orderly way and start it again at once; KeyError if there is none of this name."""
        child = self.children[instance_id]
        if self.is_stopping:
            return []
        if child.phase is Phase.WAITING:
            return [self._start(child, now)]
        return self._end(child, now)

    def stop(self, now: float) -> list[Instruction]:
        """End everything in order. Asked a second time: at once."""
        if self.is_stopping:
            return self._kill_all()
        self._stage = -1
        self._kill_all_at = now + self._stop_s
        for child in [child for child in self.children.values() if child.phase is Phase.WAITING]:
            del self.children[child.instance_id]
        return self._advance(now)

    # -- what happens

    def ready(self, instance_id: str, now: float) -> None:
        """It said that it is ready."""
        child = self.children.get(instance_id)
        if child is not None and child.phase is Phase.RUNNING and child.ready_at is None:
            child.ready_at = now
            self._was_ready = self._was_ready or not self.late()

    def exited(self, instance_id: str, status: int, now: float) -> list[Instruction]:
        """Its process ended, whatever the reason."""
        child = self.children[instance_id]
        assert child.phase is not Phase.WAITING, "only a process can end"
        if self.is_stopping or not self._is_wanted(child):
            del self.children[instance_id]
            return self._advance(now) if self.is_stopping else []
        if child.phase is Phase.STOPPING:
            child.failures = 0
            return [self._start(child, now)]
        if status == EXIT_SETTINGS and child.service != NATS and not self._was_ready:
            del self.children[instance_id]
            self._status, self._culprit = status, instance_id
            return self.stop(now)
        if child.ready_at is not None and now - child.ready_at >= HEALTHY_S:
            child.failures = 0
        child.phase, child.restart_at = Phase.WAITING, now + backoff_s(child.failures)
        child.ready_at = None
        child.failures += 1
        return []

    def wake(self, now: float) -> list[Instruction]:
        """Time has passed, perhaps up to `wake_at`."""
        if self.is_stopping and now >= self._kill_all_at:
            self._kill_all_at = float("inf")
            return self._kill_all()
        instructions: list[Instruction] = []
        for child in self.children.values():
            if child.phase is Phase.WAITING and now >= child.restart_at:
                instructions.append(self._start(child, now))
            elif child.phase is Phase.STOPPING and now >= child.kill_at:
                child.kill_at = float("inf")
                instructions.append(Kill(child.instance_id))
        return instructions

    # -- what is so

    @property
    def wake_at(self) -> float | None:
        """When `wake` is to be called next, if ever."""
        times = [child.restart_at for child in self.children.values() if child.phase is Phase.WAITING]
        times += [child.kill_at for child in self.children.values() if child.phase is Phase.STOPPING]
        times += [self._kill_all_at] if self.is_stopping else []
        return min((at for at in times if at != float("inf")), default=None)

    @property
    def is_stopping(self) -> bool:
        """Everything is on its way out."""
        return self._stage is not None

    @property
    def is_ready(self) -> bool:
        """Every wanted replica of every service is there and said so."""
        return not self.is_stopping and not self.late()

    def late(self) -> list[str]:
        """Wanted replicas that are not ready."""
        return [
            child.instance_id for child in self.children.values() if child.ready_at is None and self._is_wanted(child)
        ]

    def check_integrity(self) -> None:
        """Assert what must hold between events."""
        if self.is_stopping:
            assert all(child.phase is not Phase.WAITING for child in self.children.values())
            assert self._is_finished == (not self.children)
            return
        for service, count in self.replicas.items():
            names = {child.instance_id for child in self._of((service,))}
            assert {name_of(service, index) for index in range(count)} <= names, "every wanted replica is known"
        for child in self.children.values():
            assert self._is_wanted(child) or child.phase is Phase.STOPPING, "what is not wanted is on its way out"

    # -- inside

    def _of(self, services: tuple[str, ...]) -> list[Child]:
        return [child for child in self.children.values() if child.service in services]

    def _is_wanted(self, child: Child) -> bool:
        return child.instance_id in {name_of(child.service, n) for n in range(self.replicas[child.service])}

    def _fill(self, service: str, now: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        for index in range(self.replicas[service]):
            instance_id = name_of(service, index)
            if instance_id not in self.children:
                child = Child(instance_id, service, Phase.WAITING, started_at=now)
                child.restarts = -1
                self.children[instance_id] = child
                instructions.append(self._start(child, now))
        return instructions

    def _start(self, child: Child, now: float) -> Start:
        child.phase, child.started_at, child.ready_at = Phase.RUNNING, now, None
        child.restarts += 1
        return Start(child.instance_id, child.service)

    def _end(self, child: Child, now: float) -> list[Instruction]:
        if child.phase is Phase.STOPPING:
            return []
        if child.phase is Phase.WAITING:
            del self.children[child.instance_id]
            return []
        child.phase, child.kill_at, child.ready_at = Phase.STOPPING, now + self._term_s, None
        return [Terminate(child.instance_id)]

    def _advance(self, now: float) -> list[Instruction]:
        """Go on to the next stage that has anyone in it, once the present one is empty."""
        assert self._stage is not None
        while self._stage < 0 or not self._of(STOP_ORDER[self._stage]):
            self._stage += 1
            if self._stage == len(STOP_ORDER):
                self._stage -= 1
                if self._is_finished or self.children:
                    return []
                self._is_finished = True
                return [Finish(self._status, self._culprit)]
            instructions = [order for child in self._of(STOP_ORDER[self._stage]) for order in self._end(child, now)]
            if instructions:
                return instructions
        return []

    def _kill_all(self) -> list[Instruction]:
        for child in self.children.values():
            child.phase, child.kill_at = Phase.STOPPING, float("inf")
        return [Kill(child.instance_id) for child in self.children.values()]


def name_of(service: str, index: int) -> str:
    """Id of a replica."""
    return service if service == NATS else f"{service}-{index}"
