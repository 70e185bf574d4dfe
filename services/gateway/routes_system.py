"""Routes without a key: health and metrics, the same as on the metrics port, for whoever reaches only the API."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from services.gateway.web import json_response
from shared.metrics import REGISTRY, Health


class SystemRoutes:
    """Handlers."""

    def __init__(self, health: Callable[[], Health]) -> None:
        self._health = health

    def add_to(self, app: web.Application) -> None:
        """Register the routes."""
        app.router.add_get("/healthz", self.healthz)
        app.router.add_get("/readyz", self.readyz)
        app.router.add_get("/metrics", self.metrics)

    async def healthz(self, _: web.Request) -> web.Response:
        """This process answers."""
        return json_response({"status": "ok"})

    async def readyz(self, _: web.Request) -> web.Response:
        """Whether a turn can be served at this moment, and why not."""
        health = self._health()
        shown = {"ready": health.ready, "degraded": health.degraded, "reasons": list(health.reasons)}
        return json_response(shown, 200 if health.ready else 503)

    async def metrics(self, _: web.Request) -> web.Response:
        """Prometheus text."""
        return web.Response(body=generate_latest(REGISTRY), headers={"Content-Type": CONTENT_TYPE_LATEST})
