"""The layers of Llama-like models as few large operations: what transformers' modules compute, in half the time on a CPU.

Where the time goes (135M parameters, float32, 2 cores, one stream: 37 ms a step): 22 ms read the weights, the rest is a
thousand small operations and four hundred module calls. So

* projections of the same input are one matrix: queries, keys and values; gate and up
* wide matrices are kept as oneDNN packs them, which for 4 to 64 rows is up to 1.7 times as fast as the plain layout
* a norm is one operation, and sums go into the residual stream in place
* streams that decode are attended to together, whatever their lengths (attention.py)

Everything that differs between these families is read off the modules: biases, norms of queries and keys, windows, rotary
tables. Other families run by their own modules (runner.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn.functional import linear, rms_norm, silu

from shared.engine.attention import Scoring, Step, attend

FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3")
# Narrower matrices are as fast plain (measured with 576 to 49,152 rows).
PACK_ROWS_MIN: Final = 2048
# The number of rows that oneDNN is told to pack for; packs for 8, 32 and 512 are the same, that for 1 is slower.
PACK_FOR_TOKENS: Final = 8


class Projection:
    """A linear layer made of one or more modules that have the same input; their outputs lie behind each other."""

    def __init__(self, *modules: Any) -> None:
        weight = torch.cat([module.weight.detach() for module in modules])
        biases = [module.bias for module in modules if getattr(module, "bias", None) is not None]
        assert len(biases) in (0, len(modules)), "all have a bias, or none has"
        self._bias = torch.cat([bias.detach() for bias in biases]) if biases else None
        has_packs = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
        self._is_packed = has_packs and weight.shape[0] >= PACK_ROWS_MIN
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_FOR_TOKENS) if self._is_packed else weight

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[tokens, in] -> [tokens, out]."""
        if not self._is_packed:
            return linear(rows, self._weight, self._bias)
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return result


class Norm:
    """Root mean square norm over the last dimension."""

    def __init__(self, module: Any) -> None:
        self._weight, self._epsilon = module.weight.detach().clone(), float(module.variance_epsilon)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """The same shape."""
        return rms_norm(rows, self._weight.shape, self._weight, self._epsilon)


@dataclass(frozen=True, slots=True)
class Rotary:
    """cos and sin of a step's positions, [tokens, 1, head_dim]; the first half of `sin` is negated."""

    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def of(cls, module: Any, hidden: torch.Tensor, positions: torch.Tensor) -> Rotary:
        """By the model's own rotary embedding, which knows its scaling."""
        cos, sin = (table[0, :, None, :] for table in module(hidden[None], position_ids=positions[None]))
        half = sin.shape[-1] // 2
        return cls(cos, torch.cat((-sin[..., :half], sin[..., half:]), dim=-1))

    def turn(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotate [tokens, heads, head_dim]."""
        half = heads.shape[-1] // 2
        swapped = torch.cat((heads[..., half:], heads[..., :half]), dim=-1)
        return torch.addcmul(heads * self.cos, swapped, self.sin)


class Layer:
    """One decoder layer."""

    def __init__(self, module: Any, index: int) -> None:
        attention, mlp = module.self_attn, module.mlp
        self._index = index
        self._head_dimension = int(attention.head_dim)
        self._kv_heads = attention.k_proj.weight.shape[0] // self._head_dimension
        self._heads = attention.q_proj.weight.shape[0] // self._head_dimension
        self._scoring = Scoring(float(attention.scaling), _window(attention), None)
        self._before_attention = Norm(module.input_layernorm)
        self._before_mlp = Norm(module.post_attention_layernorm)
        self._query_norm = Norm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self._key_norm = Norm(attention.k_norm) if hasattr(attention, "k_norm") else None
        self._qkv = Projection(attention.q_proj, attention.k_proj, attention.v_proj)
        self._out = Projection(attention.o_proj)
        self._gate_up = Projection(mlp.gate_proj, mlp.up_proj)
        self._down = Projection(mlp.down_proj)

    def add_to(self, hidden: torch.Tensor, rotary: Rotary, step: Step) -> None:
        """Add what the layer makes of `hidden` [tokens, width] to it; K and V go to the pool."""
        tokens = hidden.shape[0]
        heads = self._qkv(self._before_attention(hidden)).view(tokens, -1, self._head_dimension)
        turning = heads[:, : self._heads + self._kv_heads]
        if self._query_norm is not None and self._key_norm is not None:
            query, key = self._query_norm(turning[:, : self._heads]), self._key_norm(turning[:, self._heads :])
            turning = torch.cat((query, key), dim=1)
        turned = rotary.turn(turning)
        step.pool.write(
            self._index, step.token_major_rows, turned[:, self._heads :], heads[:, self._heads + self._kv_heads :]
        )
        attended = attend(turned[:, : self._heads], step, self._index, self._scoring)
        hidden += self._out(attended)
        gate, up = self._gate_up(self._before_mlp(hidden)).chunk(2, dim=-1)
        hidden += self._down(silu(gate).mul_(up))


class FusedDecoder:
    """Implements runner.Decoder. Copies all weights out of the model it is made from, whose file can be unmapped then."""

    def __init__(self, model: Any) -> None:
        core = model.model
        self._embedding = core.embed_tokens.weight.detach().clone()
        self._rotary = core.rotary_emb
        self._norm = Norm(core.norm)
        self._head = Projection(model.lm_head)
        self._layers = []
        for index in range(len(core.layers)):
            self._layers.append(Layer(core.layers[index], index))
            # Its weights are in ours now; both at once would be twice the memory.
            core.layers[index] = torch.nn.Identity()

    @classmethod
    def fits(cls, model: Any) -> bool:
        """Whether the model is of a family that this computes exactly."""
        config = model.config
        return (
            config.model_type in FAMILIES
            and getattr(config, "hidden_act", None) == "silu"
            and model.dtype == torch.float32
            and model.device.type == "cpu"
        )

    def logits(self, tokens: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor, step: Step) -> torch.Tensor:
        """See runner.Decoder."""
        hidden = self._embedding[tokens]
        rotary = Rotary.of(self._rotary, hidden, positions)
        for layer in self._layers:
            layer.add_to(hidden, rotary, step)
        return self._head(self._norm(hidden[kept]))


def _window(attention: Any) -> int | None:
    """The sliding window of a layer. Mistral's is in its config, Qwen's on the layer, Llama has none."""
    if hasattr(attention, "sliding_window"):
        own: int | None = attention.sliding_window
        return own
    shared: int | None = getattr(attention.config, "sliding_window", None)
    return shared
