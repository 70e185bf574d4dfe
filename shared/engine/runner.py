"""The one forward call: a ragged batch of chunks -> logits after each chunk's last token -> the next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from shared.engine.attention import STEP_KEYWORD, Step
from shared.engine.batch import Broken, Choice, Chunk
from shared.engine.kv_pool import KvPool
from shared.engine.protocol import Buffer
from shared.engine.sampler import choose, damage_of


class Decoder(Protocol):
    """The layers of a model."""

    def logits(self, tokens: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor, step: Step) -> torch.Tensor:
        """Token ids and positions [tokens] -> logits [kept, vocab] of the rows `kept`; K and V of all go to the pool."""
        ...


class ModuleDecoder:
    """Any family, by transformers' own modules and our attention function."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def logits(self, tokens: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor, step: Step) -> torch.Tensor:
        """See Decoder."""
        output = self._model(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=kept,
            **{STEP_KEYWORD: step},
        )
        logits: torch.Tensor = output.logits[0]
        return logits


class Runner:
    """Implements paged_engine.Backend with a model's layers and the pool. Owns neither's lifetime."""

    def __init__(self, decoder: Decoder, pool: KvPool) -> None:
        self._decoder = decoder
        self._pool = pool

    def export(self, block: int) -> bytes:
        """See Backend."""
        return self._pool.export(block)

    def load(self, block: int, body: Buffer) -> None:
        """See Backend."""
        self._pool.load(block, body)

    def scrub(self, blocks: Sequence[int]) -> None:
        """See Backend."""
        self._pool.scrub(blocks)

    def forward(self, chunks: Sequence[Chunk]) -> Sequence[Choice | Broken | None]:
        """See Backend."""
        rows = zip(chunks, self._logits(chunks), strict=True)
        return [choose(row, chunk.sequence) if chunk.chooses else damage_of(row) for chunk, row in rows]

    @torch.inference_mode()
    def _logits(self, chunks: Sequence[Chunk]) -> NDArray[np.float32]:
        """Logits [chunks, vocab] after each chunk's last token. The language-model head runs for these rows only.

        Chunks that choose nothing get theirs too: the last row has looked at all K and V before it, so it shows damage
        before a block is sealed and shared (one row more in a chunk's some hundred).
        """
        tokens: list[int] = []
        positions = []
        kept = []
        for chunk in chunks:
            tokens += chunk.sequence.tokens[chunk.start : chunk.start + chunk.count]
            positions.append(torch.arange(chunk.start, chunk.start + chunk.count))
            kept.append(len(tokens) - 1)
        rows = self._decoder.logits(
            torch.tensor(tokens), torch.cat(positions), torch.tensor(kept), Step.of(self._pool, chunks)
        )
        logits: NDArray[np.float32] = rows.float().numpy()
        return logits
