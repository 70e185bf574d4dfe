"""A real kvstore process over a real nats-server, and clients of it in the test's own process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import lmdb

from proto.residency import Tier
from shared.bus import Bus
from shared.clock import RealClock
from shared.engine.protocol import SealedBlock
from shared.kv_client import Fetch, KvClient, KvClientSettings
from shared.kv_reader import FetchedBlock
from shared.settings import RoostSettings
from tests.nats_server import NatsServer
from tests.unit.kvstore.frames import FORMAT, NAMESPACE, body_of, wanted, with_bodies

MIB = 1024 * 1024


async def until(happened: Callable[[], object], within_s: float = 15.0) -> None:
    """Poll with a deadline."""
    give_up_at = time.monotonic() + within_s
    while not happened():
        assert time.monotonic() < give_up_at, "it did not happen"
        await asyncio.sleep(0.01)


class Shard:
    """One kvstore with folders of its own."""

    def __init__(self, nats: NatsServer, home: Path, ram: Path, **settings: object) -> None:
        self.home, self.ram_root, self.log = home, ram, home / "kvstore.log"
        self._environment = {
            **os.environ,
            "ROOST_NATS_URL": nats.url,
            "ROOST_HOME": str(home),
            "ROOST_INSTANCE": "shard-0",
            "ROOST_KVSTORE_RAM_PATH": str(ram),
            "ROOST_KVSTORE_RAM_BYTES": str(16 * MIB),
            "ROOST_KVSTORE_NVME_BYTES": str(32 * MIB),
            **{f"ROOST_{name.upper()}": str(value) for name, value in settings.items()},
        }
        home.mkdir(parents=True, exist_ok=True)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "services.kvstore"], env=self._environment, stdout=log, stderr=log
            )

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        assert self._process is not None
        self._process.send_signal(how)
        status = self._process.wait(timeout=20)
        self._process = None
        return status

    def wait(self) -> int:
        """For a process that ends by itself."""
        assert self._process is not None
        status = self._process.wait(timeout=20)
        self._process = None
        return status

    def close(self) -> None:
        if self._process is not None:
            self.end(signal.SIGKILL)

    @property
    def readies(self) -> int:
        """Lives that became ready."""
        return self.log.read_text().count('"event": "ready"')

    def folder(self, tier: Tier) -> Path:
        return self.ram_root / "shard-0" if tier is Tier.RAM else self.home / "kv" / "shard-0" / "nvme"

    def edit(self, tier: Tier, change: Callable[[lmdb.Transaction], None]) -> None:
        """Write into a tier behind the shard's back, as a broken disk or a bug would. In a process of its own:
        one process must not open an environment twice."""
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                with lmdb.open(str(self.folder(tier)), map_size=64 * MIB) as environment:
                    with environment.begin(write=True) as transaction:
                        change(transaction)
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0


@asynccontextmanager
async def client(nats: NatsServer, name: str = "worker-0", *, maps: bool = True) -> AsyncIterator[KvClient]:
    """A worker's client on a connection of its own; a bug in it fails the test."""
    bugs: list[BaseException] = []
    bus = await Bus.connect(RoostSettings(nats_url=nats.url), name, bugs.append)
    connected = KvClient(bus, RealClock(), FORMAT, KvClientSettings(maps_environments=maps))
    await connected.open()
    yield connected
    await connected.close()
    await bus.close()
    assert not bugs, bugs


async def fetched(kv: KvClient, blocks: list[SealedBlock]) -> tuple[list[FetchedBlock], Fetch]:
    fetch = kv.fetch(NAMESPACE, blocks[0].key, wanted(blocks))
    got = [block async for block in fetch]
    for block in got:
        assert bytes(block.body) == body_of(block.key), "wrong KV is the one unforgivable failure"
    return got, fetch


async def put(kv: KvClient, blocks: list[SealedBlock]) -> None:
    """All of them readable when this returns."""
    await until(lambda: kv.is_connected)
    assert kv.put(NAMESPACE, blocks[0].key, with_bodies(blocks))
    assert await kv.flush(10.0)
