"""A small fleet in a bad week: nodes, sessions, and faults drawn from the seed, then quiet, then the auditor.

0 s ............ 40 s ................. until all turns ended ........... + 15 s
storm: kills, stalls, partitions,       calm: everything is on,           quiet: nothing may be left over
loss, duplicates, failing disks         nothing is lost any more
"""

from __future__ import annotations

from collections.abc import Callable

from proto.generate import Stage, WorkerPrice
from proto.residency import Tier
from services.loop.generation import Target
from services.router.admission import RouterConfig
from shared.block_hash import Namespace
from shared.engine.batch import StepBudget
from shared.engine.sim_engine import SimOptions
from tests.sim.bus import Bus, Logs, Weather
from tests.sim.client_node import DEADLINE_S, ClientNode
from tests.sim.kv_node import KvNode
from tests.sim.loop_node import LoopNode, WorkQueue
from tests.sim.node import Node
from tests.sim.router_node import RouterNode
from tests.sim.worker_node import WorkerNode, card_of
from tests.sim.world import Life, World

STORM_S, QUIET_S = 40.0, 15.0
# A turn whose deadline passed ends soon after it.
DEADLINE_SLACK_S = 15.0
TURNS_MAX = 5
EOS = 17  # the first id that the simulated engine says
OPTIONS = SimOptions(
    vocab_size=600, context_tokens=512, block_tokens=4, blocks_total=110, answer_tokens=40,
    price=WorkerPrice(prefill_token_s=0.004), budget=StepBudget(alone_tokens=32, shared_tokens=16, bite_tokens=16),
)  # fmt: skip
SALT = b"tenant"


class System:
    """Everything of one seed."""

    def __init__(self, seed: int, *, verbose: bool = False) -> None:
        self.world = World(seed, verbose=verbose)
        draw = self.world.random
        self.weather = Weather()
        self.bus, self.logs = Bus(self.world, self.weather), Logs()
        self.queue = WorkQueue(self.world, lambda loop: self._can_speak(loop.name, loop.life))
        capacities = {Tier.RAM: draw.choice([6_000, 20_000]), Tier.NVME: draw.choice([12_000, 60_000])}
        self.kv = KvNode("kvstore-0", self.world, self.bus, capacities)
        policy = draw.choice(["residency", "residency", "round_robin"])
        config = RouterConfig(policy=policy, prefill_tokens_min=draw.choice([40, 1_000]))
        self.router = RouterNode("router-0", self.world, self.bus, config)
        self.workers = [self._worker(f"decode-{n}", Stage.DECODE) for n in range(draw.randint(1, 3))]
        if draw.random() < 0.6:
            self.workers.append(self._worker("prefill-0", Stage.PREFILL))
        namespace = Namespace.of_card(card_of(OPTIONS, "w", 0), SALT).digest()
        self.target = Target(namespace, SALT, OPTIONS.block_tokens, OPTIONS.context_tokens, (EOS,))
        self.loops = [
            LoopNode(f"loop-{n}", self.world, self.bus, self.logs, self.queue, self.target)
            for n in range(draw.randint(1, 2))
        ]
        self.queue.loops = self.loops
        self.clients = [
            ClientNode(f"c{n}", self.world, self.bus, self.logs, self.queue, draw.randint(2, TURNS_MAX))
            for n in range(draw.randint(2, 5))
        ]

    def _worker(self, name: str, stage: Stage) -> WorkerNode:
        return WorkerNode(name, self.world, self.bus, self.kv, stage, OPTIONS)

    def _can_speak(self, name: str, life: Life) -> bool:
        return life.paused_until <= self.world.now and name not in self.weather.cut_off

    @property
    def servers(self) -> list[Node]:
        return [self.kv, self.router, *self.workers, *self.loops]

    def run(self) -> None:
        """All of it. Ends by itself: every turn has a deadline."""
        for node in (*self.servers, *self.clients):
            node.start()
        self._storm()
        self.world.run(STORM_S)
        self._calm()
        latest = STORM_S + TURNS_MAX * (DEADLINE_S + DEADLINE_SLACK_S)
        while self.world.now < latest and not self.is_over:
            self.world.run(self.world.now + 1.0)
        self.world.run(self.world.now + QUIET_S)

    @property
    def is_over(self) -> bool:
        """Every turn that was ever wanted has ended at its client."""
        return all(not client.turns_left and len(client.ended) == len(client.asked) for client in self.clients)

    # -- faults

    def _storm(self) -> None:
        draw = self.world.random
        self.weather.loss = draw.choice([0.0, 0.002, 0.01])
        self.weather.duplicate = draw.choice([0.0, 0.01])
        self.weather.reorder = draw.choice([0.0, 0.02])
        self.weather.delay_s = draw.choice([0.001, 0.01])
        faults: list[Callable[[], None]] = [
            self._kill,
            self._kill,
            self._stall,
            self._cut_off,
            self._fail_disk,
            self._damage,
        ]
        for _ in range(draw.randint(3, 12)):
            self.world.after(draw.uniform(1.0, STORM_S - 5.0), draw.choice(faults))

    def _kill(self) -> None:
        node = self.world.random.choice(self.servers)
        if node.is_on:
            node.kill()
            self.world.after(self.world.random.uniform(0.05, 4.0), lambda: None if node.is_on else node.start())

    def _stall(self) -> None:
        node = self.world.random.choice(self.servers)
        seconds = self.world.random.uniform(0.5, 9.0)
        self.world.say(node.name, f"stalls for {seconds:.1f} s")
        node.life.paused_until = self.world.now + seconds

    def _cut_off(self) -> None:
        node = self.world.random.choice(self.servers)
        self.world.say(node.name, "is cut off")
        self.weather.cut_off.add(node.name)
        self.world.after(self.world.random.uniform(0.5, 9.0), lambda: self.weather.cut_off.discard(node.name))

    def _fail_disk(self) -> None:
        self.world.say(self.kv.name, "disk fails")
        self.kv.is_failing = True

        def mend() -> None:
            self.kv.is_failing = False

        self.world.after(self.world.random.uniform(0.5, 5.0), mend)

    def _damage(self) -> None:
        self.world.say(self.kv.name, "frames are damaged")
        for frames in self.kv.disk.values():
            for key in sorted(frames):
                if self.world.random.random() < 0.1:
                    frames[key].is_good = False

    def _calm(self) -> None:
        self.world.say("world", "calm")
        self.weather.loss = self.weather.duplicate = self.weather.reorder = 0.0
        self.weather.cut_off.clear()
        self.kv.is_failing = False
        for node in self.servers:
            node.life.paused_until = 0.0
            if not node.is_on:
                node.start()
