"""A client and its gateway's reader: sends turns of one session, one after the other, and keeps what it was given."""

from __future__ import annotations

from proto.chat import Sampling
from proto.subjects import CANCEL_TURN, TURN_EVENT
from proto.turns import CancelTurn, Place, TextDelta, TurnEvent
from services.gateway.events import Deliver, Ended, ReadTrail, TurnReader, Wait
from tests.sim.bus import Bus, Logs
from tests.sim.loop_node import Turn, WorkQueue
from tests.sim.node import Node
from tests.sim.world import World

DEADLINE_S = 60.0
CANCEL_EVERY_S = 0.5


class ClientNode(Node):
    """One session."""

    def __init__(self, name: str, world: World, bus: Bus, logs: Logs, queue: WorkQueue, turns: int) -> None:
        super().__init__(name, world, bus)
        self.logs, self.queue, self.turns_left = logs, queue, turns
        self.asked: list[Turn] = []
        self.given: dict[str, list[TurnEvent]] = {}
        self.ended: dict[str, bool] = {}
        self.cancelled: set[str] = set()
        self._reader: TurnReader | None = None

    def beat(self) -> None:
        """A client says nothing of itself."""

    def born(self) -> None:
        self.bus.subscribe(TURN_EVENT, self.life, self._live)
        self._think()

    def _think(self) -> None:
        if self.turns_left:
            self.turns_left -= 1
            self.world.after(self.world.random.expovariate(1.0), self._ask, self.life)

    def _ask(self) -> None:
        draw, number = self.world.random, len(self.asked)
        # All sessions begin alike, so that they share blocks.
        shared = tuple(range(100, 124)) if number == 0 else ()
        own = tuple(draw.randrange(100, 600) for _ in range(draw.randint(2, 30)))
        seeded = {"temperature": 1.0, "seed": draw.randrange(1_000)} if draw.random() < 0.3 else {}
        turn = Turn(
            turn_id=f"{self.name}t{number}", session_id=self.name, tokens=(*shared, *own),
            sampling=Sampling(max_tokens=draw.randint(1, 24), **seeded),  # type: ignore[arg-type]
            deadline_at=self.world.now + DEADLINE_S,
        )  # fmt: skip
        self.asked.append(turn)
        self.given[turn.turn_id] = []
        self._reader = self._made(turn, None)
        self.world.after(0.001, lambda: self.queue.put(turn), self.life)
        if draw.random() < 0.15:
            self.world.after(draw.uniform(0.0, 1.5), lambda: self._cancel(turn), self.life)
        if draw.random() < 0.3:
            self.world.after(draw.uniform(0.05, 1.5), lambda: self._reconnect(turn), self.life)
        self._go_on()

    def _made(self, turn: Turn, after: Place | None) -> TurnReader:
        return TurnReader(
            turn.turn_id,
            turn.session_id,
            now=self.world.now,
            deadline_at=turn.deadline_at,
            held_bytes_max=4_000,
            after=after,
        )

    def _cancel(self, turn: Turn) -> None:
        """Until it is heard."""
        if turn.turn_id not in self.ended:
            self.cancelled.add(turn.turn_id)
            self.bus.publish(self.name, CANCEL_TURN, CancelTurn(turn_id=turn.turn_id))
            self.world.after(CANCEL_EVERY_S, lambda: self._cancel(turn), self.life)

    def _reconnect(self, turn: Turn) -> None:
        """With Last-Event-ID, at perhaps another gateway."""
        if turn.turn_id not in self.ended and turn is self.asked[-1]:
            given = self.given[turn.turn_id]
            self._reader = self._made(turn, given[-1].place if given else None)
            if not given:
                self._reader.disturbed(self.world.now)
            self._go_on()

    def _live(self, event: TurnEvent) -> None:
        if self._reader is not None and event.turn_id == self._reader.turn_id:
            self._reader.hear(event, self.world.now)
            self._go_on()

    def _go_on(self) -> None:
        """Do what the reader says."""
        reader = self._reader
        while reader is not None:
            match reader.next(self.world.now):
                case Deliver(events):
                    self.given[reader.turn_id] += events
                case ReadTrail() as ask:
                    self.world.after(
                        self.world.random.uniform(0.001, 0.02), lambda: self._trail(reader, ask), self.life
                    )
                    return
                case Wait(until):
                    self.world.after(max(until - self.world.now, 0.001), lambda: self._woken(reader), self.life)
                    return
                case Ended(by_loop):
                    self._reader = None
                    self.ended[reader.turn_id] = by_loop
                    self.world.say(self.name, f"{reader.turn_id} ended")
                    self._think()
                    return

    def _woken(self, reader: TurnReader) -> None:
        if self._reader is reader:
            self._go_on()

    def _trail(self, reader: TurnReader, ask: ReadTrail) -> None:
        if self._reader is reader:
            trail = self.logs.trails.get(reader.turn_id, [])
            page = list(enumerate(trail, start=1))[ask.after : ask.after + ask.limit]
            reader.trail_read(page, self.world.now)
            self._go_on()

    def tokens(self, turn_id: str) -> list[int]:
        """What it was given of a turn's answer."""
        return [token for e in self.given[turn_id] if isinstance(e.body, TextDelta) for token in e.body.token_ids]
