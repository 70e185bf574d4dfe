"""Pure: the lives of workers: what room each has, what was sent to it, and when it counts as dead.

    room left = room it said - (assignments sent in this life - assignments it has seen in this life)

The first pull of a life that this router hears is the baseline: what was sent before is what the worker has seen. An
assignment that got lost on its way would take room for ever, so when nothing is on its way and the numbers still differ
for longer than a worker may be silent, the worker is believed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from proto.fleet import ModelCard
from proto.generate import Generate, Pull, Stage
from shared.block_hash import Namespace
from shared.limits import PULL_SILENT_AFTER_S

# Tenants whose namespace is remembered per worker.
NAMESPACES_MAX = 1_024


@dataclass(slots=True)
class Sent:
    """An assignment that this router sent and that has not come to an end."""

    assignment_id: str
    worker_id: str
    generation_id: str
    attempt: int
    stage: Stage
    # It was the worker's n-th of this life.
    number: int
    # Prompt tokens it has to compute, as predicted.
    new_tokens: int
    is_answered: bool = False
    # Since when the worker's pulls do not name it although they have seen it.
    missing_since: float | None = None


@dataclass(slots=True)
class WorkerLife:
    """One life of one worker, as its latest pull describes it."""

    pull: Pull
    heard_at: float
    sent_count: int
    sent: dict[str, Sent] = field(default_factory=dict)
    card: ModelCard | None = None
    # The worker refused; what it said before about room does not count.
    is_room_void: bool = False
    _differs_since: float | None = None
    _namespaces: dict[bytes, bytes] = field(default_factory=dict)

    @property
    def worker_id(self) -> str:
        """Its id."""
        return self.pull.worker_id

    @property
    def room(self) -> int:
        """Assignments it can still take."""
        if self.is_room_void:
            return 0
        return max(0, self.pull.room - (self.sent_count - self.pull.assigned_count))

    @property
    def unseen(self) -> Sequence[Sent]:
        """Sent, but not yet seen when the latest pull was made."""
        return [sent for sent in self.sent.values() if sent.number > self.pull.assigned_count]

    @property
    def tokens_waiting(self) -> int:
        """Prompt tokens it has to compute before it could begin with a new prompt."""
        return self.pull.prefill_tokens_waiting + sum(sent.new_tokens for sent in self.unseen)

    @property
    def batch(self) -> int:
        """Generations in hand or on their way."""
        return len(self.pull.running) + len(self.unseen)

    def is_silent(self, now: float) -> bool:
        """Whether it counts as dead."""
        return now - self.heard_at >= PULL_SILENT_AFTER_S

    def take(self, pull: Pull, now: float) -> None:
        """A pull of this life."""
        self.heard_at = now
        if pull.assigned_count < self.pull.assigned_count:
            return  # overtaken by a newer one on its way
        self.pull, self.is_room_void = pull, False
        # More than we sent: another router did, before us.
        self.sent_count = max(self.sent_count, pull.assigned_count)
        is_any_on_its_way = any(not sent.is_answered for sent in self.sent.values())
        if self.sent_count == pull.assigned_count or is_any_on_its_way:
            self._differs_since = None
        elif self._differs_since is None:
            self._differs_since = now
        elif now - self._differs_since > PULL_SILENT_AFTER_S:
            self.sent_count, self._differs_since = pull.assigned_count, None
            for sent in self.sent.values():
                sent.number = min(sent.number, self.sent_count)

    def never_came(self, sent: Sent) -> None:
        """This assignment certainly did not reach it, so those after it are one earlier in its count."""
        self.sent_count = max(self.pull.assigned_count, self.sent_count - 1)
        for later in self.sent.values():
            if later.number > sent.number:
                later.number -= 1

    def missing(self, now: float) -> list[Sent]:
        """Assignments the worker took, has no more, and did not report as done for longer than a pull may be late."""
        held = {work.assignment_id for work in self.pull.running}
        gone = []
        for sent in self.sent.values():
            if sent.assignment_id in held or not sent.is_answered or sent.number > self.pull.assigned_count:
                sent.missing_since = None
            elif sent.missing_since is None:
                sent.missing_since = now
            elif now - sent.missing_since > PULL_SILENT_AFTER_S:
                gone.append(sent)
        return gone

    def serves(self, generate: Generate) -> bool:
        """Whether its blocks live where this generation's keys were made. Without its card only the model's name is known."""
        if self.pull.model != generate.model:
            return False
        if self.card is None:
            return bool(generate.salt) or self.pull.base_namespace == generate.namespace
        digest = self._namespaces.get(generate.salt)
        if digest is None:
            if len(self._namespaces) >= NAMESPACES_MAX:
                self._namespaces.clear()
            digest = self._namespaces[generate.salt] = Namespace.of_card(self.card, generate.salt).digest()
        return digest == generate.namespace

    def set_card(self, card: ModelCard | None) -> None:
        """What its heartbeat says it serves; a card of another life is not its."""
        if card is not None and card.epoch == self.pull.epoch and card != self.card:
            self.card = card
            self._namespaces.clear()
