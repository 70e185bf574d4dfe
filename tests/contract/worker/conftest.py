"""A tiny model's directory, which the simulated engine needs too, and a stand for workers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.contract.worker.stand import Peer, Stand
from tests.nats_server import NatsServer
from tests.tiny_model import llama, make_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama with random weights and a window of 512 tokens."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    make_model(path, llama())
    return path


@pytest.fixture
async def stand(nats_server: NatsServer, tmp_path: Path, tiny: Path) -> AsyncIterator[Stand]:
    made = Stand(nats_server.url, tmp_path, str(tiny))
    yield made
    await made.close()


@pytest.fixture
async def peer(stand: Stand) -> Peer:
    return await stand.peer()
