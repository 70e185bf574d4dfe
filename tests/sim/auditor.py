"""What must hold when all is quiet, whatever happened before: the invariants of the failure catalogue that can be seen here.

Numbers are the catalogue's. What holds at every moment is asserted where it happens: 6 in kv_node.py (no announcement before
the commit), 8 and 9 by the cores' own `check_integrity`.
"""

from __future__ import annotations

from collections.abc import Callable

from proto.chat import FinishReason
from proto.errors import ErrorCode, ErrorReply
from proto.residency import Tier
from proto.sessions import StepGenerated, TurnClosed, TurnOpened
from proto.turns import TurnDone, TurnFailed
from shared.engine.protocol import EngineRequest, TokensEmitted
from shared.engine.sim_engine import SimEngine, sim_body
from tests.sim.client_node import ClientNode
from tests.sim.loop_node import Turn, fold
from tests.sim.system import DEADLINE_SLACK_S, OPTIONS, System

# Codes with which a turn may fail although nobody made a mistake: its time was over.
HONEST_FAILURES = {ErrorCode.DEADLINE, ErrorCode.UNAVAILABLE, ErrorCode.CONTEXT_LENGTH}


def audit(system: System) -> dict[str, int]:
    """Assert all of it; returns counts that show that something was seen."""
    counts = {"turns": 0, "done": 0, "cancelled": 0, "failed": 0, "tokens": 0}
    for client in system.clients:
        _one_terminal_event(system, client, counts)
        _equivalence(system, client, counts)
        _append_only(system, client)
    for check in (_ownership, _index, _contiguity, _capacity):
        check(system)
    counts["given_away"] = system.queue.given_away
    counts["sent"], counts["lost"] = system.bus.sent, system.bus.lost
    return counts


def _one_terminal_event(system: System, client: ClientNode, counts: dict[str, int]) -> None:
    """9. Each turn ends in exactly one true outcome that the client sees, by its deadline and a little."""
    assert not client.turns_left, f"{client.name} was not served"
    for turn in client.asked:
        given = client.given[turn.turn_id]
        terminals = [event for event in given if event.is_terminal]
        assert len(terminals) == 1 and given[-1].is_terminal, f"{turn.turn_id}: {len(terminals)} terminal events"
        closed = fold(system.logs.sessions[client.name]).closed.get(turn.turn_id)
        assert closed is not None, f"{turn.turn_id} is open for ever"
        counts["turns"] += 1
        match terminals[0].body:
            case TurnDone(finish_reason=reason):
                assert closed.finish_reason is reason
                counts["cancelled" if reason is FinishReason.CANCELLED else "done"] += 1
                assert reason is not FinishReason.CANCELLED or turn.turn_id in client.cancelled
            case TurnFailed(error=error):
                assert error.code in HONEST_FAILURES, f"{turn.turn_id}: {error}"
                counts["failed"] += 1


def expected(turn: Turn, prompt: tuple[int, ...], system: System) -> list[int]:
    """The answer of an engine that nothing ever happens to."""
    engine = SimEngine(OPTIONS)
    engine.claim(
        EngineRequest(
            "x", system.target.namespace, prompt, turn.sampling, eos_token_ids=frozenset(system.target.eos_token_ids)
        )
    )
    engine.start("x")
    said: list[int] = []
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokensEmitted):
                said += event.token_ids
    return said


def _equivalence(system: System, client: ClientNode, counts: dict[str, int]) -> None:
    """2 and 10. The tokens of the unfaulted run, each once, in order; a turn that was cut has the beginning of them."""
    tokens: list[int] = []
    prompts: dict[str, tuple[int, ...]] = {}
    recorded: dict[str, list[int]] = {}
    before = 0
    for record in system.logs.sessions[client.name]:
        match record.body:
            case TurnOpened() as opened:
                before = len(tokens)
                tokens += [token for span in opened.spans for token in span.tokens]
                prompts[opened.turn_id] = tuple(tokens)
            case (StepGenerated() as step) | TurnClosed(final=StepGenerated() as step):
                assert step.turn_id not in recorded, "one step was recorded twice"
                recorded[step.turn_id] = list(step.tokens)
                tokens += step.tokens
            case TurnClosed(error=ErrorReply(), turn_id=turn_id) if turn_id not in recorded:
                del tokens[before:]
            case _:
                pass
    for turn in client.asked:
        if turn.turn_id not in prompts:
            continue
        right = expected(turn, prompts[turn.turn_id], system)
        given = client.tokens(turn.turn_id)
        body = client.given[turn.turn_id][-1].body
        is_whole = isinstance(body, TurnDone) and body.finish_reason is not FinishReason.CANCELLED
        for what, said in (("given", given), ("recorded", recorded.get(turn.turn_id, []))):
            assert said == right[: len(said)], f"{turn.turn_id}: {what} {said}, right is {right}"
            assert len(said) == len(right) or not is_whole, f"{turn.turn_id}: {what} only {len(said)} of {len(right)}"
        counts["tokens"] += len(given)


def _append_only(system: System, client: ClientNode) -> None:
    """3 and 12. The log is a valid history (folding it asserts its grammar), and no turn is open past its time."""
    fold(system.logs.sessions[client.name]).check_integrity()
    for turn in client.asked:
        is_late = turn.deadline_at + DEADLINE_SLACK_S < system.world.now
        assert not is_late or turn.turn_id in client.ended, f"{turn.turn_id} is open past its deadline"


def _ownership(system: System) -> None:
    """5. With no live request nothing is held: no block, no work, no job, no turn."""
    for worker in system.workers:
        stats = worker.engine.stats()
        assert stats.blocks_held == 0 and stats.requests_claimed == 0, f"{worker.name} holds {stats}"
        assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
        assert not worker.core.works and not worker._jobs, f"{worker.name} works"
        worker.engine.check_integrity()
    assert system.router.core.jobs.count == 0, "the router has jobs"
    assert not any(life.sent for life in system.router.core.lives.values())
    for loop in system.loops:
        assert not loop.runners, f"{loop.name} runs {list(loop.runners)}"
    assert not system.queue.open, "a turn is in the queue"
    assert system.kv.core.is_idle and system.kv.core.pending_bytes == 0 and not system.kv._held
    system.kv.core.check_integrity()


def _index(system: System) -> None:
    """7. When events have come through, the index is what holders hold."""
    index = system.router.core.index
    for worker in system.workers:
        held = {block.key for block in worker.engine.resident()}
        assert set(index.keys_of(worker.name, Tier.DEVICE)) == held, f"{worker.name}: the index is wrong"
    for tier in system.kv.disk:
        tier_index = system.kv.core.index_of(tier)
        assert tier_index is not None
        assert set(index.keys_of(system.kv.name, tier)) == set(tier_index.stored()), f"{tier}: the index is wrong"
        missing = set(tier_index.stored()) - set(system.kv.disk[tier])
        assert not missing, f"{tier}: the kvstore believes to have {len(missing)} blocks that it has not"


def _contiguity(system: System) -> None:
    """1 and 4. What lies under a key is that key's KV; what a worker holds, it holds from position 0 on."""
    for worker in system.workers:
        here = {block.key for block in worker.engine.resident()} | {bytes(16)}
        for block in worker.engine.resident():
            assert block.parent in here, f"{worker.name}: a block without its beginning"
            assert worker.engine.export(block.key) == sim_body(block.key, size_bytes=worker.engine.info.block_bytes)
    for frames in system.kv.disk.values():
        for key, frame in frames.items():
            is_right = frame.block.key == key and frame.body == sim_body(key, size_bytes=len(frame.body))
            assert is_right, f"a stored frame is wrong: {key}"


def _capacity(system: System) -> None:
    """8. Bounded everything."""
    for tier, capacity in system.kv.capacities.items():
        index = system.kv.core.index_of(tier)
        assert index is not None and index.used_bytes <= capacity
        assert sum(len(frame.body) for frame in system.kv.disk[tier].values()) <= capacity


def checked(seed: int, *, verbose: bool = False, prepare: Callable[[System], None] | None = None) -> dict[str, int]:
    """Run one seed and audit it. Raises AssertionError with the seed and the end of the trace."""
    system = System(seed, verbose=verbose)
    if prepare is not None:
        prepare(system)
    try:
        system.run()
        return audit(system)
    except AssertionError as broken:
        trace = "\n".join(list(system.world.trace)[-60:])
        raise AssertionError(
            f"seed {seed}: {broken}\n(python -m tests.sim --seed {seed} --verbose)\n{trace}"
        ) from broken
