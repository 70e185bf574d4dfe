"""Hundreds of random schedules of one core over a simulated engine: nothing leaks, nobody is left without an answer."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest

from proto.chat import Sampling
from proto.generate import Generated, GenerateFailed, Stage, TokensOut, WorkerPrice
from proto.receipt import Source
from shared.engine.batch import StepBudget
from shared.engine.protocol import BadGrammar, NeverFits, PoolFull
from shared.engine.sim_engine import SimEngine, SimOptions, sim_body
from shared.worker import events as ev
from shared.worker.admission import claim_refusal
from tests.unit.worker.drive import BLOCK, WALL, Driver, generate

BUDGET = StepBudget(alone_tokens=16, shared_tokens=16, bite_tokens=16)
BLOCKS_TOTAL = 24


class World:
    """The shell's part, in one thread: what the core asks for happens some random time later."""

    def __init__(self, seed: int, stage: Stage) -> None:
        self.random = random.Random(seed)
        options = SimOptions(vocab_size=600, block_tokens=BLOCK, blocks_total=BLOCKS_TOTAL, answer_tokens=0, budget=BUDGET,
                             price=WorkerPrice())  # fmt: skip
        self.engine = SimEngine(options)
        self.driver = Driver(stage, streams_max=4)
        # Per assignment, what is under way; gone when it is cancelled.
        self.jobs: dict[str, deque[ev.Instruction]] = {}
        self.assigned: list[str] = []
        self.said: dict[str, list[int]] = {}
        self.ends: Counter[str] = Counter()

    def perform(self, instructions: list[ev.Instruction]) -> None:
        for one in instructions:
            match one:
                case ev.ClaimBlocks(request):
                    self.jobs[request.request_id] = deque([one])
                case ev.FetchBlocks(name) | ev.StartEngine(name) | ev.FlushPuts(name):
                    self.jobs[name] = deque([one])
                case ev.CancelEngine(name):
                    self.jobs.pop(name, None)
                    self.engine.cancel(name)
                case ev.Say(_, event):
                    self.hear(event.generation_id, event.body)
                case _:
                    pass

    def hear(self, name: str, body: object) -> None:
        match body:
            case TokensOut(first=first, token_ids=tokens):
                said = self.said.setdefault(name, [])
                assert first == len(said)
                said += tokens
            case Generated() | GenerateFailed():
                self.ends[name] += 1
                assert self.ends[name] == 1, "one terminal event"

    def work(self) -> None:
        """One job goes on, or the engine makes a step."""
        names = [name for name, jobs in self.jobs.items() if jobs]
        if names and self.random.random() < 0.6:
            self.go_on(self.random.choice(names))
        elif self.engine.has_work:
            self.perform(self.driver.engine(*self.engine.step()))
            self.engine.check_integrity()

    def go_on(self, name: str) -> None:
        now = self.driver.now
        match self.jobs.pop(name).popleft():
            case ev.ClaimBlocks(request):
                try:
                    answer = self.engine.claim(request)
                except (PoolFull, NeverFits, BadGrammar, ValueError) as trouble:
                    self.perform(self.driver.claimed(name, claim_refusal(trouble)))
                    return
                self.perform(self.driver.claimed(name, answer))
            case ev.FetchBlocks() as ask:
                count = self.random.randint(0, ask.last - ask.first)
                for index in range(ask.first, ask.first + count):
                    body = sim_body(ask.keys[index], size_bytes=self.engine.info.block_bytes)
                    self.engine.load(name, index, body)
                blocks = {Source.RAM: count} if count else {}
                self.perform(self.driver.fetched(name, ev.Fetched(blocks, bytes_moved=count * 100)))
            case ev.StartEngine():
                self.engine.start(name)
            case ev.FlushPuts():
                self.perform(self.driver.tell(ev.FlushEnded(now, name, self.random.random() < 0.5)))
            case other:
                raise AssertionError(other)

    def disturb(self, number: int) -> None:
        """Something from outside."""
        dice = self.random.random()
        name = f"g{self.random.randint(0, number)}"
        if dice < 0.2:
            self.perform(self.driver.cancel(name))
        elif dice < 0.3:
            self.driver.now += self.random.random()
            self.perform(self.driver.tick(self.driver.now))
        elif dice < 0.35:
            self.perform(self.driver.tell(ev.BusRestored(self.driver.now)))

    def assign(self, number: int) -> None:
        assignment = f"a{number}"
        self.assigned.append(assignment)
        tokens = self.random.choice((3, 8, 21, 40))
        wanted = generate(f"g{number}", tokens, sampling=Sampling(max_tokens=self.random.randint(1, 12)),
                          deadline_at=WALL + self.driver.now - 10.0 + self.random.choice((0.5, 3.0, 500.0)))  # fmt: skip
        self.perform(self.driver.assign(assignment, wanted))


@pytest.mark.parametrize("stage", [Stage.DECODE, Stage.PREFILL])
@pytest.mark.parametrize("seed", range(60))
def test_nothing_leaks(seed: int, stage: Stage) -> None:
    """Every assignment is answered once; every accepted one is done once; the engine holds nothing; tokens are cold ones."""
    world = World(seed, stage)
    driver = world.driver
    for number in range(25):
        world.assign(number)
        for _ in range(world.random.randint(1, 15)):
            world.disturb(number)
            world.work()
    if seed % 3 == 0:
        world.perform(driver.tell(ev.DrainCut(driver.now)))
    for _ in range(5_000):
        if not world.engine.has_work and not any(world.jobs.values()):
            break
        world.work()
    assert not driver.core.works and not world.jobs
    assert set(driver.answers) == set(world.assigned)
    accepted = sorted(name for name, reply in driver.answers.items() if reply.accepted)
    assert sorted(end[0] for end in driver.ends) == accepted and accepted
    stats = world.engine.stats()
    assert stats.blocks_held == 0 and stats.requests_claimed == 0
    assert {block.key for block in world.engine.resident()} == driver.core.blocks._keys
    seqs = [one.delta.seq for one in driver.all(ev.SayDelta)]
    assert seqs == list(range(1, len(seqs) + 1))
    # All prompts count up from 0, so what was said after equal prompts agrees, whatever was loaded or computed.
    if stage is Stage.PREFILL:
        assert not world.said and not world.ends
    lengths = {one.request.request_id: len(one.request.tokens) for one in driver.all(ev.ClaimBlocks)}
    by_length: dict[int, list[int]] = {}
    for name, said in world.said.items():
        longest = by_length.setdefault(lengths[f"a{name[1:]}"], said)
        shorter, longer = sorted((longest, said), key=len)
        assert longer[: len(shorter)] == shorter
        by_length[lengths[f"a{name[1:]}"]] = longer
