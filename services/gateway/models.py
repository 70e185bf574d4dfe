"""Pure: which models can be asked for. Learned from the cards of live workers, and remembered while they restart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from proto.errors import ErrorCode, WireError
from proto.fleet import Heartbeat
from shared.cards import CardBook

# Models remembered beyond the life of their last worker.
REMEMBERED_MAX: Final = 64


class ModelBook:
    """Owns the gateway's knowledge of the fleet. `now` is monotonic seconds."""

    def __init__(self, aliases: Mapping[str, str], preferred: str) -> None:
        """`preferred` is the model of requests that name none, if it is served."""
        self._aliases, self._preferred = dict(aliases), preferred
        self._cards = CardBook()
        # Model name -> window in tokens, as its last card said; oldest first.
        self._known: dict[str, int] = {}

    def hear(self, heartbeat: Heartbeat, now: float) -> bool:
        """Take a heartbeat in. True if somebody came, went or changed."""
        card = heartbeat.model_card
        if card is not None:
            self._known.pop(card.model, None)
            self._known[card.model] = card.context_tokens
            while len(self._known) > REMEMBERED_MAX:
                del self._known[next(iter(self._known))]
        return self._cards.hear(heartbeat, now)

    def forget_silent(self, now: float) -> None:
        """Drop who was silent too long."""
        self._cards.forget_silent(now)

    def lacks(self) -> tuple[str, ...]:
        """Why no turn could be served at this moment."""
        lacks = []
        if not self._cards.instances("loop"):
            lacks.append("no loop is heard")
        if not self._cards.model_cards():
            lacks.append("no worker is heard")
        return tuple(lacks)

    def names(self) -> list[str]:
        """Every name that `resolve` takes, in order."""
        return sorted({*self._known, *(alias for alias, model in self._aliases.items() if model in self._known)})

    def resolve(self, name: str | None) -> str:
        """The model that is meant. Raises MODEL_NOT_FOUND, or UNAVAILABLE before any worker was heard."""
        if not self._known:
            raise WireError(ErrorCode.UNAVAILABLE, "no worker has been heard yet", field="model", retry_after_s=2.0)
        if name is None:
            return self._preferred if self._preferred in self._known else next(reversed(self._known))
        model = self._aliases.get(name, name)
        if model not in self._known:
            known = ", ".join(self.names()[:20])
            raise WireError(
                ErrorCode.MODEL_NOT_FOUND, f"no model {name[:100]!r} here; there are: {known}", field="model"
            )
        return model

    def max_tokens(self, model: str, default: int) -> int:
        """Answer length for a request that names none: never more than the window."""
        return min(default, self._known[model])

    def model_json(self, name: str, created: int) -> dict[str, Any]:
        """A row of `GET /v1/models`. Raises MODEL_NOT_FOUND."""
        model = self.resolve(name)
        row: dict[str, Any] = {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "roost",
            "max_model_len": self._known[model],
        }
        return row if name == model else row | {"root": model}
