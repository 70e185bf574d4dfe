"""Fixtures: a shard and a client of it."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from tempfile import mkdtemp

import pytest

from shared.kv_client import KvClient
from tests.contract.kvstore.shard import Shard, client
from tests.nats_server import NatsServer


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """A folder on the memory file system."""
    folder = Path(mkdtemp(prefix="roost-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def shard(nats_server: NatsServer, tmp_path: Path, memory_folder: Path) -> Iterator[Shard]:
    started = Shard(nats_server, tmp_path / "home", memory_folder)
    started.start()
    yield started
    started.close()


@pytest.fixture
async def kv(nats_server: NatsServer, shard: Shard) -> AsyncIterator[KvClient]:
    async with client(nats_server) as connected:
        yield connected
