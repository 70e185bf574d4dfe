"""Paged attention as a transformers attention function: writes K and V into the pool, reads them back by block.

A step is a ragged batch: the chunks of all sequences lie behind each other in the token dimension of batch row 0. Every
linear layer sees one long row; only attention takes it apart. What a chunk may see comes from its place in the step,
never from a mask of transformers, so the mask function that is registered beside it returns None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from shared.engine.batch import Chunk
from shared.engine.kv_pool import KvPool

IMPLEMENTATION: Final = "roost_paged"
# Keyword of model(...) by which a step travels to the attention function.
STEP_KEYWORD: Final = "roost_step"
# Arguments of some models' attention that would change the result and that we do not do.
_REFUSED: Final = ("s_aux", "position_bias", "head_mask", "cache")


@dataclass(slots=True)
class Span:
    """One chunk in the ragged batch: token rows [begin, end) of the step, of a sequence that has `context` tokens then."""

    begin: int
    end: int
    context: int
    read_rows: torch.Tensor
    # Additive masks by sliding window, made once per step and not once per layer.
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """[chunk, context] of 0 and -inf: token i sees itself, those before it, and no further back than the window."""
        if window not in self.masks:
            last = torch.arange(self.context - (self.end - self.begin), self.context)[:, None]
            position = torch.arange(self.context)[None, :]
            hidden = position > last
            if window is not None:
                hidden |= position <= last - window
            self.masks[window] = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        return self.masks[window]


@dataclass(slots=True)
class Streams:
    """Spans of one token whose contexts have about the same size: attended to as one batch, the shorter ones padded."""

    # Rows of the step, [streams].
    rows: torch.Tensor
    # Tokens known to each stream, [streams]; and of the longest.
    contexts: torch.Tensor
    context_max: int
    # Tile rows of all, [streams * 2 * kv_heads * blocks].
    read_rows: torch.Tensor
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, spans: Sequence[Span], tiles: int) -> Streams:
        """`tiles`: rows of a block, 2 * kv_heads. What pads a short stream is its own last block, which the mask hides."""
        blocks = [span.read_rows.numel() // tiles for span in spans]
        columns = torch.arange(max(blocks))
        read = [
            span.read_rows.view(tiles, count)[:, columns.clamp(max=count - 1)]
            for span, count in zip(spans, blocks, strict=True)
        ]
        return cls(
            rows=torch.tensor([span.begin for span in spans]),
            contexts=torch.tensor([span.context for span in spans]),
            context_max=max(span.context for span in spans),
            read_rows=torch.stack(read).reshape(-1),
        )

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """[streams, 1, 1, context_max] of 0 and -inf."""
        if window not in self.masks:
            position = torch.arange(self.context_max)[None, :]
            hidden = position >= self.contexts[:, None]
            if window is not None:
                hidden |= position < self.contexts[:, None] - window
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
            self.masks[window] = mask[:, None, None, :]
        return self.masks[window]


@dataclass(frozen=True, slots=True)
class Step:
    """What attention needs to know of one forward pass."""

    pool: KvPool
    # Where K and V of the step's tokens go, [kv_heads * tokens]: head by head, and token by token.
    write_rows: torch.Tensor
    token_major_rows: torch.Tensor
    spans: tuple[Span, ...]
    # The spans of one token, in batches, and the others.
    streams: tuple[Streams, ...]
    chunks: tuple[Span, ...]

    @classmethod
    def of(cls, pool: KvPool, chunks: Sequence[Chunk]) -> Step:
        """Row numbers for all chunks, made from whole lists of blocks."""
        spans, blocks, offsets = [], [], []
        begin = 0
        for chunk in chunks:
            context = chunk.start + chunk.count
            used = torch.tensor(chunk.sequence.blocks[: -(-context // pool.block_tokens)])
            positions = torch.arange(chunk.start, context)
            blocks.append(used[positions // pool.block_tokens])
            offsets.append(positions % pool.block_tokens)
            spans.append(Span(begin, begin + chunk.count, context, pool.read_rows(used)))
            begin += chunk.count
        write_rows = pool.write_rows(torch.cat(blocks), torch.cat(offsets))
        token_major = write_rows.view(pool.head_count, -1).t().reshape(-1)
        singles: dict[int, list[Span]] = {}
        for span in spans:
            if span.end - span.begin == 1:
                # By size to the next power of two, so that padding is less than what is read anyway.
                singles.setdefault(span.read_rows.numel().bit_length(), []).append(span)
        streams = tuple(Streams.of(alike, 2 * pool.head_count) for alike in singles.values())
        longer = tuple(span for span in spans if span.end - span.begin > 1)
        return cls(pool, write_rows, token_major, tuple(spans), streams, longer)


@dataclass(frozen=True, slots=True)
class Scoring:
    """What a layer asks for beside plain attention."""

    scaling: float | None
    window: int | None
    softcap: float | None


def paged_attention(  # noqa: PLR0913 - the signature is transformers'
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer: query [1, heads, tokens, dim], key and value [1, kv_heads, tokens, dim], all after rotation.

    Answers [1, tokens, heads, dim]. Raises ValueError naming an argument that would be passed over.
    """
    for name in _REFUSED:
        if others.get(name) is not None:
            raise ValueError(f"paged attention does not support {name}")
    if attention_mask is not None or others.get("dropout") or others.get("is_causal") is False:
        raise ValueError("paged attention is causal, without dropout and without masks from outside")
    step: Step = others[STEP_KEYWORD]
    layer = module.layer_idx
    assert isinstance(layer, int)
    step.pool.write(layer, step.write_rows, key, value)
    scoring = Scoring(scaling, sliding_window, softcap)
    parts = []
    for span in step.spans:
        keys, values = step.pool.gather(layer, span.read_rows)
        keys, values = keys[:, :, : span.context], values[:, :, : span.context]
        rows = query[:, :, span.begin : span.end]
        parts.append(_attend(rows, keys, values, span, scoring))
    joined = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    return joined.transpose(1, 2), None


def attend(query: torch.Tensor, step: Step, layer: int, scoring: Scoring) -> torch.Tensor:
    """Attention of one layer for a whole step: query [tokens, heads, dim] after rotation -> [tokens, heads * dim].

    K and V of the step's own tokens are in the pool already. `scoring` has no softcap.
    """
    assert scoring.softcap is None
    tokens = query.shape[0]
    if len(step.streams) == 1 and not step.chunks:
        return _attend_streams(query, step, step.streams[0], layer, scoring).view(tokens, -1)
    attended = torch.empty_like(query)
    for streams in step.streams:
        attended[streams.rows] = _attend_streams(query[streams.rows], step, streams, layer, scoring)
    for span in step.chunks:
        keys, values = step.pool.gather(layer, span.read_rows)
        keys, values = keys[:, :, : span.context], values[:, :, : span.context]
        rows = query[span.begin : span.end].transpose(0, 1)[None]
        attended[span.begin : span.end] = _attend(rows, keys, values, span, scoring)[0].transpose(0, 1)
    return attended.view(tokens, -1)


def _attend_streams(query: torch.Tensor, step: Step, streams: Streams, layer: int, scoring: Scoring) -> torch.Tensor:
    """Attention of streams [streams, heads, dim] over what each knows. Heads that share K and V are rows of one matrix."""
    count, heads, dimension = query.shape
    kv_heads = step.pool.head_count
    keys, values = step.pool.gather_streams(layer, streams.read_rows, count)
    keys, values = keys[:, :, : streams.context_max], values[:, :, : streams.context_max]
    is_ragged = count > 1 or (scoring.window is not None and scoring.window < streams.context_max)
    mask = streams.mask(scoring.window, query.dtype) if is_ragged else None
    grouped = query.reshape(count, kv_heads, heads // kv_heads, dimension)
    attended = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scoring.scaling)
    return attended.reshape(count, heads, dimension)


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, span: Span, scoring: Scoring) -> torch.Tensor:
    """Attention of one sequence's chunk [1, heads, chunk, dim] over its whole context [1, kv_heads, context, dim]."""
    window = scoring.window if scoring.window is not None and scoring.window < span.context else None
    single = span.end - span.begin == 1
    whole = span.end - span.begin == span.context
    if scoring.softcap is None and window is None and (whole or single):
        return scaled_dot_product_attention(
            query, key, value, is_causal=not single, scale=scoring.scaling, enable_gqa=True
        )
    mask = span.mask(window, query.dtype)
    if scoring.softcap is None:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scoring.scaling, enable_gqa=True)
    return _attend_capped(query, key, value, mask, scoring)


def _attend_capped(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    """The same with scores squeezed into (-softcap, softcap), which the fused kernel cannot do."""
    assert scoring.softcap is not None
    groups = query.shape[1] // key.shape[1]
    scale = query.shape[-1] ** -0.5 if scoring.scaling is None else scoring.scaling
    scores = query @ key.repeat_interleave(groups, dim=1).transpose(-1, -2) * scale
    scores = torch.tanh(scores / scoring.softcap) * scoring.softcap + mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return weights @ value.repeat_interleave(groups, dim=1)


def _no_mask(*_: Any, **__: Any) -> None:
    """transformers asks for a mask; we need none. Without this entry other implementations would lose theirs silently."""


def register() -> None:
    """Make `attn_implementation="roost_paged"` known to transformers. May be called again."""
    AttentionInterface.register(IMPLEMENTATION, paged_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)
