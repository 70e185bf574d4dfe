"""Real weights, a real kvstore process, a real bus: what one worker computed another one loads, and says the same."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

import pytest

from proto.chat import Sampling
from proto.generate import Generated, Stage, WorkOutcome
from proto.receipt import Source
from tests.contract.kvstore.shard import Shard
from tests.contract.worker.stand import Peer, Stand, Worker, promise, until
from tests.nats_server import NatsServer
from tests.tiny_model import greedy_by_transformers, prompt_of, read_model_directory

PROMPT = prompt_of(200)
GREEDY = Sampling(max_tokens=24, ignore_eos=True)


@pytest.fixture
def shard(nats_server: NatsServer, tmp_path: Path) -> Iterator[Shard]:
    memory = Path(mkdtemp(prefix="roost-test-", dir="/dev/shm"))
    started = Shard(nats_server, tmp_path / "kv", memory)
    started.start()
    yield started
    started.close()
    shutil.rmtree(memory, ignore_errors=True)


async def life(stand: Stand, name: str, stage: Stage = Stage.DECODE, engine: str = "torch") -> Worker:
    """A worker that has heard of the kvstore."""
    worker = await stand.worker(name, stage, worker_engine=engine, worker_pool_bytes=16 << 20)
    assert worker._kv is not None
    await until(lambda: worker._kv.is_connected)  # type: ignore[union-attr]
    return worker


async def run(peer: Peer, worker: Worker, name: str, tokens: tuple[int, ...], **more: object) -> Generated:
    card = worker.model_card()
    assert card is not None
    generate = peer.generate(card, name, tokens, sampling=GREEDY)
    assert (await peer.assign(worker, generate, **more)).accepted
    end = await peer.end_of(name)
    assert isinstance(end, Generated), end
    return end


async def stored(worker: Worker) -> None:
    """Everything it made is in the kvstore."""
    assert worker._kv is not None
    await worker._puts.handed_over()
    assert await worker._kv.flush(10.0)


async def test_a_second_life_loads_what_the_first_computed(stand: Stand, peer: Peer, shard: Shard, tiny: Path) -> None:
    """Same greedy tokens as cold, and as plain transformers; the answer's blocks come from the kvstore too."""
    model = read_model_directory(tiny, tiny.parent / "home")
    expected = greedy_by_transformers(model, PROMPT, GREEDY.max_tokens)
    first = await life(stand, "decode-0")
    assert first._core is not None and first._core.price.price.prefill_token_s != 0.002, "it was calibrated"
    cold = await run(peer, first, "cold", PROMPT)
    assert peer.tokens("cold") == expected and peer.sources("cold") == {"computed": 200}
    assert cold.bytes_moved == 0 and cold.fallback is None
    await stored(first)
    await stand.end(first)

    second = await life(stand, "decode-1")
    warm = await run(peer, second, "warm", PROMPT)
    assert peer.tokens("warm") == expected
    assert peer.sources("warm") == {"ram": 192, "computed": 8}
    card = second.model_card()
    assert card is not None and warm.bytes_moved == 12 * card.block_bytes and warm.fallback is None
    assert warm.frames_rejected == 0 and warm.load_s > 0
    # The conversation goes on: the answer so far, and more.
    longer = (*PROMPT, *expected, *prompt_of(20, salt=3))
    await run(peer, second, "longer", longer)
    assert peer.tokens("longer") == greedy_by_transformers(model, longer, GREEDY.max_tokens)
    # 13 blocks of prompt and answer are here, since this worker sealed the one that holds the answer.
    assert peer.sources("longer") == {"resident": 208, "computed": len(longer) - 208}
    assert second._core is not None and second._core.price.price.load_byte_s > 0


async def test_prefill_hands_over_to_decode(stand: Stand, peer: Peer, shard: Shard) -> None:
    """The kvstore has the blocks when the router hears PREFILLED; decode computes the rest only."""
    prefill = await life(stand, "prefill-0", Stage.PREFILL)
    card = prefill.model_card()
    assert card is not None
    generate = peer.generate(card, "g1", PROMPT, sampling=GREEDY)
    assert (await peer.assign(prefill, generate)).accepted
    done = await peer.done_of("g1")
    assert done.outcome is WorkOutcome.PREFILLED and done.error is None
    assert {event.body.kind for event in peer.events} == {"working"}
    await stand.end(prefill)

    decode = await life(stand, "decode-0")
    reply = await peer.assign(
        decode, generate, plan=promise(generate, Source.RAM, 12), prefill_worker_id=prefill.instance_id
    )
    assert reply.accepted
    end = await peer.end_of("g1")
    assert isinstance(end, Generated) and end.prefill_worker_id == "prefill-0" and end.fallback is None
    assert peer.sources("g1") == {"ram": 192, "computed": 8}
    assert len(peer.tokens("g1")) == 24


async def test_a_kvstore_that_dies_costs_no_answer(stand: Stand, peer: Peer, shard: Shard) -> None:
    """It is killed; the worker says why it is not well, and computes."""
    worker = await life(stand, "decode-0", engine="sim")
    await run(peer, worker, "g1", PROMPT)
    await stored(worker)
    shard.end(signal.SIGKILL)
    end = await run(peer, worker, "g2", prompt_of(200, salt=1))
    assert peer.sources("g2") == {"computed": 200} and end.total == 24
    await until(lambda: worker.health().degraded)
    await run(peer, worker, "g3", prompt_of(200, salt=2))
    shard.start()
    await until(lambda: shard.readies == 2 and not worker.health().degraded)
    await run(peer, worker, "g4", prompt_of(200, salt=4))
    await stored(worker)
