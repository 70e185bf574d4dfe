"""Pure: the generations in hand: those that wait, in order, and those that a worker has."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from proto.generate import Generate
from services.router.workers import Sent

# Generations whose latest attempt is remembered after they left, so that a late repeat is not run again.
REMEMBERED_MAX: Final = 16_384


@dataclass(slots=True)
class Job:
    """One generation in hand. `sent` says whether it waits (None) or who has it."""

    generate: Generate
    # Place in the line; kept over requeues and replacement by a newer attempt.
    order: int
    first_queued_at: float
    queued_at: float
    deadline: float
    sign_at: float
    sent: Sent | None = None
    # Worker id -> not asked again before.
    refused: dict[str, float] = field(default_factory=dict)
    # The prefill stage was done, or did not work out.
    is_prefill_over: bool = False
    prefill_worker_id: str | None = None
    # It waits for this busy worker until then.
    held_for: str | None = None
    held_until: float = 0.0

    @property
    def generation_id(self) -> str:
        """Its id."""
        return self.generate.generation_id


class JobQueue:
    """Jobs by generation id, and the line of those that wait. Mutable; owned by the router's core."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}
        # Generation ids in the order of `Job.order`, which is resorted only when one comes back.
        self._line: dict[str, Job] = {}
        self._orders = 0
        self._latest: OrderedDict[str, int] = OrderedDict()

    @property
    def waiting_count(self) -> int:
        """Jobs in the line."""
        return len(self._line)

    @property
    def count(self) -> int:
        """Jobs in the line and at workers."""
        return len(self._jobs)

    def waiting(self) -> Iterator[Job]:
        """Jobs in the line, first come first."""
        return iter(self._line.values())

    def get(self, generation_id: str) -> Job | None:
        """The job, wherever it is."""
        return self._jobs.get(generation_id)

    def latest_attempt(self, generation_id: str) -> int:
        """Highest attempt that was seen or revoked; 0 if none is remembered."""
        return self._latest.get(generation_id, 0)

    def remember(self, generation_id: str, attempt: int) -> None:
        """Attempts up to this one are not taken any more."""
        self._latest[generation_id] = max(attempt, self._latest.get(generation_id, 0))
        self._latest.move_to_end(generation_id)
        while len(self._latest) > REMEMBERED_MAX:
            self._latest.popitem(last=False)

    def add(self, generate: Generate, *, now: float, deadline: float, sign_at: float) -> Job:
        """A new attempt joins the line; at the place of an older one, which the caller has taken back before."""
        older = self._jobs.get(generate.generation_id)
        assert older is None or older.sent is None
        if older is None:
            self._orders += 1
        job = Job(
            generate=generate,
            order=self._orders if older is None else older.order,
            first_queued_at=now,
            queued_at=now,
            deadline=deadline,
            sign_at=sign_at,
        )
        self._jobs[job.generation_id] = job
        # Assignment to a key that is there keeps its place.
        self._line[job.generation_id] = job
        self.remember(job.generation_id, generate.attempt)
        return job

    def sent(self, job: Job, sent: Sent) -> None:
        """A worker gets it."""
        assert job.sent is None
        job.sent = sent
        del self._line[job.generation_id]

    def requeue(self, job: Job, now: float, sign_at: float) -> None:
        """It waits again, at its old place."""
        assert job.sent is not None
        job.sent, job.queued_at, job.sign_at, job.held_for = None, now, sign_at, None
        is_last = not self._line or next(reversed(self._line.values())).order < job.order
        self._line[job.generation_id] = job
        if not is_last:
            self._line = {line.generation_id: line for line in sorted(self._line.values(), key=lambda one: one.order)}

    def remove(self, job: Job) -> None:
        """It is off our hands."""
        del self._jobs[job.generation_id]
        self._line.pop(job.generation_id, None)

    def clear(self) -> None:
        """Nothing is in hand any more."""
        self._jobs.clear()
        self._line.clear()
