"""The engine without weights: the same claims, steps, blocks and events, with made-up tokens, bodies and seconds.

* The next token is a hash of all tokens so far (and of the seed, when sampling), so any two runs of one request agree
  and exactness can be checked with nothing loaded. One token in about `answer_tokens` is the end of the answer.
* A block's body is a hash of its key. A body that was loaded and differs poisons the tokens and the bodies that come after
  it, as wrong KV would: a test that compares tokens finds it.
* A step takes what the price model says. `last_step_s` holds it; with a `sleep` the engine really waits that long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from blake3 import blake3

from proto.generate import WorkerPrice
from proto.message import pack_tokens
from shared.engine.batch import Broken, Choice, Chunk, Phase, StepBudget
from shared.engine.batch import Sequence as Running
from shared.engine.options import EngineOptions, engine_info
from shared.engine.paged_engine import GrammarSource, PagedEngine
from shared.engine.protocol import Buffer, EngineEvent, EngineInfo
from shared.engine.sampler import blocked_ids
from shared.model_dir import ModelDirectory

# A body small enough that hundreds of simulated workers can move real bytes: 2 layers, 1 head of 8 float32 numbers.
_LAYERS, _HEADS, _DIMENSION, _NUMBER_BYTES = 2, 1, 8, 4


@dataclass(frozen=True, slots=True)
class SimOptions:
    """What a simulated engine pretends to be."""

    model: str = "sim"
    fingerprint: str = "sim"
    tokenizer_digest: str = "sim"
    rope_scaling: str = ""
    vocab_size: int = 49_152
    context_tokens: int = 8_192
    block_tokens: int = 16
    blocks_total: int = 1_024
    # Ids below are special in the default tokenizer and are never said.
    first_plain_id: int = 17
    # Mean length of an answer; 0 lets every answer run to max_tokens.
    answer_tokens: int = 64
    price: WorkerPrice = field(default_factory=WorkerPrice)
    budget: StepBudget = field(default_factory=StepBudget)

    @classmethod
    def of_model(cls, model: ModelDirectory, options: EngineOptions) -> SimOptions:
        """A simulated engine that stands in for a real one over this model: its room, window, tokenizer and vocabulary."""
        info = engine_info(model, options)
        return cls(
            model=info.model,
            fingerprint=f"sim-{info.fingerprint}",
            tokenizer_digest=info.tokenizer_digest,
            rope_scaling=info.rope_scaling,
            vocab_size=info.vocab_size,
            context_tokens=info.context_tokens,
            block_tokens=info.block_tokens,
            blocks_total=info.blocks_total,
            price=options.price,
            budget=options.budget,
        )

    def info(self) -> EngineInfo:
        """As engines describe themselves."""
        shape = (_LAYERS, 2, _HEADS, self.block_tokens, _DIMENSION)
        return EngineInfo(
            model=self.model,
            fingerprint=self.fingerprint,
            tokenizer_digest=self.tokenizer_digest,
            kv_dtype="float32",
            block_tokens=self.block_tokens,
            rope_scaling=self.rope_scaling,
            context_tokens=self.context_tokens,
            vocab_size=self.vocab_size,
            block_bytes=int(np.prod(shape)) * _NUMBER_BYTES,
            body_shape=shape,
            blocks_total=self.blocks_total,
        )


def sim_body(key: bytes, *, size_bytes: int) -> bytes:
    """The body of the block with this key."""
    return blake3(key, derive_key_context="roost sim body").digest(size_bytes)


def sim_number(tokens: Sequence[int], *, seed: int) -> int:
    """The 64 bits that decide what follows `tokens`. A greedy request has seed 0."""
    return int.from_bytes(blake3(pack_tokens(tokens) + seed.to_bytes(8, "little")).digest(8), "little")


class SimBackend:
    """Implements paged_engine.Backend. Owns the bodies and a clock that only steps move."""

    def __init__(self, options: SimOptions, info: EngineInfo, sleep: Callable[[float], None] | None = None) -> None:
        self._options = options
        self._sleep = sleep
        self._slept_s = 0.0
        self._size_bytes = info.block_bytes
        self._bodies: dict[int, bytes] = {}
        # Loaded blocks that no sequence has looked at yet, and those that turned out not to be what their key says.
        self._unchecked: set[int] = set()
        self._wrong: set[int] = set()
        self.now_s = 0.0

    def clock(self) -> float:
        """Seconds of steps and loads so far."""
        return self.now_s

    def export(self, block: int) -> bytes:
        """See Backend."""
        return self._bodies[block]

    def load(self, block: int, body: Buffer) -> None:
        """See Backend."""
        self._bodies[block] = bytes(body)
        self._unchecked.add(block)
        self._wrong.discard(block)
        self.now_s += self._options.price.load_base_s + self._options.price.load_byte_s * self._size_bytes

    def scrub(self, blocks: Sequence[int]) -> None:
        """See Backend."""
        for block in blocks:
            self._bodies.pop(block, None)

    def forward(self, chunks: Sequence[Chunk]) -> Sequence[Choice | Broken | None]:
        """See Backend."""
        self.now_s += self._seconds(chunks)
        for chunk in chunks:
            self._fill(chunk)
        if self._sleep is not None:
            # Also for the loads since the last step.
            self._sleep(self.now_s - self._slept_s)
            self._slept_s = self.now_s
        return [self._choose(chunk.sequence) if chunk.chooses else None for chunk in chunks]

    def _seconds(self, chunks: Sequence[Chunk]) -> float:
        """What this step takes by the price model."""
        price = self._options.price
        seconds = 0.0
        streams = [chunk for chunk in chunks if chunk.sequence.phase is Phase.DECODING]
        prompts = [chunk for chunk in chunks if chunk.sequence.phase is not Phase.DECODING]
        if streams:
            context = sum(chunk.start for chunk in streams)
            seconds += price.decode_base_s + price.decode_stream_s * len(streams) + price.decode_context_s * context
        if prompts:
            seconds += price.prefill_base_s
        for chunk in prompts:
            seconds += chunk.count * (price.prefill_token_s + price.prefill_context_s * chunk.start)
        return seconds

    def _fill(self, chunk: Chunk) -> None:
        """Look at the blocks that came from memory, make the bodies of those that this chunk completes."""
        size = self._options.block_tokens
        sequence = chunk.sequence
        for index, block in enumerate(sequence.blocks[: chunk.start // size]):
            if block in self._unchecked:
                self._unchecked.discard(block)
                if self._bodies[block] != sim_body(sequence.key(index), size_bytes=self._size_bytes):
                    self._wrong.add(block)
        right = self._bodies_are_right(sequence)
        for index in range(chunk.start // size, (chunk.start + chunk.count) // size):
            block = sequence.blocks[index]
            body = sim_body(sequence.key(index), size_bytes=self._size_bytes)
            self._bodies[block] = body if right else bytes(byte ^ 0x55 for byte in body)
            self._unchecked.discard(block)
            if right:
                self._wrong.discard(block)
            else:
                self._wrong.add(block)

    def _choose(self, sequence: Running) -> Choice | Broken:
        """The next token: forced, the answer's end, or a hash."""
        options, request, sampling = self._options, sequence.request, sequence.request.sampling
        index = sequence.next_index
        logprob = None if sampling.logprobs is None else -1.0
        if index < len(request.forced):
            return Choice(request.forced[index], logprob)
        number = sim_number(sequence.tokens, seed=sampling.seed if sampling.temperature else 0)
        if not self._bodies_are_right(sequence):
            number ^= 0x5555_5555_5555_5555
        enders = frozenset() if sampling.ignore_eos else request.eos_token_ids
        if sequence.grammar is not None:
            blocked = blocked_ids(sequence, width=options.vocab_size)
            assert blocked is not None
            allowed = np.flatnonzero(~blocked)
            if not len(allowed):
                return Broken("the grammar allows no token here", kv_suspect=False)
            # An answer that may end does: made-up text would otherwise fill every string up to max_tokens.
            ending = sorted(enders.intersection(allowed.tolist()))
            return Choice(ending[0] if ending else int(allowed[number % len(allowed)]), logprob)
        may_end = bool(enders) and options.answer_tokens > 0 and index >= sampling.min_tokens
        if may_end and number % options.answer_tokens == 0:
            return Choice(min(enders), logprob)
        plain_count = options.vocab_size - options.first_plain_id
        return Choice(options.first_plain_id + (number >> 16) % plain_count, logprob)

    def _bodies_are_right(self, sequence: Running) -> bool:
        """Every full block of the sequence holds the body that its key asks for."""
        full = sequence.computed // self._options.block_tokens
        return not self._wrong or self._wrong.isdisjoint(sequence.blocks[:full])


class SimEngine(PagedEngine):
    """Implements protocol.Engine. With `sleep` a step takes the time it says; without, it only says it.

    With a real `clock` beside, what is reported is measured, as by an engine that computes.
    """

    def __init__(
        self,
        options: SimOptions,
        *,
        grammars: GrammarSource | None = None,
        sleep: Callable[[float], None] | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        info = options.info()
        self._sim = SimBackend(options, info, sleep)
        # Seconds that the last step, with the loads since the one before, would have taken.
        self.last_step_s = 0.0
        self._told_s = 0.0
        super().__init__(info, self._sim, clock=clock or self._sim.clock, budget=options.budget, grammars=grammars)

    def step(self) -> list[EngineEvent]:
        """See Engine."""
        events = super().step()
        self.last_step_s = self._sim.now_s - self._told_s
        self._told_s = self._sim.now_s
        return events
