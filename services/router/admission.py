"""Pure: whether a generation may join the line at all, and the refusals that say why not."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from proto.errors import ErrorCode, ErrorReply
from proto.generate import Generate
from services.router.events import Count, Counted
from services.router.workers import WorkerLife
from shared.limits import GENERATE_QUEUE_COUNT_MAX

OVERLOADED_RETRY_S: Final = 1.0
# Model names that were ever served here; a model whose workers all restart is not "not found".
MODELS_REMEMBERED_MAX: Final = 256
# Refusals that any worker would repeat: the generation itself is at fault.
FINAL_REFUSALS: Final = frozenset(
    {
        ErrorCode.BAD_MESSAGE,
        ErrorCode.BAD_REQUEST,
        ErrorCode.BAD_GRAMMAR,
        ErrorCode.CONTEXT_LENGTH,
        ErrorCode.TOO_LARGE,
        ErrorCode.DEADLINE,
        # Stopped: the worker heard the cancel that the router missed.
        ErrorCode.CANCELLED,
    }
)


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """What the settings say."""

    policy: str = "residency"
    queue_count_max: int = GENERATE_QUEUE_COUNT_MAX
    patience_s_max: float = 2.0
    prefill_tokens_min: int = 1024


class Models:
    """Names of models that workers were heard to serve, bounded. Mutable; owned by the router's core."""

    def __init__(self) -> None:
        self._names: OrderedDict[str, None] = OrderedDict()

    def know(self, model: str) -> None:
        """A worker says that it serves this."""
        self._names[model] = None
        self._names.move_to_end(model)
        while len(self._names) > MODELS_REMEMBERED_MAX:
            self._names.popitem(last=False)

    def is_foreign(self, model: str) -> bool:
        """Others were heard of, this one never."""
        return bool(self._names) and model not in self._names


def refusal_of(generate: Generate, models: Models, lives: Mapping[str, WorkerLife]) -> ErrorReply | None:
    """Why no worker could serve it, now or by waiting; None if one may."""
    if models.is_foreign(generate.model):
        message = f"no worker serves {generate.model!r}"
        return ErrorReply(code=ErrorCode.MODEL_NOT_FOUND, message=message, field="model")
    serving = [life for life in lives.values() if life.pull.model == generate.model]
    if serving and not any(life.serves(generate) for life in serving):
        message = f"no worker of {generate.model!r} has blocks of this namespace: weights, tokenizer or layout differ"
        return ErrorReply(code=ErrorCode.UNAVAILABLE, message=message, field="namespace", retry_after_s=1.0)
    return None


def overloaded(waiting_count: int) -> ErrorReply:
    """The line is as long as it may get."""
    message = f"{waiting_count} generations wait already"
    return ErrorReply(code=ErrorCode.OVERLOADED, message=message, retry_after_s=OVERLOADED_RETRY_S)


def counts_of(refusal: ErrorReply) -> list[Counted]:
    """What a refusal counts as."""
    counts = [Counted(Count.OVERLOADED)] if refusal.code is ErrorCode.OVERLOADED else []
    return [*counts, *([Counted(Count.NAMESPACE_MISMATCH)] if refusal.field == "namespace" else [])]
