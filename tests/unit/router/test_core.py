"""The router's decisions, event by event."""

from __future__ import annotations

import pytest

from proto.errors import ErrorCode, ErrorReply
from proto.fleet import ServiceState
from proto.generate import CancelGenerate, GenerateAccepted, RunningWork, Stage, WorkOutcome
from proto.receipt import Source
from services.router import events as ev
from services.router.events import AssignOutcome
from tests.unit.router.drive import BLOCK, MODEL, Driver, beat, card, generate, pull, running


def test_a_generation_waits_for_a_worker_and_goes_to_it() -> None:
    """Late binding: nobody is chosen before somebody has room."""
    driver = Driver()
    assert driver.submit(generate("g1")) == GenerateAccepted(depth=0)
    assert driver.submit(generate("g2")) == GenerateAccepted(depth=1)
    assert driver.sends == []
    driver.pulls(pull(room=1))
    assert [sent.assignment.generate.generation_id for sent in driver.sends] == ["g1"]
    # The same room is not given away twice while the worker has not seen the first.
    driver.pulls(pull(room=1))
    assert len(driver.sends) == 1
    driver.pulls(pull(room=1, seen=1))
    assert [sent.assignment.generate.generation_id for sent in driver.sends] == ["g1", "g2"]


def test_a_full_queue_a_foreign_model_and_a_standby_refuse() -> None:
    """Each with its code; a repeat of what waits is no new work."""
    driver = Driver(queue_count_max=1)
    assert isinstance(driver.submit(generate("g1")), GenerateAccepted)
    full = driver.submit(generate("g2"))
    assert full.code is ErrorCode.OVERLOADED and full.retry_after_s
    assert isinstance(driver.submit(generate("g1")), GenerateAccepted)
    driver.pulls(pull())
    missing = driver.submit(generate("g3", model="other"))
    assert (missing.code, missing.field) == (ErrorCode.MODEL_NOT_FOUND, "model")
    assert Driver(active=False).submit(generate("g")).code is ErrorCode.UNAVAILABLE
    driver.knows("w1")
    foreign = driver.submit(generate("g4", namespace=bytes(32)))
    assert (foreign.code, foreign.field) == (ErrorCode.UNAVAILABLE, "namespace")


def test_a_newer_attempt_replaces_the_older_one_and_an_old_one_changes_nothing() -> None:
    """In the line it keeps its place; at a worker the older is cancelled."""
    driver = Driver()
    driver.submit(generate("g1", attempt=1))
    driver.submit(generate("g2"))
    driver.submit(generate("g1", attempt=3))
    driver.submit(generate("g1", attempt=2))
    driver.pulls(pull(room=1))
    (first,) = driver.sends
    assert (first.assignment.generate.generation_id, first.assignment.generate.attempt) == ("g1", 3)
    assert driver.all(ev.SayCancel) == []
    driver.submit(generate("g1", attempt=4))
    (cancel,) = driver.all(ev.SayCancel)
    assert (cancel.cancel.generation_id, cancel.cancel.through_attempt) == ("g1", 3)
    assert driver.core.jobs.waiting_count == 2
    driver.done(first)
    assert driver.core.jobs.waiting_count == 2


def test_cancel_removes_and_keeps_late_attempts_out() -> None:
    """Also one that comes before the request it cancels."""
    driver = Driver()
    driver.submit(generate("g1"))
    driver.tell(ev.CancelHeard(driver.now, CancelGenerate(generation_id="g1", through_attempt=1, reason="r")))
    driver.tell(ev.CancelHeard(driver.now, CancelGenerate(generation_id="g2", through_attempt=5, reason="r")))
    driver.submit(generate("g2", attempt=5))
    driver.pulls(pull(room=4))
    assert driver.sends == [] and driver.core.jobs.count == 0


def test_who_waits_hears_so_each_second_and_the_deadline_ends_it() -> None:
    """Silence means loss, so there must be none."""
    driver = Driver()
    driver.submit(generate("g1", deadline_at=driver.now + 3.5))
    driver.passes(5.0)
    assert driver.said == [("g1", "queued")] * 3 + [("g1", "deadline_exceeded")]
    assert driver.core.jobs.count == 0 and driver.core.wake_at is None


def test_the_worker_that_holds_the_prompt_gets_it_with_a_plan() -> None:
    """Resident blocks, then tiers, then compute; the segments cover the prompt."""
    wanted = generate("g1", 100)
    driver = Driver()
    driver.pulls(pull("w1"), pull("w2"))
    driver.knows("w1")
    driver.knows("w2", wanted.keys[:2])
    driver.has_shard("kv0", ram=wanted.keys[:4], nvme=wanted.keys[:5])
    driver.submit(wanted)
    (sent,) = driver.sends
    assert sent.worker_id == "w2"
    plan = sent.assignment.plan
    assert [(part.source, part.first_block, part.block_count, part.holder_id) for part in plan.segments] == [
        (Source.RESIDENT, 0, 2, None),
        (Source.RAM, 2, 2, "kv0"),
        (Source.NVME, 4, 1, "kv0"),
        (Source.COMPUTED, 5, 2, None),
    ]
    assert not plan.blind and plan.predicted_s is not None and plan.policy == "residency"


def test_patience_waits_for_the_warm_worker_and_ends() -> None:
    """800 tokens cost 1.6 s elsewhere; so long, and no longer, is the warm worker waited for."""
    wanted = generate("g1", 800)
    driver = Driver()
    alive = [pull("warm", room=0), pull("cold", room=1)]
    driver.pulls(*alive)
    driver.knows("warm", wanted.keys)
    driver.knows("cold")
    driver.submit(wanted)
    driver.passes(1.25, alive=alive)
    assert driver.sends == []
    driver.passes(0.5, alive=alive)
    assert [sent.worker_id for sent in driver.sends] == ["cold"]
    # And the one it waited for gets it as soon as it has room.
    other = Driver()
    other.pulls(*alive)
    other.knows("warm", wanted.keys)
    other.knows("cold")
    other.submit(wanted)
    other.pulls(pull("warm", room=1))
    assert [sent.worker_id for sent in other.sends] == ["warm"]


def test_round_robin_rotates_whatever_is_held() -> None:
    """The policy to compare with."""
    wanted = [generate(f"g{number}") for number in range(4)]
    driver = Driver(policy="round_robin")
    driver.pulls(pull("w1", room=4), pull("w2", room=4), pull("w3", room=0))
    driver.knows("w1", wanted[0].keys)
    for one in wanted:
        driver.submit(one)
    assert [sent.worker_id for sent in driver.sends] == ["w1", "w2", "w1", "w2"]


def test_a_burst_is_spread_over_equal_workers() -> None:
    """Load is work on its way, not only what workers have reported."""
    driver = Driver()
    driver.pulls(pull("w1", room=8), pull("w2", room=8))
    for number in range(4):
        driver.submit(generate(f"g{number}", seed=1000 * number))
    assert sorted(sent.worker_id for sent in driver.sends) == ["w1", "w1", "w2", "w2"]


@pytest.mark.parametrize("how", ["silence", "new epoch", "stopped"])
def test_a_lost_worker_means_lost_attempts(how: str) -> None:
    """The loop hears LOST at once and makes a new attempt; ours ends."""
    driver = Driver()
    driver.submit(generate("g1"))
    driver.pulls(pull(room=1))
    driver.answered(driver.sends[0])
    if how == "silence":
        driver.passes(3.0)
    elif how == "new epoch":
        driver.pulls(pull(room=1, epoch=2))
    else:
        driver.tell(ev.HeartbeatHeard(driver.now, beat("w1", state=ServiceState.STOPPED)))
    assert driver.said == [("g1", "lost")]
    # A worker that was only silent is told to stop what was given up.
    driver.pulls(pull(room=0, seen=1, epoch=1 if how != "new epoch" else 2, running=(running(driver.sends[0]),)))
    assert [one.cancel.through_attempt for one in driver.all(ev.SayCancel)] == [1]
    driver.submit(generate("g1", attempt=2))
    assert driver.core.jobs.count == 1


def test_a_done_that_got_lost_shows_in_the_pulls() -> None:
    """A worker that has it no more and did not say so: nothing stays for ever."""
    driver = Driver()
    driver.submit(generate("g1"))
    driver.pulls(pull(room=1))
    driver.answered(driver.sends[0])
    driver.passes(4.0, alive=[pull(room=1, seen=1)])
    assert driver.said == [("g1", "lost")] and driver.core.jobs.count == 0


def test_a_refusal_goes_elsewhere_and_a_final_one_to_the_loop() -> None:
    """The worker that refused is not asked again for a moment."""
    driver = Driver()
    driver.pulls(pull("w1"), pull("w2"))
    driver.submit(generate("g1"))
    first = driver.sends[0]
    driver.answered(first, AssignOutcome.REFUSED, ErrorReply(code=ErrorCode.OVERLOADED, message="full"))
    assert [sent.worker_id for sent in driver.sends] == ["w1", "w2"]
    driver.answered(driver.sends[1], AssignOutcome.UNDELIVERED)
    driver.pulls(pull("w1", seen=1), pull("w2"))
    assert len(driver.sends) == 2
    driver.passes(1.5, alive=[pull("w1", seen=1), pull("w2")])
    assert len(driver.sends) == 3
    driver.answered(driver.sends[2], AssignOutcome.REFUSED, ErrorReply(code=ErrorCode.BAD_GRAMMAR, message="no"))
    assert driver.said[-1] == ("g1", "bad_grammar")


def test_a_cancel_that_only_the_worker_heard_ends_the_job() -> None:
    """The message to the router was lost. The job does not go round the workers until its deadline."""
    driver = Driver()
    driver.pulls(pull("w1"), pull("w2"))
    driver.submit(generate("g1"))
    gone = ErrorReply(code=ErrorCode.CANCELLED, message="it was cancelled here")
    driver.answered(driver.sends[0], AssignOutcome.REFUSED, gone)
    driver.passes(3.0, alive=[pull("w1", seen=1), pull("w2")])
    assert driver.said == [("g1", "cancelled")]
    assert len(driver.sends) == 1 and driver.core.jobs.count == 0


@pytest.mark.parametrize(("held", "goes_to"), [(46, "busy"), (20, "idle")])
def test_prefix_is_weighed_against_the_streams_that_the_prefill_delays(held: int, goes_to: str) -> None:
    """Holding few of the 50 blocks saves its own prompt a little, and costs each of the six streams the rest."""
    wanted = generate("g1", 50 * BLOCK)
    driver = Driver()
    driver.knows("busy", wanted.keys[:held])
    driver.knows("idle")
    streams = tuple(
        RunningWork(generation_id=f"other{number}", attempt=1, assignment_id=f"a{number}") for number in range(6)
    )
    driver.pulls(pull("busy", room=2, seen=6, running=streams), pull("idle", room=2))
    driver.submit(wanted)
    (sent,) = driver.sends
    assert sent.worker_id == goes_to


def test_an_unanswered_assignment_is_given_up_not_placed_twice() -> None:
    """The worker may have it; only a new attempt may run elsewhere."""
    driver = Driver()
    driver.pulls(pull("w1"), pull("w2"))
    driver.submit(generate("g1"))
    driver.answered(driver.sends[0], AssignOutcome.UNANSWERED)
    assert driver.said == [("g1", "lost")] and len(driver.sends) == 1
    assert driver.all(ev.SayCancel)[0].cancel.through_attempt == 1
    # The room it took comes back when the worker keeps saying that it has seen nothing.
    driver.passes(3.0, alive=[pull("w1")])
    assert driver.core.lives["w1"].room == 1


def test_a_long_prompt_is_prefilled_elsewhere_first() -> None:
    """Prefill, then decode with the name of who did it; without a store or after a failure plain decode."""
    for has_shard, outcome in ((True, WorkOutcome.PREFILLED), (True, WorkOutcome.FAILED), (False, WorkOutcome.DONE)):
        driver = Driver(prefill_tokens_min=512)
        driver.pulls(pull("d1"), pull("p1", stage=Stage.PREFILL))
        if has_shard:
            driver.has_shard("kv0")
        driver.submit(generate("g1", 600))
        if not has_shard:
            assert [(sent.worker_id, sent.assignment.stage) for sent in driver.sends] == [("d1", Stage.DECODE)]
            continue
        driver.done(driver.sends[0], outcome)
        stages = [(sent.worker_id, sent.assignment.stage) for sent in driver.sends]
        assert stages == [("p1", Stage.PREFILL), ("d1", Stage.DECODE)]
        expected = "p1" if outcome is WorkOutcome.PREFILLED else None
        assert driver.sends[1].assignment.prefill_worker_id == expected


def test_a_prompt_that_does_not_fit_waits_and_an_idle_worker_is_believed_to_make_room() -> None:
    """`blocks_free` is a hint, `blocks_total` is not."""
    driver = Driver()
    busy = generate("g0")
    driver.submit(busy)
    driver.pulls(pull("w1", room=1, blocks_total=50, blocks_free=50))
    driver.submit(generate("g1", 640, seed=5000))
    driver.pulls(pull("w1", room=1, seen=1, blocks_total=50, blocks_free=10, running=(running(driver.sends[0]),)))
    assert len(driver.sends) == 1
    driver.done(driver.sends[0])
    driver.pulls(pull("w1", room=2, seen=1, blocks_total=50, blocks_free=10))
    assert len(driver.sends) == 2


def test_nothing_starves_behind_cheaper_prompts() -> None:
    """A long prompt among a stream of short ones is placed once it waited for the patience."""
    driver = Driver()
    driver.submit(generate("long", 2000, seed=9000))
    for number in range(40):
        driver.submit(generate(f"short{number}", 16, seed=100 * number))
        driver.now += 0.25
        driver.pulls(pull("w1", room=1, seen=number))
        driver.done(driver.sends[-1])
        if driver.sends[-1].assignment.generate.generation_id == "long":
            assert number < 12
            return
    raise AssertionError("the long one starved")


def test_a_new_router_takes_the_first_pull_as_its_baseline() -> None:
    """What the dead router sent is in the worker's count already."""
    driver = Driver()
    driver.submit(generate("g1"))
    driver.pulls(pull(room=1, seen=41))
    assert len(driver.sends) == 1


def test_stepping_down_tells_those_that_wait_and_keeps_what_is_known() -> None:
    """The next active router starts with a full index."""
    wanted = generate("g1")
    driver = Driver()
    driver.pulls(pull(room=0))
    driver.knows("w1", wanted.keys)
    driver.submit(wanted)
    driver.tell(ev.BecameStandby(driver.now))
    assert driver.said == [("g1", "draining")]
    assert driver.core.index.block_count == len(wanted.keys)
    driver.pulls(pull(room=4))
    assert driver.sends == []
    driver.tell(ev.BecameActive(driver.now))
    driver.submit(generate("g1", attempt=2))
    assert len(driver.sends) == 1 and not driver.sends[0].assignment.plan.blind


def test_a_worker_of_another_make_is_not_used() -> None:
    """Same model name, other weights: its blocks are not these blocks."""
    driver = Driver()
    driver.pulls(pull("w1"), pull("w2", room=0))
    driver.tell(ev.HeartbeatHeard(driver.now, beat("w1", model_card=card("w1", fingerprint="other"))))
    driver.knows("w2")
    driver.submit(generate("g1", model=MODEL))
    assert driver.sends == []
    driver.pulls(pull("w2"))
    assert [sent.worker_id for sent in driver.sends] == ["w2"]
