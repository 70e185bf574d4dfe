"""The router's core with a shell that only forwards, like services/router/service.py."""

from __future__ import annotations

from typing import Any

from proto.errors import ErrorCode, ErrorReply
from proto.generate import AssignReply
from proto.residency import ResidencySnapshot
from proto.subjects import (
    ASSIGN,
    CANCEL_GENERATE,
    GENERATE,
    HEARTBEAT,
    PULL,
    RESIDENCY,
    ROUTER_HELLO,
    SNAPSHOT,
    WORK_DONE,
)
from services.router import events as ev
from services.router.core import RouterConfig, RouterCore
from tests.sim.bus import Bus, Respond, Silence
from tests.sim.node import Node
from tests.sim.world import World

ASSIGN_TIMEOUT_S = 1.0
SNAPSHOT_TIMEOUT_S = 2.0
# From its start until the lease is its own.
LEASE_S = 0.5


class RouterNode(Node):
    """One replica. The lease is left out: a life is active soon after its start, and the only one."""

    def __init__(self, name: str, world: World, bus: Bus, config: RouterConfig) -> None:
        super().__init__(name, world, bus)
        self.config = config
        self.core = RouterCore(config, name, 0)

    def born(self) -> None:
        self.core = RouterCore(self.config, self.name, self.life.epoch)
        now = lambda: self.world.now  # noqa: E731
        heard: list[tuple[Any, Any]] = [
            (HEARTBEAT, lambda m: ev.HeartbeatHeard(now(), m)),
            (RESIDENCY, lambda m: ev.DeltaHeard(now(), m)),
            (PULL, lambda m: ev.PullHeard(now(), m)),
            (WORK_DONE, lambda m: ev.WorkDoneHeard(now(), m)),
            (CANCEL_GENERATE, lambda m: ev.CancelHeard(now(), m)),
        ]
        for subject, event in heard:
            self.bus.subscribe(subject, self.life, lambda message, event=event: self.tell(event(message)))
        self.ask_for_cards()
        self.world.after(LEASE_S, self._activate, self.life)
        self.tick_when_due(lambda: self.core.wake_at, lambda: self.tell(ev.Ticked(self.world.now)))

    def _activate(self) -> None:
        self.tell(ev.BecameActive(self.world.now))
        self.bus.serve(GENERATE, self.life, self._generate)

    def _generate(self, generate: Any, respond: Respond) -> None:
        respond(self.tell(ev.GenerateArrived(self.world.now, self.world.now, generate)))

    def tell(self, event: ev.Event) -> Any:
        """The core's answer, if the event was a request."""
        answer = None
        for instruction in self.core.handle(event):
            match instruction:
                case ev.Answer(reply):
                    answer = reply
                case ev.Say(address, said):
                    self.bus.publish_to(self.name, address, said)
                case ev.SayCancel(cancel):
                    self.bus.publish(self.name, CANCEL_GENERATE, cancel)
                case ev.SayHello(hello):
                    self.bus.publish(self.name, ROUTER_HELLO, hello)
                case ev.SendAssign():
                    self._assign(instruction)
                case ev.AskSnapshot():
                    self._ask(instruction)
                case ev.Counted():
                    pass
        return answer

    def _assign(self, send: ev.SendAssign) -> None:
        self.world.say(self.name, f"assigns {send.assignment.generate.generation_id} to {send.worker_id}")

        def answered(reply: AssignReply | Silence) -> None:
            outcome, error = ev.AssignOutcome.ACCEPTED, None
            if reply is Silence.NOBODY:
                outcome, error = ev.AssignOutcome.UNDELIVERED, _error(ErrorCode.UNAVAILABLE)
            elif reply is Silence.TIMEOUT:
                outcome, error = ev.AssignOutcome.UNANSWERED, _error(ErrorCode.DEADLINE)
            elif not reply.accepted:  # type: ignore[union-attr]
                outcome, error = ev.AssignOutcome.REFUSED, reply.error  # type: ignore[union-attr]
            self.tell(ev.AssignAnswered(self.world.now, send.assignment.assignment_id, outcome, error))

        self.bus.request(self.life, ASSIGN, send.assignment, answered, ASSIGN_TIMEOUT_S, key=send.worker_id)

    def _ask(self, ask: ev.AskSnapshot) -> None:
        def answered(reply: ResidencySnapshot | Silence) -> None:
            page = None if isinstance(reply, Silence) else reply
            self.tell(ev.SnapshotArrived(self.world.now, ask.holder_id, ask.ask_number, page))

        self.bus.request(self.life, SNAPSHOT, ask.request, answered, SNAPSHOT_TIMEOUT_S, key=ask.holder_id)


def _error(code: ErrorCode) -> ErrorReply:
    return ErrorReply(code=code, message="as the bus says")
