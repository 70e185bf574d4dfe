"""Fixtures shared by all tests: a real nats-server on a free port, and clean settings."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from shared.bus import Bus
from shared.model_dir import models_home
from shared.settings import DEFAULT_MODEL, ENV_PREFIX, RoostSettings
from tests.nats_server import NatsServer


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the machine leaks into a test."""
    for name in list(os.environ):
        if name.startswith(ENV_PREFIX) or name in ("NATS_URL", "NATS_SERVER"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def models() -> Path:
    """Folder with the default model, converted by whoever comes first; `scripts/up` uses the same one."""
    # Local: only the tests that need weights pay for torch.
    from shared.engine.convert import ensure_model

    home = Path(os.environ.get("ROOST_TEST_HOME", RoostSettings.model_fields["home"].default)).expanduser().resolve()
    ensure_model(DEFAULT_MODEL, home)
    return models_home(home)


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A real server with JetStream in a folder of its own, stopped at the end."""
    server = NatsServer(tmp_path / "nats")
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def bus(nats_server: NatsServer) -> AsyncIterator[Bus]:
    """A connected bus; a bug in a handler fails the test."""
    bugs: list[BaseException] = []
    connected = await Bus.connect(RoostSettings(nats_url=nats_server.url), "test", bugs.append)
    yield connected
    await connected.close()
    assert not bugs, bugs
