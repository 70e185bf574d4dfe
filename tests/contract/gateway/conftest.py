"""Fixtures: a scripted loop on a real bus, and gateways with real HTTP in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from proto.fleet import ServiceState
from services.gateway.service import GatewayService
from services.gateway.settings import GatewaySettings
from shared.bus import Bus
from tests.contract.gateway.scripted_loop import ScriptedLoop
from tests.nats_server import NatsServer

START_S_MAX = 10.0


@dataclass(slots=True)
class Event:
    """One server-sent event."""

    id: str
    kind: str
    data: Any


@dataclass(slots=True)
class Api:
    """A client of one gateway."""

    service: GatewayService
    http: aiohttp.ClientSession
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.service.port}"

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """One request with a JSON answer."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        async with self.http.request(method, self.url + path, data=data, headers=self.headers | headers) as response:
            return response.status, await response.json()

    @asynccontextmanager
    async def stream(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> AsyncIterator[AsyncIterator[Event]]:
        """One request with a stream as its answer."""
        async with self.http.request(method, self.url + path, json=body, headers=self.headers | headers) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            yield events(response)

    async def session(self, **body: Any) -> str:
        status, made = await self.call("POST", "/v1/sessions", body)
        assert status == 201, made
        return str(made["session_id"])


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[Event]:
    """The events of a stream; comments are left out."""
    fields: dict[str, str] = {}
    async for raw in response.content:
        line = raw.decode().rstrip("\n")
        if line.startswith(":"):
            continue
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif fields:
            data = fields["data"]
            yield Event(fields.get("id", ""), fields.get("event", ""), data if data == "[DONE]" else json.loads(data))
            fields = {}


RunGateway = Callable[..., AbstractAsyncContextManager[Api]]


@pytest.fixture
async def loop(bus: Bus) -> ScriptedLoop:
    made = ScriptedLoop(bus)
    await made.start()
    return made


@pytest.fixture
async def run_gateway(nats_server: NatsServer) -> AsyncIterator[RunGateway]:
    """Run a gateway until the block ends; it must then end well."""

    @asynccontextmanager
    async def running(*, is_ready: bool = True, **settings: Any) -> AsyncIterator[Api]:
        made = GatewaySettings(nats_url=nats_server.url, gateway_port=0, drain_s=2.0, **settings)
        service = GatewayService(made)
        life = asyncio.ensure_future(service.run())
        async with asyncio.timeout(START_S_MAX):
            while service.state is ServiceState.STARTING or service.health().ready != is_ready:
                assert not life.done(), life
                await asyncio.sleep(0.01)
        async with aiohttp.ClientSession() as http:
            yield Api(service, http)
        service.request_stop()
        assert await life == 0
        service._turns._hub.check_integrity()
        assert service._turns.count == 0

    yield running


@pytest.fixture
async def api(loop: ScriptedLoop, run_gateway: RunGateway) -> AsyncIterator[Api]:
    """One gateway with default settings, ready."""
    async with run_gateway() as made:
        yield made
