"""Pure: who serves and holds what, learned from heartbeats. Used by loop (model), router (namespaces), workers (shards)."""

from __future__ import annotations

from dataclasses import dataclass

from proto.fleet import Heartbeat, KvStoreCard, ModelCard, ServiceState
from shared.limits import SILENT_AFTER_S


@dataclass(frozen=True, slots=True)
class _Entry:
    heartbeat: Heartbeat
    heard_at: float


class CardBook:
    """The latest heartbeat of every instance that was heard within `SILENT_AFTER_S`.

    `now` is the listener's own monotonic time, so that clocks of different machines do not matter.
    """

    def __init__(self) -> None:
        # By instance id; one entry an instance, replaced by a later epoch or a later beat of the same one.
        self._entries: dict[str, _Entry] = {}

    def hear(self, heartbeat: Heartbeat, now: float) -> bool:
        """Take a heartbeat in. True if the instance is new, has a new epoch or changed state."""
        known = self._entries.get(heartbeat.instance_id)
        if known is not None and known.heartbeat.epoch > heartbeat.epoch:
            return False
        if heartbeat.state is ServiceState.STOPPED:
            return self._entries.pop(heartbeat.instance_id, None) is not None
        self._entries[heartbeat.instance_id] = _Entry(heartbeat, now)
        return known is None or known.heartbeat.epoch != heartbeat.epoch or known.heartbeat.state is not heartbeat.state

    def forget_silent(self, now: float) -> tuple[Heartbeat, ...]:
        """Drop who was silent too long and name them."""
        gone = tuple(e.heartbeat for e in self._entries.values() if now - e.heard_at > SILENT_AFTER_S)
        for heartbeat in gone:
            del self._entries[heartbeat.instance_id]
        return gone

    def instances(self, service: str | None = None) -> tuple[Heartbeat, ...]:
        """Live instances, of one service or all, by instance id."""
        return tuple(
            self._entries[name].heartbeat
            for name in sorted(self._entries)
            if service is None or self._entries[name].heartbeat.service == service
        )

    def model_cards(self, model: str | None = None) -> tuple[ModelCard, ...]:
        """Cards of live workers that serve `model` (or any), by worker id."""
        cards = (heartbeat.model_card for heartbeat in self.instances())
        return tuple(card for card in cards if card is not None and model in (None, card.model))

    def kv_cards(self) -> tuple[KvStoreCard, ...]:
        """Cards of live kvstore shards, by instance id."""
        return tuple(heartbeat.kv_card for heartbeat in self.instances() if heartbeat.kv_card is not None)
