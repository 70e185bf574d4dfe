"""The pool's bytes: K and V of every block, preallocated, and one block <-> bytes.

One tensor [blocks, layers, 2, kv_heads, block_tokens, head_dim], so that a block's body is one contiguous run of bytes and
leaves or enters the pool by one copy. For the attention function the same memory is seen as rows:

    token rows  [blocks * layers * 2 * kv_heads * block_tokens, head_dim]   where a token's K or V of one head is written
    tile rows   [blocks * layers * 2 * kv_heads, block_tokens * head_dim]   what is gathered for a sequence

Row numbers are made once per step for layer 0; the views of the other layers begin further on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from shared.engine.protocol import Buffer


class KvPool:
    """Owns the tensor. Knows nothing of who holds which block."""

    def __init__(self, *, blocks_total: int, shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
        self.layer_count, two, self.head_count, self.block_tokens, self.head_dimension = shape
        assert two == 2
        # Zeroed, which also makes the system give us the memory now and not in the middle of a turn.
        self.data = torch.zeros((blocks_total, *shape), dtype=dtype)
        self.block_bytes = self.data[0].numel() * self.data.element_size()
        self._bytes = self.data.view(torch.uint8).view(blocks_total, self.block_bytes).numpy()
        self._tiles_of_block = self.layer_count * 2 * self.head_count
        self._heads = torch.arange(self.head_count)
        token_rows = self.data.view(-1, self.head_dimension)
        tile_rows = self.data.view(-1, self.block_tokens * self.head_dimension)
        tiles_of_layer = 2 * self.head_count
        self._key_rows = [token_rows[layer * tiles_of_layer * self.block_tokens :] for layer in range(self.layer_count)]
        self._value_rows = [rows[self.head_count * self.block_tokens :] for rows in self._key_rows]
        self._tile_rows = [tile_rows[layer * tiles_of_layer :] for layer in range(self.layer_count)]

    def export(self, block: int) -> bytes:
        """The block's body."""
        body: bytes = self._bytes[block].tobytes()
        return body

    def load(self, block: int, body: Buffer) -> None:
        """Overwrite the block. `body` must have exactly `block_bytes` bytes."""
        source = np.frombuffer(body, dtype=np.uint8)
        assert source.nbytes == self.block_bytes
        np.copyto(self._bytes[block], source)

    def scrub(self, blocks: Sequence[int]) -> None:
        """Overwrite blocks with zeros."""
        self.data[list(blocks)] = 0

    def write_rows(self, blocks: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Token rows for tokens at (block, offset in it), [tokens] each; the result is [kv_heads * tokens]."""
        first = blocks * (self._tiles_of_block * self.block_tokens) + offsets
        return (self._heads[:, None] * self.block_tokens + first[None, :]).reshape(-1)

    def read_rows(self, blocks: torch.Tensor) -> torch.Tensor:
        """Tile rows of a run of blocks, ordered so that gathering them gives [2, kv_heads, blocks * block_tokens, head_dim]."""
        tiles = torch.arange(2 * self.head_count)
        return (tiles[:, None] + (blocks * self._tiles_of_block)[None, :]).reshape(-1)

    def write(self, layer: int, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store K and V [1, kv_heads, tokens, head_dim] of one layer at `rows` from write_rows."""
        self._key_rows[layer].index_copy_(0, rows, key.reshape(-1, self.head_dimension))
        self._value_rows[layer].index_copy_(0, rows, value.reshape(-1, self.head_dimension))

    def gather(self, layer: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [1, kv_heads, blocks * block_tokens, head_dim] of one layer: a copy, by `rows` from read_rows."""
        # The embedding kernel copies whole rows; index_select is 50 times slower here on CPU (measured, torch 2.13).
        tiles = torch.embedding(self._tile_rows[layer], rows)
        key, value = tiles.view(2, 1, self.head_count, -1, self.head_dimension)
        return key, value

    def gather_streams(self, layer: int, rows: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for `count` sequences with as many blocks each: K and V [count, kv_heads, tokens, head_dim]."""
        tiles = torch.embedding(self._tile_rows[layer], rows)
        key, value = tiles.view(count, 2, self.head_count, -1, self.head_dimension).unbind(1)
        return key, value
