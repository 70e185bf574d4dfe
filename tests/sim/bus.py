"""A NATS that misbehaves as the real one may: late, lost, twice, out of order; requests to nobody; logs that never lose.

publish    to every subscriber, each copy with its own fate
request    to the one server of an address: a reply, or "nobody" at once, or silence until the timeout
Log        durable and ordered, with optimistic concurrency (sessions), or append-only (a turn's trail)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from proto.sessions import Record
from proto.subjects import Subject
from proto.turns import TurnEvent
from tests.sim.world import Life, World

Handler = Callable[[Any], None]
Respond = Callable[[Any], None]


class Silence(Enum):
    """How a request may end without a reply."""

    NOBODY = "nobody serves it"
    TIMEOUT = "no answer came"


@dataclass
class Weather:
    """How bad the network is at present."""

    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    delay_s: float = 0.002
    # Nodes that nobody hears and that hear nobody.
    cut_off: set[str] = field(default_factory=set)


class Bus:
    """Who hears what, and how it gets there."""

    def __init__(self, world: World, weather: Weather) -> None:
        self.world, self.weather = world, weather
        self.sent = self.lost = 0
        self._heard: dict[str, list[tuple[Life, Handler]]] = {}
        self._served: dict[tuple[str, str], tuple[Life, Callable[[Any, Respond], None]]] = {}
        self._boxes: dict[str, tuple[Life, Handler]] = {}
        # When the last message of a pair of nodes arrives: without reordering none overtakes it.
        self._arrival: dict[tuple[str, str], float] = {}

    # -- lives

    def subscribe(self, subject: Subject, life: Life, handler: Handler) -> None:
        self._heard.setdefault(subject.name, []).append((life, handler))

    def serve(self, subject: Subject, life: Life, handler: Callable[[Any, Respond], None], key: str = "") -> None:
        self._served[subject.name, key] = (life, handler)

    def open_box(self, address: str, life: Life, handler: Handler) -> None:
        """Hear what is said to `address/...`."""
        self._boxes[address] = (life, handler)

    def forget(self, life: Life) -> None:
        """This life is over."""
        for name, heard in self._heard.items():
            self._heard[name] = [(one, handler) for one, handler in heard if one is not life]
        for key in [key for key, (one, _) in self._served.items() if one is life]:
            del self._served[key]

    # -- messages

    def publish(self, source: str, subject: Subject, message: Any) -> None:
        for life, handler in self._heard.get(subject.name, ()):
            self._send(source, life, lambda handler=handler: handler(message), what=subject.name)

    def publish_to(self, source: str, address: str, message: Any) -> None:
        box = self._boxes.get(address.split("/")[0])
        if box is not None:
            life, handler = box
            self._send(source, life, lambda: handler(message), what=address)

    def request(
        self,
        source: Life,
        subject: Subject,
        message: Any,
        answer: Callable[[Any], None],
        timeout_s: float,
        key: str = "",
    ) -> None:
        """`answer` is called once, with the reply or a Silence."""
        is_over = False

        def end(reply: Any) -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                answer(reply)

        server = self._served.get((subject.name, key))
        if server is None or not server[0].is_on:
            self.world.after(self._delay(), lambda: end(Silence.NOBODY), source)
            return
        life, handler = server

        def respond(reply: Any) -> None:
            self._send(life.node, source, lambda: end(reply), what=f"{subject.name} reply")

        self._send(source.node, life, lambda: handler(message, respond), what=subject.name)
        self.world.after(timeout_s, lambda: end(Silence.TIMEOUT), source)

    def _send(self, source: str, target: Life, deliver: Callable[[], None], *, what: str) -> None:
        draw, weather = self.world.random, self.weather
        self.sent += 1
        is_cut = source != target.node and bool({source, target.node} & weather.cut_off)
        if is_cut or draw.random() < weather.loss:
            self.lost += 1
            self.world.say("bus", f"lost {what} {source} -> {target.node}")
            return
        for _ in range(2 if draw.random() < weather.duplicate else 1):
            pair = (source, target.node)
            at = self.world.now + self._delay()
            if draw.random() >= weather.reorder:
                at = max(at, self._arrival.get(pair, 0.0))
                self._arrival[pair] = at
            self.world.after(at - self.world.now, deliver, target)

    def _delay(self) -> float:
        return self.world.random.expovariate(1.0 / self.weather.delay_s)


class Conflict(Exception):
    """Somebody else has appended."""


class Logs:
    """What JetStream keeps: sessions on disk, trails in memory; both survive every node here."""

    def __init__(self) -> None:
        self.sessions: dict[str, list[Record]] = {}
        self.trails: dict[str, list[TurnEvent]] = {}

    def append(self, session_id: str, record: Record, *, expected: int) -> int:
        """The new head. Raises Conflict."""
        records = self.sessions.setdefault(session_id, [])
        if len(records) != expected:
            raise Conflict
        records.append(record)
        return len(records)
