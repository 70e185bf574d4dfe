"""Pure: a running sequence, and which of its tokens go into the next step.

A sequence knows `length` tokens, of which the first `computed` have their K and V in the pool:

    |---- resident ----|---- loaded ----|---- computed here ----|-- pending --|
    0                                                       computed        length

Prefill has many pending tokens, decode has one (the token just sampled), and both are the same thing: run some pending
tokens, and when none is left, choose the next one. A step takes every decoding sequence's token first, then shares what
is left of its budget between the prompts, so a long prompt never stops running streams nor starves other prompts.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from proto.ids import ROOT_KEY, BlockKey, NamespaceDigest
from shared.block_hash import chain_keys
from shared.engine.protocol import EngineRequest


class GrammarState(Protocol):
    """Where one sequence stands in its grammar."""

    def allowed(self, eos_token_ids: frozenset[int]) -> NDArray[np.bool_]:
        """Which token ids may come next; the end-of-answer ids exactly where the grammar may end."""
        ...

    def advance(self, token: int) -> bool:
        """The token was said. False if the grammar does not allow it; the state is useless then."""
        ...

    @property
    def ended(self) -> bool:
        """Nothing more can follow."""
        ...


class Phase(Enum):
    """Life of a sequence."""

    CLAIMED = auto()
    PREFILLING = auto()
    DECODING = auto()


@dataclass(slots=True)
class Sequence:
    """One claimed or running request. The engine mutates it, backends read it."""

    request: EngineRequest
    # All tokens known so far; grows by one per sampled token.
    tokens: list[int]
    # Keys of full blocks in chain order: those of the prompt, then as far as `key` was asked.
    keys: list[BlockKey]
    block_tokens: int
    # Blocks in chain order, owned by the block table.
    blocks: list[int]
    grammar: GrammarState | None
    # The answer was complete before this attempt began: compute the prompt, say nothing.
    already_over: bool
    phase: Phase = Phase.CLAIMED
    computed: int = 0
    resident_blocks: int = 0
    loaded_blocks: int = 0
    # Blocks that were resident at start; those after it came with this sequence, and go with it if they are damaged.
    first_suspect_block: int = 0
    # On the engine's clock.
    started_at: float = 0.0
    prompt_done_at: float = 0.0
    # Which ids the repetition penalty applies to; kept by the sampler. `seen_count` tokens are in it.
    seen: NDArray[np.bool_] | None = field(default=None)
    seen_count: int = 0

    @property
    def length(self) -> int:
        """Tokens known."""
        return len(self.tokens)

    @property
    def pending(self) -> int:
        """Known tokens without K and V."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        """Tokens sampled by this attempt."""
        return len(self.tokens) - len(self.request.tokens)

    @property
    def next_index(self) -> int:
        """Index of the next token, counted from the generation's first token over all attempts."""
        return self.request.emitted + self.generated

    def key(self, index: int) -> BlockKey:
        """Key of the full block `index`, which may have filled up since the prompt."""
        if index >= len(self.keys):
            begin = len(self.keys) * self.block_tokens
            tokens = self.tokens[begin : (index + 1) * self.block_tokens]
            parent = self.keys[-1] if self.keys else ROOT_KEY
            namespace = NamespaceDigest(self.request.namespace)
            self.keys.extend(chain_keys(namespace, tokens, self.block_tokens, parent))
        return self.keys[index]

    @property
    def speaks(self) -> bool:
        """Tokens are to be chosen when the prompt is done."""
        return not (self.request.prefill_only or self.already_over)


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `count` pending tokens of a sequence, to be run in one step."""

    sequence: Sequence
    count: int

    @property
    def start(self) -> int:
        """Position of the chunk's first token."""
        return self.sequence.computed

    @property
    def chooses(self) -> bool:
        """The chunk ends with the last known token, so its logits choose the next one."""
        return self.count == self.sequence.pending and self.sequence.speaks


@dataclass(frozen=True, slots=True)
class Choice:
    """The next token, and its log-probability if the request asked for it."""

    token: int
    logprob: float | None


@dataclass(frozen=True, slots=True)
class Broken:
    """No token can be chosen. `kv_suspect`: what the sequence computed must not be used by anybody."""

    message: str
    kv_suspect: bool


@dataclass(frozen=True, slots=True)
class StepBudget:
    """How many tokens one step may run: alone, prompts take big bites; beside running streams, small ones."""

    alone_tokens: int = 512
    shared_tokens: int = 64
    # A prompt's smallest bite (but for its end): smaller ones cost more in calls than they give in fairness.
    bite_tokens: int = 16

    def __post_init__(self) -> None:
        assert 1 <= self.bite_tokens <= self.shared_tokens <= self.alone_tokens


def plan_step(sequences: Items[Sequence], budget: StepBudget) -> list[Chunk]:
    """Chunks of the next step, at most one per sequence. Decoding sequences all get theirs; prompts share, in the given order.

    Empty only when `sequences` is. Prompts that got nothing must come earlier in the next call's order.
    """
    decoding = [Chunk(sequence, 1) for sequence in sequences if sequence.phase is Phase.DECODING]
    prompts = [sequence for sequence in sequences if sequence.phase is Phase.PREFILLING]
    assert all(chunk.sequence.pending == 1 for chunk in decoding)
    left = max(budget.shared_tokens - len(decoding), budget.bite_tokens) if decoding else budget.alone_tokens
    bites: list[Chunk] = []
    for index, sequence in enumerate(prompts):
        if left <= 0:
            break
        fair = max(left // (len(prompts) - index), budget.bite_tokens)
        count = min(fair, left, sequence.pending)
        assert count >= 1
        bites.append(Chunk(sequence, count))
        left -= count
    return decoding + bites
