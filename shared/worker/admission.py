"""Pure: whether a worker takes an assignment. A table of checks, the first that objects answers.

A router places work elsewhere on any code but those that say that the generation itself is at fault
(services/router/core.py FINAL_REFUSALS): BAD_MESSAGE, BAD_REQUEST, BAD_GRAMMAR, CONTEXT_LENGTH, TOO_LARGE, DEADLINE.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from proto.errors import ErrorCode, ErrorReply, WireError
from proto.fleet import ModelCard
from proto.generate import Assignment, CancelGenerate, Stage
from proto.ids import NamespaceDigest
from shared.block_hash import Namespace, chain_keys
from shared.engine.protocol import BadGrammar, NeverFits, PoolFull

# Tenants whose namespace is kept; making one again takes microseconds.
NAMESPACES_MAX: Final = 1_024
# Cancels that may come before the assignment they stop.
CANCELS_MAX: Final = 4_096
FULL_RETRY_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Moment:
    """What of the worker's present state the checks need."""

    wall: float
    is_draining: bool
    # Assignments in hand, without older attempts of this one, which it replaces.
    works: int


class Admission:
    """Remembers cancels; knows nothing of blocks: the engine's claim says whether there is room for those."""

    def __init__(self, card: ModelCard, stage: Stage, *, streams_max: int) -> None:
        self._card, self._stage, self._streams_max = card, stage, streams_max
        self._namespaces: dict[bytes, NamespaceDigest] = {}
        # Generation -> attempts up to this one are stopped.
        self._stopped: OrderedDict[str, int] = OrderedDict()
        self._checks: tuple[Callable[[Assignment, Moment], ErrorReply | None], ...] = (
            self._check_life,
            self._check_time,
            self._check_room,
            self._check_blocks,
        )

    def refusal(self, assignment: Assignment, moment: Moment) -> ErrorReply | None:
        """Why not, None to take it."""
        return next((reply for check in self._checks if (reply := check(assignment, moment)) is not None), None)

    def stop(self, cancel: CancelGenerate) -> None:
        """Refuse these attempts from now on."""
        self._stopped[cancel.generation_id] = max(cancel.through_attempt, self.stopped_through(cancel.generation_id))
        self._stopped.move_to_end(cancel.generation_id)
        while len(self._stopped) > CANCELS_MAX:
            self._stopped.popitem(last=False)

    def stopped_through(self, generation_id: str) -> int:
        """The last attempt that was stopped, 0 if none was."""
        return self._stopped.get(generation_id, 0)

    def _check_life(self, assignment: Assignment, _: Moment) -> ErrorReply | None:
        if assignment.worker_epoch != self._card.epoch:
            message = (
                f"life {assignment.worker_epoch} of {self._card.worker_id} is over, this one is {self._card.epoch}"
            )
            return ErrorReply(code=ErrorCode.LOST, message=message, field="worker_epoch")
        if assignment.stage is not self._stage:
            message = f"{self._card.worker_id} does {self._stage} work"
            return ErrorReply(code=ErrorCode.CONFLICT, message=message, field="stage")
        return None

    def _check_time(self, assignment: Assignment, moment: Moment) -> ErrorReply | None:
        generate = assignment.generate
        if generate.attempt <= self.stopped_through(generate.generation_id):
            return ErrorReply(code=ErrorCode.CANCELLED, message="this attempt was stopped")
        if moment.wall >= generate.deadline_at:
            return ErrorReply(code=ErrorCode.DEADLINE, message="the deadline has passed")
        return None

    def _check_room(self, _: Assignment, moment: Moment) -> ErrorReply | None:
        if moment.is_draining:
            return ErrorReply(code=ErrorCode.DRAINING, message=f"{self._card.worker_id} is leaving")
        if moment.works >= self._streams_max:
            message = f"{moment.works} generations are in hand"
            return ErrorReply(code=ErrorCode.OVERLOADED, message=message, retry_after_s=FULL_RETRY_S)
        return None

    def _check_blocks(self, assignment: Assignment, _: Moment) -> ErrorReply | None:
        """KV is found by keys, so what names it must be what it says (wrong KV is never an answer)."""
        generate = assignment.generate
        namespace = self._namespace(generate.salt)
        if generate.namespace != namespace:
            # Another worker may serve it: weights or layout differ between workers while a fleet is renewed.
            message = f"{self._card.worker_id} has no blocks of this namespace: weights, tokenizer or layout differ"
            return ErrorReply(code=ErrorCode.UNAVAILABLE, message=message, field="namespace")
        if generate.keys != chain_keys(namespace, generate.tokens, self._card.block_tokens):
            return ErrorReply(code=ErrorCode.BAD_MESSAGE, message="these are not the tokens' keys", field="keys")
        if generate.emitted > len(generate.tokens):
            message = f"{generate.emitted} emitted of {len(generate.tokens)} tokens"
            return ErrorReply(code=ErrorCode.BAD_MESSAGE, message=message, field="emitted")
        return None

    def _namespace(self, salt: bytes) -> NamespaceDigest:
        digest = self._namespaces.get(salt)
        if digest is None:
            if len(self._namespaces) >= NAMESPACES_MAX:
                self._namespaces.clear()
            digest = self._namespaces[salt] = Namespace.of_card(self._card, salt).digest()
        return digest


def claim_refusal(trouble: PoolFull | NeverFits | BadGrammar | ValueError | WireError) -> ErrorReply:
    """Why the engine did not admit a request, as the router is told."""
    match trouble:
        case WireError():
            return trouble.reply
        case PoolFull():
            return ErrorReply(code=ErrorCode.OVERLOADED, message=str(trouble), retry_after_s=FULL_RETRY_S)
        case NeverFits():
            return ErrorReply(code=ErrorCode.CONTEXT_LENGTH, message=str(trouble), field="tokens")
        case BadGrammar():
            return ErrorReply(code=ErrorCode.BAD_GRAMMAR, message=str(trouble), field="grammar")
        case _:
            return ErrorReply(code=ErrorCode.BAD_MESSAGE, message=str(trouble), field="tokens")
