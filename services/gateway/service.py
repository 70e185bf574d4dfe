"""THE SHELL of the gateway: the HTTP server's life, and what is heard of the fleet."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from proto.errors import ErrorCode, WireError
from proto.fleet import FleetPing, Heartbeat
from proto.subjects import FLEET_PING
from services.gateway.auth import KeyRing
from services.gateway.grammar_check import GrammarChecker
from services.gateway.models import ModelBook
from services.gateway.routes_chat import ChatRoutes
from services.gateway.routes_native import NativeRoutes
from services.gateway.routes_system import SystemRoutes
from services.gateway.settings import GatewaySettings
from services.gateway.turns import Turns
from services.gateway.web import Kit, make_app
from shared.errors import SettingsError
from shared.limits import HEARTBEAT_S
from shared.log import get_logger
from shared.metrics import Health
from shared.service import Service
from shared.settings import WORKER_SERVICES

BACKLOG: Final = 1_024
# Connections that are still open when everything has been drained.
CLOSE_S: Final = 1.0

log = get_logger()


class GatewayService(Service[GatewaySettings]):
    """Shell of the gateway. Decides nothing: requests, reader and answers are pure."""

    name = "gateway"
    settings_type = GatewaySettings

    async def start(self) -> None:
        """See Service."""
        settings = self.settings
        keys = KeyRing({key.get_secret_value(): tenant for key, tenant in settings.gateway_api_keys.items()})
        self._models = ModelBook(settings.gateway_model_aliases, settings.model)
        self._lacks = self._models.lacks()
        self._turns = Turns(self.bus, self.clock, settings)
        self._grammars = GrammarChecker()
        kit = Kit(settings, self.bus, self.clock, keys, self._models, self._turns, self._grammars)
        await self.hear_fleet(self._heard, "loop", *WORKER_SERVICES)
        app = make_app(kit)
        for routes in (ChatRoutes(kit), NativeRoutes(kit), SystemRoutes(self._safe_health)):
            routes.add_to(app)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=CLOSE_S, access_log=None)
        await self._runner.setup()
        await self._listen()
        self.spawn(self._watch())
        try:
            await self.bus.publish(FLEET_PING, FleetPing(asked_by=self.instance_id))
        except WireError as away:
            assert away.code is ErrorCode.UNAVAILABLE
            log.info("fleet_not_asked", error=str(away))

    async def _listen(self) -> None:
        site = web.TCPSite(self._runner, self.settings.gateway_host, self.settings.gateway_port, backlog=BACKLOG)
        try:
            await site.start()
        except OSError as taken:
            raise SettingsError("ROOST_GATEWAY_PORT", str(taken)) from taken
        log.info("listening", host=self.settings.gateway_host, port=self.port)

    @property
    def port(self) -> int:
        """Where the API really is."""
        return int(self._runner.addresses[0][1])

    def _heard(self, heartbeat: Heartbeat) -> None:
        if self._models.hear(heartbeat, self.clock.monotonic()):
            self._lacks = self._models.lacks()

    async def _watch(self) -> None:
        while True:
            await self.clock.sleep(HEARTBEAT_S)
            self._models.forget_silent(self.clock.monotonic())
            self._lacks = self._models.lacks()

    def health(self) -> Health:
        """Ready when a turn could be served: a loop and a worker are heard."""
        base = super().health()
        lacks = getattr(self, "_lacks", ())
        return Health(ready=base.ready and not lacks, degraded=base.degraded, reasons=(*base.reasons, *lacks))

    def load(self) -> dict[str, float]:
        """See Service."""
        return {"turns": float(self._turns.count) if hasattr(self, "_turns") else 0.0}

    async def drain(self) -> None:
        """Refuse new turns, and let streams end."""
        await self._turns.drain()

    async def stop(self) -> None:
        """Close the port and all connections."""
        if hasattr(self, "_runner"):
            await self._runner.cleanup()
        if hasattr(self, "_grammars"):
            self._grammars.close()
