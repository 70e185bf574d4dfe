"""The worker's core: checks, phases, and that whatever ends work early lets go of the engine and tells who must know."""

from __future__ import annotations

from typing import Any

import pytest

from proto.errors import ErrorCode, ErrorReply
from proto.generate import Generated, Plan, Segment, Stage, Working
from proto.ids import BlockKey
from proto.receipt import Source
from proto.residency import SnapshotRequest, Tier
from shared.engine.protocol import (
    BadGrammar,
    BlocksEvicted,
    BlocksSealed,
    EngineStats,
    NeverFits,
    PoolFull,
    PrefillProgress,
    RequestFailed,
    TokensEmitted,
)
from shared.worker import events as ev
from shared.worker import residency
from shared.worker.admission import claim_refusal
from shared.worker.core import FETCH_S_MIN
from shared.worker.work import Phase
from tests.unit.worker.drive import BLOCK, NAMESPACE, SALT, WALL, Driver, claim, generate, sealed

PHASES = (Phase.CLAIMING, Phase.LOADING, Phase.RUNNING, Phase.FLUSHING)


def kinds(instructions: list[ev.Instruction]) -> list[str]:
    return [type(instruction).__name__ for instruction in instructions]


# -- admission


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        ({"keys": ()}, ErrorCode.BAD_MESSAGE, "keys"),
        ({"tokens": (9,) * 10}, ErrorCode.BAD_MESSAGE, "keys"),
        ({"namespace": bytes(32)}, ErrorCode.UNAVAILABLE, "namespace"),
        ({"salt": b"other"}, ErrorCode.UNAVAILABLE, "namespace"),
        ({"emitted": 11}, ErrorCode.BAD_MESSAGE, "emitted"),
        ({"deadline_at": WALL}, ErrorCode.DEADLINE, None),
    ],
)
def test_a_generation_that_does_not_fit_is_refused(change: dict[str, Any], code: ErrorCode, field: str | None) -> None:
    """The field at fault is named, and nothing reaches the engine."""
    driver = Driver()
    new = driver.assign("a", generate().model_copy(update=change))
    assert driver.code("a") == (code, field)
    assert kinds(new) == ["AnswerAssign", "SayPull"] and driver.pull.assigned_count == 1


def test_an_assignment_of_another_life_or_stage_is_refused() -> None:
    """The router spoke to a worker that died here; what it sent does not count as seen by this one."""
    driver = Driver()
    driver.assign("a", generate(), worker_epoch=6)
    assert driver.code("a") == (ErrorCode.LOST, "worker_epoch") and driver.pull.assigned_count == 0
    driver.assign("b", generate(), stage=Stage.PREFILL)
    assert driver.code("b") == (ErrorCode.CONFLICT, "stage") and driver.pull.assigned_count == 1


def test_the_engines_refusals_are_told_as_they_are() -> None:
    """Too long is final, full is for later."""
    driver = Driver()
    for name, trouble, expected in (
        ("a", NeverFits("no", limit_tokens=1, asked_tokens=2), (ErrorCode.CONTEXT_LENGTH, "tokens")),
        ("b", BadGrammar("no"), (ErrorCode.BAD_GRAMMAR, "grammar")),
        ("c", ValueError("id 7"), (ErrorCode.BAD_MESSAGE, "tokens")),
    ):
        driver.assign(name, generate(name))
        driver.claimed(name, claim_refusal(trouble))  # type: ignore[arg-type]
        assert driver.code(name) == expected and driver.pull.room == 2
    driver.assign("d", generate("d"))
    driver.claimed("d", claim_refusal(PoolFull(3, 1)))
    assert driver.code("d") == (ErrorCode.OVERLOADED, None)
    assert driver.pull.room == 0 and not driver.in_engine
    driver.tick(driver.core.wake_at)
    assert driver.pull.room == 2, "and says room again by itself"
    assert driver.said == [] and driver.ends == []


def test_more_than_the_streams_is_overload() -> None:
    """A router that decided on old news."""
    driver = Driver()
    driver.reach(Phase.RUNNING, "a", generate("a"))
    driver.assign("b", generate("b"))
    assert driver.pull.room == 0 and driver.pull.assigned_count == 2
    assert [work.assignment_id for work in driver.pull.running] == ["a", "b"]
    driver.assign("c", generate("c"))
    assert driver.code("c")[0] is ErrorCode.OVERLOADED


def test_a_repeated_assignment_has_one_answer() -> None:
    """While the engine is asked, while it runs, and when it is over."""
    driver = Driver()
    driver.assign("a", generate())
    assert kinds(driver.assign("a", generate())) == []
    driver.claimed("a", claim(generate()))
    assert kinds(driver.assign("a", generate())) == ["AnswerAssign"]
    driver.fetched("a")
    driver.prompt_done("a", generate())
    driver.finish("a", 2)
    assert kinds(driver.assign("a", generate())) == ["AnswerAssign"]
    assert len(driver.all(ev.ClaimBlocks)) == 1 and driver.pull.assigned_count == 1


# -- replacement


@pytest.mark.parametrize("phase", PHASES[:3])
def test_a_newer_attempt_replaces_an_older_one(phase: Phase) -> None:
    """In whatever phase: the engine lets the old one go before it is asked for the new one, even when full."""
    driver = Driver(streams_max=1)
    driver.reach(phase, "a", generate())
    new = driver.assign("b", generate(attempt=2))
    assert kinds(new)[0] == "CancelEngine" and kinds(new)[-2:] == ["ClaimBlocks", "SayPull"]
    assert driver.in_engine == {"b"} and set(driver.core.works) == {"b"}
    if phase is Phase.CLAIMING:
        assert driver.code("a")[0] is ErrorCode.CANCELLED and driver.ends == []
    else:
        assert driver.ends == [("a", "cancelled", ErrorCode.CANCELLED)]
    assert "failed" not in driver.said
    driver.assign("c", generate(attempt=1))
    assert driver.code("c")[0] is ErrorCode.CANCELLED, "an older attempt is refused"
    # What was on its way for the old one is too late.
    assert kinds(driver.claimed("a", claim(generate()))) == []
    assert kinds(driver.fetched("a")) == []
    assert kinds(driver.engine(TokensEmitted("a", 0, (1,)))) == []


def test_the_routers_second_assignment_of_an_attempt_counts() -> None:
    """A new router life does not know of the first."""
    driver = Driver()
    driver.reach(Phase.RUNNING, "a", generate())
    driver.assign("b", generate())
    assert set(driver.core.works) == {"b"} and driver.ends == [("a", "cancelled", ErrorCode.CANCELLED)]


# -- what ends work early


@pytest.mark.parametrize("stage", [Stage.DECODE, Stage.PREFILL])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("how", ["cancel", "deadline", "cut", "failure"])
def test_whatever_ends_it_gives_everything_back(how: str, phase: Phase, stage: Stage) -> None:
    """The engine is told in each phase; the loop hears only of what it must act on, the router always."""
    if (phase is Phase.FLUSHING and stage is Stage.DECODE) or (how == "failure" and phase is not Phase.RUNNING):
        return
    driver = Driver(stage)
    driver.reach(phase, "a", generate())
    told = len(driver.said)
    match how:
        case "cancel":
            new, code, outcome = driver.cancel("g"), ErrorCode.CANCELLED, "cancelled"
        case "deadline":
            assert driver.core.wake_at < 210.0
            new, code, outcome = driver.tick(210.0), ErrorCode.DEADLINE, "failed"
        case "cut":
            new, code, outcome = driver.tell(ev.DrainCut(driver.now)), ErrorCode.DRAINING, "failed"
        case _:
            new, code, outcome = driver.engine(RequestFailed("a", "NaN")), ErrorCode.LOST, "failed"
    assert kinds(new)[0] == "CancelEngine" and not driver.in_engine and not driver.core.works
    if phase is Phase.CLAIMING:
        assert driver.code("a")[0] is code and driver.ends == []
    else:
        assert driver.ends == [("a", outcome, code)]
    tells_loop = outcome == "failed" and stage is Stage.DECODE and phase is not Phase.CLAIMING
    assert driver.said[told:] == ([code.value] if tells_loop else [])
    assert driver.pull.running == ()
    for late in (ev.FlushEnded(driver.now, "a", True), ev.FetchEnded(driver.now, "a", ev.Fetched())):
        assert kinds(driver.tell(late)) == []


def test_a_cancel_may_come_first_and_stops_no_later_attempt() -> None:
    """NATS orders nothing between two senders."""
    driver = Driver()
    driver.cancel("g", through=2)
    driver.assign("a", generate(attempt=2))
    assert driver.code("a")[0] is ErrorCode.CANCELLED
    driver.reach(Phase.RUNNING, "b", generate(attempt=3))
    driver.cancel("g", through=2)
    driver.cancel("other", through=9)
    assert set(driver.core.works) == {"b"}


def test_what_fails_twice_is_not_tried_again() -> None:
    """The first failure is retryable, a later attempt's is not."""
    driver = Driver()
    driver.reach(Phase.RUNNING, "a", generate(attempt=2))
    driver.engine(RequestFailed("a", "the grammar allows no token"))
    assert driver.ends == [("a", "failed", ErrorCode.INTERNAL)]


def test_draining_takes_nothing_and_pulls_on() -> None:
    """Running work ends as usual; a worker that stopped pulling would be taken for dead."""
    driver = Driver()
    driver.reach(Phase.RUNNING, "a", generate("a"))
    driver.tell(ev.DrainBegan(driver.now))
    assert driver.pull.room == 0
    driver.assign("b", generate("b"))
    assert driver.code("b")[0] is ErrorCode.DRAINING
    pulls = len(driver.all(ev.SayPull))
    driver.tick(driver.now + 1.0)
    assert len(driver.all(ev.SayPull)) == pulls + 1
    driver.prompt_done("a", generate("a"))
    driver.finish("a", 3)
    assert driver.ends == [("a", "done", None)] and driver.pull.room == 0


# -- the way through


def test_a_decode_from_claim_to_receipt() -> None:
    """Two blocks here, one loaded, the rest computed: the sources sum to the prompt and the receipt has it all."""
    driver, wanted = Driver(), generate(tokens=18)
    parts = (Segment(first_block=0, block_count=2, source=Source.RESIDENT),
             Segment(first_block=2, block_count=2, source=Source.RAM))  # fmt: skip
    plan = Plan(policy="residency", predicted_s=2.0, segments=parts, decided_in_s=0.001)
    driver.assign("a", wanted, plan=plan, prefill_worker_id="p")
    driver.now += 0.1
    new = driver.claimed("a", claim(wanted, resident=2))
    assert kinds(new) == ["AnswerAssign", "Say", "FetchBlocks"]
    (fetch,) = driver.all(ev.FetchBlocks)
    assert (fetch.first, fetch.last, fetch.keys) == (2, 4, wanted.keys) and fetch.within_s >= FETCH_S_MIN
    driver.now += 0.2
    moved = ev.Fetched({Source.RAM: 1}, bytes_moved=100, rejected=1, fallback="frame rejected: checksum")
    assert kinds(driver.fetched("a", moved)) == ["StartEngine", "Say"]
    driver.now += 1.0
    driver.engine(BlocksSealed("a", sealed(wanted, 2, 3)), PrefillProgress("a", 2, 6))
    assert driver.all(ev.PutBlocks) == [], "the kvstore gave it"
    driver.engine(BlocksSealed("a", sealed(wanted, 3, 4)), PrefillProgress("a", 6, 6), TokensEmitted("a", 0, (5,)))
    (put,) = driver.all(ev.PutBlocks)
    assert (put.namespace, put.first_key, put.blocks) == (NAMESPACE, wanted.keys[0], sealed(wanted, 3, 4))
    driver.now += 3.0
    driver.finish("a", 1)
    counts = {one.kind: one.count for one in driver.all(ev.CountTokens)}
    assert counts == {"resident": 8, "ram": 4, "computed": 6, "generated": 1}
    bodies = [one.event.body for one in driver.all(ev.Say)]
    assert [body.kind for body in bodies] == ["working"] * 3 + ["tokens"] * 2 + ["generated"]
    workings = [body for body in bodies if isinstance(body, Working)]
    assert [body.prefilled_tokens for body in workings] == [8, 12, 18]
    assert [bool(body.tokens_by_source) for body in workings] == [False, False, True]
    end = bodies[-1]
    assert isinstance(end, Generated)
    assert sum(end.tokens_by_source.values()) == end.prompt_tokens == 18
    assert (end.bytes_moved, end.frames_rejected, end.fallback) == (100, 1, "frame rejected: checksum")
    assert (end.queue_s, end.route_s, round(end.load_s, 6), end.prefill_s, end.decode_s) == (0.5, 0.001, 0.2, 1.0, 2.0)
    assert (end.total, end.prefill_worker_id, end.policy, end.predicted_s) == (1, "p", "residency", 2.0)
    (done,) = [one.done for one in driver.all(ev.SayDone)]
    assert (done.promised_cached_tokens, done.found_cached_tokens, done.predicted_s) == (16, 12, 2.0)
    assert round(done.actual_s, 6) == 1.3, "until the first token, not the last"


def test_a_resident_prompt_starts_at_once() -> None:
    """Nothing to load: no task, no wait."""
    driver, wanted = Driver(), generate()
    driver.assign("a", wanted)
    assert kinds(driver.claimed("a", claim(wanted, resident=2))) == ["AnswerAssign", "Say", "StartEngine", "Say"]


def test_a_promise_that_was_not_kept_is_in_the_receipt() -> None:
    """The kvstore evicted it meanwhile; nobody else said why."""
    driver, wanted = Driver(), generate()
    driver.assign(
        "a", wanted, plan=Plan(policy="p", segments=(Segment(first_block=0, block_count=2, source=Source.RAM),))
    )
    driver.claimed("a", claim(wanted))
    driver.fetched("a")
    driver.prompt_done("a", wanted)
    driver.finish("a", 1)
    end = driver.all(ev.Say)[-1].event.body
    assert isinstance(end, Generated) and end.fallback == "2 blocks were promised, 0 were found"


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_prefill_hands_over(is_stored: bool) -> None:
    """It flushes before it says so; the loop hears signs only, without sources, which are the decode stage's to say."""
    driver, wanted = Driver(Stage.PREFILL), generate()
    driver.reach(Phase.FLUSHING, "a", wanted)
    assert driver.all(ev.ClaimBlocks)[0].request.prefill_only
    assert kinds(driver.log[-1:]) == ["FlushPuts"] and driver.pull.running != ()
    assert len(driver.all(ev.PutBlocks)) == 1
    driver.tick(driver.now + 1.0)
    driver.tell(ev.FlushEnded(driver.now, "a", is_stored))
    expected = ("prefilled", None) if is_stored else ("failed", ErrorCode.UNAVAILABLE)
    assert driver.ends == [("a", *expected)]
    bodies = [one.event.body for one in driver.all(ev.Say)]
    assert all(isinstance(body, Working) and not body.tokens_by_source for body in bodies) and len(bodies) == 4


def test_a_retry_says_where_its_tokens_count_from() -> None:
    """Two tokens were said by an attempt before."""
    driver, wanted = Driver(), generate(attempt=2, emitted=2)
    driver.reach(Phase.RUNNING, "a", wanted)
    assert driver.all(ev.ClaimBlocks)[0].request.emitted == 2
    driver.prompt_done("a", wanted)
    driver.finish("a", 3)
    end = driver.all(ev.Say)[-1].event.body
    assert isinstance(end, Generated) and end.total == 5


# -- time


def test_signs_come_each_silent_second() -> None:
    """Not after a token, and not before the router has its answer."""
    driver = Driver()
    driver.assign("a", generate())
    driver.tick(driver.now + 1.5)
    assert driver.said == []
    driver.claimed("a", claim(generate()))
    driver.fetched("a")
    said = len(driver.said)
    at = driver.now
    assert driver.core.wake_at <= at + 1.0
    driver.tick(at + 0.9)
    assert len(driver.said) == said
    driver.tick(at + 1.0)
    assert len(driver.said) == said + 1
    driver.now += 0.5
    driver.engine(PrefillProgress("a", 10, 10), TokensEmitted("a", 0, (1,)))
    said = len(driver.said)
    driver.tick(at + 2.0)
    assert len(driver.said) == said


def test_pulls_come_each_second_and_on_change() -> None:
    """Room, blocks and price are the latest; a stale number is not said twice in a row."""
    driver = Driver()
    driver.tick(driver.now)
    assert len(driver.all(ev.SayPull)) == 1
    driver.tick(driver.now + 0.5)
    assert len(driver.all(ev.SayPull)) == 1
    driver.tick(driver.now + 0.5)
    assert len(driver.all(ev.SayPull)) == 2
    steps = tuple((100, 0, 100, 0.404) for _ in range(3))
    stats = EngineStats(100, 50, 20, 30, 0, 0, 1, 0, recent_steps=steps)
    driver.tell(ev.StatsArrived(driver.now, stats))
    assert driver.pull.blocks_free == 70 and driver.pull.price.prefill_token_s == pytest.approx(0.004)
    assert driver.pull.base_namespace != NAMESPACE and SALT
    driver.reach(Phase.RUNNING, "a", generate())
    assert driver.pull.prefill_tokens_waiting == 10
    driver.engine(PrefillProgress("a", 4, 10))
    driver.tell(ev.RouterHeard(driver.now))
    assert driver.pull.prefill_tokens_waiting == 6


# -- residency


def test_changes_are_numbered_and_pages_say_how_far_they_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 1 on, one a step, without what came and went within it; pages follow each other by key."""
    monkeypatch.setattr(residency, "PAGE_KEYS_MAX", 2)
    driver, wanted = Driver(), generate(tokens=21)
    blocks = sealed(wanted, 0, 5)
    driver.engine(BlocksSealed("gone", blocks[:4]), BlocksEvicted((blocks[3].key,)))
    driver.engine(TokensEmitted("gone", 0, (1,)))
    driver.engine(BlocksEvicted((blocks[2].key,)), BlocksSealed("gone", blocks[4:]))
    deltas = [one.delta for one in driver.all(ev.SayDelta)]
    assert [(delta.seq, delta.epoch) for delta in deltas] == [(1, 7), (2, 7)]
    assert deltas[0].changes[0].stored == wanted.keys[:3] and deltas[0].changes[0].dropped == ()
    assert (deltas[1].changes[0].stored, deltas[1].changes[0].dropped) == (wanted.keys[4:5], wanted.keys[2:3])
    keys: list[BlockKey] = []
    while True:
        page = driver.core.page(SnapshotRequest(after_key=keys[-1] if keys else b"", tier=Tier.DEVICE))
        assert page.seq == 2 and len(page.keys) <= 2
        keys += page.keys
        if page.is_last:
            break
    assert keys == sorted((*wanted.keys[:2], wanted.keys[4])) and len(wanted.keys) == 21 // BLOCK
    nothing = driver.core.page(SnapshotRequest(tier=Tier.NVME))
    assert nothing.keys == () and nothing.is_last
    driver.tell(ev.BusRestored(driver.now))
    assert driver.all(ev.SayDelta)[-1].delta.seq == 3 and driver.all(ev.SayPull)


def test_blocks_of_a_dropped_generation_are_announced_but_not_put() -> None:
    """They are cache like any other; who asked is gone."""
    driver, wanted = Driver(), generate()
    driver.reach(Phase.RUNNING, "a", wanted)
    driver.cancel("g")
    driver.engine(BlocksSealed("a", sealed(wanted, 0, 1)))
    assert len(driver.all(ev.SayDelta)) == 1 and driver.all(ev.PutBlocks) == []


def test_answers_and_cancels_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that runs for months."""
    monkeypatch.setattr("shared.worker.core.ANSWERS_MAX", 3)
    monkeypatch.setattr("shared.worker.admission.CANCELS_MAX", 3)
    driver = Driver()
    for number in range(10):
        driver.assign(f"a{number}", generate(deadline_at=0.0))
        driver.cancel(f"g{number}")
    assert len(driver.core._answers) == 3 and len(driver.core._admission._stopped) == 3
    refusal = ErrorReply(code=ErrorCode.DEADLINE, message="x")
    assert all(reply.error is not None and reply.error.code == refusal.code for reply in driver.answers.values())
