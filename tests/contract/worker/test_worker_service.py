"""The worker's shell on a real bus: work comes, tokens go, and whatever stops work gives everything back."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from structlog.testing import capture_logs

from proto.chat import Sampling
from proto.errors import ErrorCode, WireError
from proto.generate import Generated, GenerateFailed, Stage, TokensOut, Working, WorkOutcome
from proto.receipt import Source
from proto.residency import TierChange
from services.decode.service import DecodeService
from services.decode.settings import DecodeSettings
from services.router.service import RouterService
from services.router.settings import RouterSettings
from shared.service import EXIT_SETTINGS
from tests.contract.worker.stand import Peer, Stand, Worker, promise, until
from tests.nats_server import NatsServer
from tests.tiny_model import prompt_of

LONG = Sampling(max_tokens=300, ignore_eos=True)


async def empty(worker: Worker) -> None:
    """Nothing is held by anything."""
    assert worker._thread is not None and worker._core is not None
    await until(lambda: not worker._core.works)  # type: ignore[union-attr]
    assert not worker._waiters
    stats = await worker._thread.stats()
    assert (stats.blocks_held, stats.requests_claimed, stats.requests_decoding) == (0, 0, 0)
    await worker._thread.check_integrity()
    await until(lambda: not worker._jobs._tasks)


def held_by_deltas(peer: Peer) -> set[bytes]:
    """What the deltas say, replayed; checks their numbers."""
    held: set[bytes] = set()
    for number, delta in enumerate(peer.deltas, 1):
        assert delta.seq == number
        for change in delta.changes:
            assert isinstance(change, TierChange)
            held = (held | set(change.stored)) - set(change.dropped)
    return held


async def test_a_generation_from_assignment_to_receipt(stand: Stand, peer: Peer) -> None:
    """It pulls, answers, says signs and tokens in order and the end; the second prompt finds the first one's blocks."""
    worker = await stand.worker()
    await until(lambda: peer.pulls and peer.beats)
    card = worker.model_card()
    assert card is not None and peer.pull_of(worker).room == 8
    first = peer.generate(card, "g1", prompt_of(100))
    reply = await peer.assign(worker, first)
    assert reply.accepted, reply
    end = await peer.end_of("g1")
    assert isinstance(end, Generated)
    assert peer.sources("g1") == {"computed": 100} and end.total == 12 == len(peer.tokens("g1"))
    kinds = [event.body.kind for event in peer.events]
    assert kinds[:2] == ["working", "working"] and kinds.index("tokens") > kinds.index("working")
    assert kinds[-1] == "generated" and kinds.count("generated") == 1
    done = await peer.done_of("g1")
    assert (done.outcome, done.found_cached_tokens, done.promised_cached_tokens) == (WorkOutcome.DONE, 0, 0)
    await until(lambda: peer.pull_of(worker).room == 8 and peer.pull_of(worker).assigned_count == 1)
    # 111 tokens have KV: six full blocks of the prompt and its answer.
    assert len(held_by_deltas(peer)) == 6
    page = await peer.snapshot(worker)
    assert set(page.keys) == held_by_deltas(peer) and page.seq == len(peer.deltas) and page.is_last

    again = peer.generate(card, "g2", prompt_of(100))
    assert (await peer.assign(worker, again, plan=promise(again, Source.RESIDENT, 6))).accepted
    await peer.end_of("g2")
    assert peer.tokens("g2") == peer.tokens("g1")
    assert peer.sources("g2") == {"resident": 96, "computed": 4}
    assert (await peer.done_of("g2")).found_cached_tokens == 96 == (await peer.done_of("g2")).promised_cached_tokens
    await empty(worker)


async def test_a_worker_without_kvstore_serves_and_says_so(stand: Stand, peer: Peer) -> None:
    """Degraded, with the reason, and a promise that was not kept is in the receipt."""
    worker = await stand.worker()
    await until(lambda: worker.health().degraded)
    assert worker.health().reasons == ("no kvstore is heard",) and worker.health().ready
    generate = peer.generate(worker.model_card(), "g1", prompt_of(100))  # type: ignore[arg-type]
    assert (await peer.assign(worker, generate, plan=promise(generate, Source.NVME, 6))).accepted
    end = await peer.end_of("g1")
    assert isinstance(end, Generated) and end.fallback == "6 blocks were promised, 0 were found"


async def test_cancel_and_deadline_give_everything_back(stand: Stand, peer: Peer) -> None:
    """The loop's cancel and the clock both stop a stream within a step."""
    worker = await stand.worker()
    card = worker.model_card()
    assert card is not None
    stopped = peer.generate(card, "g1", prompt_of(100), sampling=LONG)
    late = peer.generate(card, "g2", prompt_of(100, salt=1), sampling=LONG, deadline_at=time.time() + 0.4)
    assert (await peer.assign(worker, stopped)).accepted and (await peer.assign(worker, late)).accepted
    await until(lambda: peer.bodies("g1", TokensOut) and peer.bodies("g2", TokensOut))
    await peer.cancel("g1")
    assert (await peer.done_of("g1")).outcome is WorkOutcome.CANCELLED
    end = await peer.end_of("g2")
    assert isinstance(end, GenerateFailed) and end.error.code is ErrorCode.DEADLINE
    assert (await peer.done_of("g2")).outcome is WorkOutcome.FAILED
    said = len(peer.events)
    await empty(worker)
    assert len(peer.events) == said and not peer.bodies("g1", Generated)
    again = await peer.assign(worker, stopped)
    assert not again.accepted and again.error is not None and again.error.code is ErrorCode.CANCELLED


async def test_refusals_have_their_reasons(stand: Stand, peer: Peer) -> None:
    """What any worker would refuse, what another might take, and a full pool."""
    worker = await stand.worker(worker_streams_max=2, worker_pool_bytes=40 * 2 * 3 * 16 * 2 * 16 * 4)
    card = worker.model_card()
    assert card is not None
    fine = peer.generate(card, "g", prompt_of(40))

    async def code(**more: object) -> tuple[ErrorCode, str | None]:
        reply = await peer.assign(worker, fine.model_copy(update=more))
        assert not reply.accepted and reply.error is not None
        return reply.error.code, reply.error.field

    assert await code(keys=fine.keys[:1]) == (ErrorCode.BAD_MESSAGE, "keys")
    assert await code(namespace=bytes(32)) == (ErrorCode.UNAVAILABLE, "namespace")
    assert await code(tokens=(9999,), keys=()) == (ErrorCode.BAD_MESSAGE, "tokens")
    assert await code(sampling=Sampling(max_tokens=5000)) == (ErrorCode.CONTEXT_LENGTH, "tokens")
    assert await code(deadline_at=1.0) == (ErrorCode.DEADLINE, None)
    other = await peer.assign(worker, fine, stage=Stage.PREFILL)
    assert other.error is not None and (other.error.code, other.error.field) == (ErrorCode.CONFLICT, "stage")
    assert (await peer.assign(worker, peer.generate(card, "g1", prompt_of(200), sampling=LONG))).accepted
    big = await peer.assign(worker, peer.generate(card, "g2", prompt_of(200, salt=1), sampling=LONG))
    assert big.error is not None and big.error.code is ErrorCode.OVERLOADED and "blocks" in big.error.message
    await until(lambda: peer.pull_of(worker).room == 0)
    assert peer.pull_of(worker).assigned_count == 8
    # It says room again by itself.
    await until(lambda: peer.pull_of(worker).room > 0)


async def test_an_assignment_twice_is_one_generation(stand: Stand, peer: Peer) -> None:
    """A router that did not hear the answer asks again."""
    worker = await stand.worker()
    card = worker.model_card()
    assert card is not None
    assignment = peer.assignment(worker, peer.generate(card, "g1", prompt_of(50)))
    replies = await asyncio.gather(*(peer.send(worker, assignment) for _ in range(3)))
    await peer.end_of("g1")
    replies.append(await peer.send(worker, assignment))
    assert {reply.accepted for reply in replies} == {True}
    assert len(peer.tokens("g1")) == 12 and len(peer.done) == 1
    await until(lambda: peer.pull_of(worker).assigned_count == 1)


async def test_a_newer_attempt_replaces_the_older(stand: Stand, peer: Peer) -> None:
    """The loop gave the first one up; its events stop, the second one's go on."""
    worker = await stand.worker()
    card = worker.model_card()
    assert card is not None
    first = peer.generate(card, "g1", prompt_of(60), sampling=LONG)
    assert (await peer.assign(worker, first)).accepted
    await until(lambda: len(peer.bodies("g1", TokensOut)) > 3)
    assert (await peer.assign(worker, first.model_copy(update={"attempt": 2}))).accepted
    await peer.end_of("g1")
    seen = [event.attempt for event in peer.events]
    assert seen == sorted(seen) and set(seen) == {1, 2}
    outcomes = [done.outcome for done in peer.done]
    assert outcomes == [WorkOutcome.CANCELLED, WorkOutcome.DONE]
    old = await peer.assign(worker, first)
    assert old.error is not None and old.error.code is ErrorCode.CANCELLED
    await empty(worker)


async def test_signs_while_a_long_prompt_is_computed(stand: Stand, peer: Peer) -> None:
    """The loop hears of it each second."""
    worker = await stand.worker(worker_sim_prefill_token_s=0.006)
    generate = peer.generate(worker.model_card(), "g1", prompt_of(480))  # type: ignore[arg-type]
    assert (await peer.assign(worker, generate)).accepted
    await peer.end_of("g1")
    progress = [body.prefilled_tokens for body in peer.bodies("g1", Working)]
    assert progress == sorted(progress) and progress[-1] == 480 and any(0 < tokens < 480 for tokens in progress)


async def test_drain_finishes_what_it_can(stand: Stand, peer: Peer) -> None:
    """Short work ends, long work is given back as DRAINING, nothing new is taken."""
    worker = await stand.worker(drain_s=1.5, worker_sim_decode_base_s=0.02)
    card = worker.model_card()
    assert card is not None
    assert (await peer.assign(worker, peer.generate(card, "short", prompt_of(40)))).accepted
    assert (await peer.assign(worker, peer.generate(card, "long", prompt_of(50), sampling=LONG))).accepted
    draining = asyncio.create_task(worker.drain())
    await until(lambda: peer.pulls and peer.pull_of(worker).room == 0)
    refused = await peer.assign(worker, peer.generate(card, "new", prompt_of(40)))
    assert refused.error is not None and refused.error.code is ErrorCode.DRAINING
    await draining
    assert isinstance(await peer.end_of("short"), Generated)
    end = await peer.end_of("long")
    assert isinstance(end, GenerateFailed) and end.error.code is ErrorCode.DRAINING
    await empty(worker)


async def test_prefill_says_no_tokens(stand: Stand, peer: Peer) -> None:
    """Without a kvstore nothing was handed over, so the stage failed; the loop hears only signs."""
    worker = await stand.worker("prefill-0", Stage.PREFILL)
    generate = peer.generate(worker.model_card(), "g1", prompt_of(100))  # type: ignore[arg-type]
    assert (await peer.assign(worker, generate)).accepted
    done = await peer.done_of("g1")
    assert done.outcome is WorkOutcome.FAILED and done.error is not None
    assert done.error.code is ErrorCode.UNAVAILABLE
    assert {event.body.kind for event in peer.events} == {"working"}
    await until(lambda: len(held_by_deltas(peer)) == 6)
    await empty(worker)


async def test_it_pulls_for_a_new_router_and_after_nats_came_back(
    stand: Stand, peer: Peer, nats_server: NatsServer
) -> None:
    """Both know nothing of it; the next assignment works as before."""
    worker = await stand.worker()
    await until(lambda: peer.pulls)
    peer.pulls.clear()
    await peer.hello()
    await until(lambda: peer.pulls, 0.8)
    nats_server.kill()
    nats_server.start()
    await until(lambda: worker.bus.is_connected and peer.bus.is_connected)
    peer.pulls.clear()
    await until(lambda: peer.pulls)
    card = worker.model_card()
    assert card is not None
    generate = peer.generate(card, "g1", prompt_of(40))
    for _ in range(50):
        try:
            assert (await peer.assign(worker, generate)).accepted
            break
        except WireError as away:
            assert away.code is ErrorCode.UNAVAILABLE
            await asyncio.sleep(0.1)
    assert isinstance(await peer.end_of("g1"), Generated)


async def test_a_pool_without_room_for_a_block_refuses_the_start(
    nats_server: NatsServer, tmp_path: Path, tiny: Path
) -> None:
    """Another start would fail the same way, so the exit status says not to try again, and the log says why."""
    settings = DecodeSettings(
        nats_url=nats_server.url, home=tmp_path, model=str(tiny), worker_engine="sim", worker_pool_bytes=10
    )
    with capture_logs() as logs:
        assert await DecodeService(settings).run() == EXIT_SETTINGS
    (why,) = [entry["error"] for entry in logs if entry["event"] == "refused_to_start"]
    assert "a pool of 10 bytes does not hold one block" in why


async def test_with_the_real_router(stand: Stand, peer: Peer, nats_server: NatsServer) -> None:
    """The router learns the worker's blocks from deltas, and sends the second prompt where the first one ran."""
    router = RouterService(RouterSettings(nats_url=nats_server.url, instance="router-0"))
    router.bus = await stand.bus("router-0")
    await router.start()
    try:
        workers = [await stand.worker(name, worker_sim_prefill_token_s=0.001) for name in ("decode-0", "decode-1")]
        await until(lambda: len(router._core.lives) == 2 and all(life.card for life in router._core.lives.values()))
        card = workers[0].model_card()
        assert card is not None
        for number in range(4):
            name = f"g{number}"
            await router._generate(peer.generate(card, name, prompt_of(160)))
            assert isinstance(await peer.end_of(name), Generated)
            await peer.done_of(name)
            await until(lambda: router._core.jobs.count == 0)
        used = {done.worker_id for done in peer.done}
        assert len(used) == 1, "it went where its prefix is"
        assert peer.done[-1].promised_cached_tokens == peer.done[-1].found_cached_tokens == 144
        assert peer.done[-1].predicted_s is not None
    finally:
        for task in list(router._tasks):
            task.cancel()
