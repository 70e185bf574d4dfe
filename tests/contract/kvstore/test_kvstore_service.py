"""The kvstore as a process, and its clients: both ways to read, lives, damage, bounds."""

from __future__ import annotations

import shutil
import signal
import socket
from pathlib import Path

import lmdb
import pytest

from proto import data_port
from proto.fleet import Heartbeat
from proto.ids import BlockKey
from proto.receipt import Source
from proto.residency import ResidencyDelta, ResidencySnapshot, SnapshotRequest, Tier
from proto.subjects import HEARTBEAT, RESIDENCY, SNAPSHOT
from shared.bus import Bus
from shared.kv_client import KvClient
from tests.contract.kvstore.shard import MIB, Shard, client, fetched, put, until
from tests.nats_server import NatsServer
from tests.unit.kvstore.frames import NAMESPACE, body_of, chain, frame_of, with_bodies


async def test_what_was_put_is_read_straight_from_the_map(kv: KvClient) -> None:
    blocks = chain(20)
    await put(kv, blocks)
    got, fetch = await fetched(kv, blocks)
    assert [block.key for block in got] == [block.key for block in blocks]
    assert {block.source for block in got} == {Source.RAM}
    assert (fetch.rejected, fetch.fallback) == (0, None)
    assert fetch.bytes_moved == sum(len(block.body) for block in got)


async def test_a_worker_that_may_not_map_uses_the_data_port_and_says_so(nats_server: NatsServer, kv: KvClient) -> None:
    blocks = chain(20)
    await put(kv, blocks)
    async with client(nats_server, "worker-1", maps=False) as remote:
        await until(lambda: remote.is_connected)
        got, _ = await fetched(remote, blocks)
        assert len(got) == 20 and {block.source for block in got} == {Source.POOL}


async def test_a_foreign_pid_namespace_falls_back_by_itself(
    nats_server: NatsServer, kv: KvClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB tells readers apart by pid: whoever is in another namespace must not map, whatever the paths say."""
    blocks = chain(3)
    await put(kv, blocks)
    monkeypatch.setattr("shared.kv_environment.machine_and_namespace", lambda: "this-boot:another-namespace")
    async with client(nats_server, "worker-1") as foreign:
        await until(lambda: foreign.is_connected)
        got, _ = await fetched(foreign, blocks)
        assert len(got) == 3 and {block.source for block in got} == {Source.POOL}


async def test_a_fetch_ends_where_the_chain_is_not_held(kv: KvClient) -> None:
    blocks = chain(6)
    await put(kv, blocks[:4])
    got, fetch = await fetched(kv, blocks)
    assert [block.key for block in got] == [block.key for block in blocks[:4]]
    assert fetch.fallback is None


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
async def test_a_new_life_serves_from_lmdb_what_the_old_one_committed(
    nats_server: NatsServer, shard: Shard, kv: KvClient, how: signal.Signals
) -> None:
    """After SIGKILL the RAM tier is still in shared memory; after a proper stop it is given back, and NVMe has it all."""
    blocks = chain(12)
    await put(kv, blocks)
    # Both tiers must have it: the sender's wait ends at the first commit.
    await until(lambda: count(shard, Tier.NVME) == 12)
    shard.end(how)
    shard.start()
    async with client(nats_server, "worker-1") as later:
        await until(lambda: later.is_connected)
        got, _ = await fetched(later, blocks)
        assert len(got) == 12
        assert {block.source for block in got} == {Source.RAM if how is signal.SIGKILL else Source.NVME}


async def test_a_client_outlives_its_shard(shard: Shard, kv: KvClient) -> None:
    """The same client, before and after: it lets go of the old life's map and finds the new one."""
    blocks = chain(12)
    await put(kv, blocks)
    await until(lambda: count(shard, Tier.NVME) == 12)
    assert len((await fetched(kv, blocks))[0]) == 12
    shard.end(signal.SIGKILL)
    # While it is away: nothing raises, nothing hangs. The map of a dead shard is still good.
    await fetched(kv, blocks)
    kv.put(NAMESPACE, blocks[0].key, with_bodies(blocks))
    shard.start()
    more = chain(5, seed=2)
    await until(lambda: shard.readies == 2)

    async def works() -> bool:
        kv.put(NAMESPACE, more[0].key, with_bodies(more))
        return await kv.flush(2.0) and len((await fetched(kv, more))[0]) == 5

    for _ in range(20):
        if await works():
            break
    else:
        pytest.fail("the new life is not used")
    assert len((await fetched(kv, blocks))[0]) == 12


def count(shard: Shard, tier: Tier) -> int:
    """Frames in a tier, read by another process (see Shard.edit)."""
    import subprocess
    import sys

    code = "import lmdb,sys; e=lmdb.open(sys.argv[1],readonly=True); print(e.stat()['entries'])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(shard.folder(tier))], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


DAMAGE = {
    "flipped bit": lambda old, _: old[:-1] + bytes([old[-1] ^ 1]),
    "truncated": lambda old, _: old[: len(old) // 2],
    "emptied": lambda old, _: b"",
    "noise": lambda old, _: bytes(range(256)) * (len(old) // 256),
    "another block's frame": lambda _, other: other,
    "another model's frame": lambda old, _: frame_of(
        next(b for b in chain(4, namespace=NAMESPACE[:-1] + b"x") if b.parent == bytes(16))  # type: ignore[arg-type]
    ),
}


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("maps", [True, False], ids=["map", "data port"])
async def test_a_damaged_frame_is_never_served(
    nats_server: NatsServer, shard: Shard, kv: KvClient, how: str, maps: bool
) -> None:
    """What comes before it is served; it is reported, dropped and, once put again, served again."""
    blocks = chain(4)
    await put(kv, blocks)
    await until(lambda: count(shard, Tier.NVME) == 4)
    victim, other = blocks[2].key, frame_of(blocks[1])
    for tier in (Tier.RAM, Tier.NVME):
        shard.edit(tier, lambda t: t.put(victim, DAMAGE[how](t.get(victim), other)))
    async with client(nats_server, "worker-1", maps=maps) as reader:
        await until(lambda: reader.is_connected)
        got, fetch = await fetched(reader, blocks)
        assert [block.key for block in got] == [block.key for block in blocks[:2]]
        assert fetch.rejected >= 1 and fetch.fallback is not None
        # Reported tier by tier: by the map both at once, by the port one at each try.
        for _ in range(10):
            if count(shard, Tier.NVME) == 3 and count(shard, Tier.RAM) == 3:
                break
            await fetched(reader, blocks)
        await until(lambda: count(shard, Tier.NVME) == 3 and count(shard, Tier.RAM) == 3)
        await put(kv, blocks)
        got, _ = await fetched(reader, blocks)
        assert len(got) == 4


async def test_deleted_frames_are_a_miss_and_no_more(shard: Shard, kv: KvClient) -> None:
    blocks = chain(4)
    await put(kv, blocks)
    await until(lambda: count(shard, Tier.NVME) == 4)
    for tier in (Tier.RAM, Tier.NVME):
        shard.edit(tier, lambda t: t.delete(blocks[1].key))
    got, fetch = await fetched(kv, blocks)
    assert [block.key for block in got] == [blocks[0].key]
    assert fetch.rejected == 0


async def test_a_start_drops_bad_frames_and_announces_only_the_good(bus: Bus, shard: Shard, kv: KvClient) -> None:
    blocks = chain(4)
    await put(kv, blocks)
    await until(lambda: count(shard, Tier.NVME) == 4)
    shard.end()
    shard.edit(Tier.NVME, lambda t: (t.put(blocks[3].key, b"\x92junk"), t.put(b"short", b"x"))[0])
    shard.start()
    await until(lambda: shard.readies == 2)
    page = await bus.request(SNAPSHOT, SnapshotRequest(tier=Tier.NVME), ResidencySnapshot, holder_id="shard-0")
    assert page.is_last and sorted(page.keys) == sorted(block.key for block in blocks[:3])
    assert count(shard, Tier.NVME) == 3


async def test_an_environment_that_cannot_be_opened_is_set_aside(
    nats_server: NatsServer, shard: Shard, kv: KvClient
) -> None:
    await put(kv, chain(2))
    shard.end()
    data = shard.folder(Tier.NVME) / "data.mdb"
    data.write_bytes(b"this is not LMDB" * 1_024)
    shard.start()
    async with client(nats_server, "worker-1") as later:
        await until(lambda: later.is_connected)
        await put(later, chain(2))
        assert len((await fetched(later, chain(2)))[0]) == 2
    assert list(shard.folder(Tier.NVME).parent.glob("nvme.damaged-*"))


async def test_blocks_are_announced_after_their_commit_and_in_order(bus: Bus, shard: Shard, kv: KvClient) -> None:
    deltas: list[ResidencyDelta] = []
    await bus.subscribe(RESIDENCY, ResidencyDelta, deltas.append)
    blocks = chain(30)
    await put(kv, blocks)
    held = {Tier.RAM: set[BlockKey](), Tier.NVME: set[BlockKey]()}

    def all_said() -> bool:
        for delta in deltas:
            for change in delta.changes:
                held[change.tier] |= set(change.stored)
        return all(len(keys) == 30 for keys in held.values())

    await until(all_said)
    assert [delta.seq for delta in deltas] == list(range(1, len(deltas) + 1))


async def test_a_full_tier_evicts_tails_before_heads(
    nats_server: NatsServer, tmp_path: Path, memory_folder: Path
) -> None:
    """Capacity for about forty blocks: eight chains of ten; whatever is left of a chain is its beginning."""
    shard = Shard(
        nats_server, tmp_path / "small", memory_folder / "small",
        kvstore_ram_bytes=40 * 4096, kvstore_nvme_bytes=40 * 4096,
    )  # fmt: skip
    shard.start()
    try:
        async with client(nats_server, "worker-small") as kv:
            chains = [chain(10, seed=seed) for seed in range(8)]
            for blocks in chains:
                await put(kv, blocks)
            lengths = [len((await fetched(kv, blocks))[0]) for blocks in chains]
            # Each tier evicts by itself, so together they may hold more than one of them.
            assert 20 <= sum(lengths) <= 80
            assert lengths[-1] == 10, "the newest chain is whole"
            await until(lambda: count(shard, Tier.NVME) <= 40 and count(shard, Tier.RAM) <= 40)
    finally:
        shard.close()


async def test_two_shards_do_not_share_folders(
    nats_server: NatsServer, shard: Shard, kv: KvClient, memory_folder: Path
) -> None:
    await until(lambda: kv.is_connected)
    second = Shard(nats_server, shard.home, memory_folder)
    second.log = shard.home / "second.log"
    second.start()
    assert second.wait() != 0
    assert "another process has shard-0" in second.log.read_text()


async def test_noise_on_the_data_port_ends_only_that_connection(bus: Bus, shard: Shard, kv: KvClient) -> None:
    beats: list[Heartbeat] = []
    await bus.subscribe(HEARTBEAT, Heartbeat, beats.append)
    await until(lambda: any(beat.kv_card for beat in beats))
    card = next(beat.kv_card for beat in beats if beat.kv_card)
    assert card is not None
    wrong = [
        b"GET / HTTP/1.1\r\n\r\n",
        b"".join(data_port.put(b"\x92not a frame")),
        data_port.LENGTH.pack(1) + b"\xff",
        data_port.LENGTH.pack(2**32 - 1),
        b"".join(data_port.packet(data_port.Kind.GET, b"odd")),
    ]
    for noise in wrong:
        with socket.create_connection((card.host, card.data_port), timeout=5) as connection:
            connection.sendall(noise)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass
    await put(kv, chain(2))
    assert len((await fetched(kv, chain(2)))[0]) == 2


async def test_a_frame_that_lies_about_its_key_is_not_taken(bus: Bus, shard: Shard, kv: KvClient) -> None:
    """A worker with a bug cannot put KV under somebody else's key."""
    good, other = chain(1)[0], chain(1, seed=9)[0]
    beats: list[Heartbeat] = []
    await bus.subscribe(HEARTBEAT, Heartbeat, beats.append)
    await until(lambda: any(beat.kv_card for beat in beats))
    card = next(beat.kv_card for beat in beats if beat.kv_card)
    assert card is not None
    liar = type(good)(good.key, good.parent, other.tokens, good.namespace)
    with socket.create_connection((card.host, card.data_port), timeout=5) as connection:
        connection.sendall(b"".join(data_port.put(frame_of(liar, body_of(good.key)))))
        answer = connection.recv(4096)
    assert b"key" in answer
    assert await fetched(kv, [good]) and not (await fetched(kv, [good]))[0]


async def test_a_tier_smaller_than_asked_for_is_said(
    nats_server: NatsServer, bus: Bus, tmp_path: Path, memory_folder: Path
) -> None:
    wanted_bytes = shutil.disk_usage(memory_folder).total * 2
    shard = Shard(nats_server, tmp_path / "vast", memory_folder / "vast", kvstore_ram_bytes=wanted_bytes)
    beats: list[Heartbeat] = []
    await bus.subscribe(HEARTBEAT, Heartbeat, beats.append)
    shard.start()
    try:
        await until(lambda: any(beat.kv_card for beat in beats))
        beat = next(beat for beat in beats if beat.kv_card)
        assert beat.degraded and any("ram tier has" in reason for reason in beat.reasons)
    finally:
        shard.close()


@pytest.mark.parametrize("name", ["kvstore_ram_bytes", "kvstore_port"])
async def test_a_malformed_setting_stops_the_start(
    nats_server: NatsServer, tmp_path: Path, memory_folder: Path, name: str
) -> None:
    shard = Shard(nats_server, tmp_path / "wrong", memory_folder, **{name: "many"})
    shard.start()
    assert shard.wait() == 2
    assert f"ROOST_{name.upper()}" in shard.log.read_text()


def test_the_map_is_not_written_through(tmp_path: Path) -> None:
    """With `writemap` a full disk kills the process (SIGBUS): the flags of a real environment say that it is off."""
    from shared.kv_environment import open_for_writing

    with open_for_writing(tmp_path, capacity_bytes=MIB, durable=True) as environment:
        flags = environment.flags()
        assert not flags["writemap"] and flags["sync"]
        assert isinstance(environment, lmdb.Environment)
