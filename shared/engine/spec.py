"""Pure: the shape of a model's KV, and the one place that says how many bytes it takes.

    bytes for T tokens = 2 * L * T * H_kv * D * b

L layers, H_kv key/value heads, D head dimension, b bytes per number. The counts come from the checkpoint's config.json.
Models whose layers do not all keep one K and one V of the same shape are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.errors import StartRefused

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

# config.json keys that say a model keeps something else than plain K and V per layer, and what that is called.
_UNSUPPORTED_KEYS: Mapping[str, str] = {
    "kv_lora_rank": "multi-head latent attention",
    "num_kv_shared_layers": "layers that share K and V",
    "text_config": "a multimodal model",
    "is_encoder_decoder": "an encoder-decoder model",
    "use_bidirectional_attention": "attention to later tokens",
}
# Rotary embeddings that depend on how long the sequence is by now: the same tokens would have other K, by when they came.
_UNSUPPORTED_ROPE = frozenset({"dynamic", "longrope"})
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


class UnsupportedModel(StartRefused):
    """The model has `feature`, which the paged pool cannot hold."""

    def __init__(self, architecture: str, feature: str) -> None:
        super().__init__(f"{architecture} has {feature}, which is not supported")
        self.architecture, self.feature = architecture, feature


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What sizing needs to know of a model."""

    architecture: str
    layer_count: int
    kv_head_count: int
    head_dimension: int
    vocab_size: int
    context_tokens: int
    # Canonical JSON of the rotary embedding's parameters; part of a block's identity.
    rope_scaling: str

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelSpec:
        """Read a parsed config.json. Raises UnsupportedModel naming the feature, KeyError on a missing count."""
        architecture = (config.get("architectures") or [config.get("model_type", "a nameless model")])[0]
        for key, feature in _UNSUPPORTED_KEYS.items():
            if config.get(key):
                raise UnsupportedModel(architecture, feature)
        for layer_type in config.get("layer_types") or ():
            if layer_type not in _LAYER_TYPES:
                raise UnsupportedModel(architecture, f"layers of type {layer_type}")
        rope = config.get("rope_parameters") or {
            "rope_theta": config.get("rope_theta"),
            **(config.get("rope_scaling") or {}),
        }
        for parameters in (rope, *(value for value in rope.values() if isinstance(value, Mapping))):
            kind = parameters.get("rope_type") or parameters.get("type")
            if kind in _UNSUPPORTED_ROPE:
                raise UnsupportedModel(architecture, f"rotary embedding of type {kind}")
        query_heads = config["num_attention_heads"]
        return cls(
            architecture=architecture,
            layer_count=config["num_hidden_layers"],
            kv_head_count=config.get("num_key_value_heads") or query_heads,
            head_dimension=config.get("head_dim") or config["hidden_size"] // query_heads,
            vocab_size=config["vocab_size"],
            context_tokens=config["max_position_embeddings"],
            rope_scaling=json.dumps(rope, sort_keys=True, separators=(",", ":")),
        )


def kv_bytes(spec: ModelSpec, *, tokens: int, dtype: str) -> int:
    """Bytes of K and V for `tokens` tokens of one sequence, over all layers."""
    assert tokens >= 0
    return (
        2  # one K and one V
        * spec.layer_count  # config.json num_hidden_layers
        * tokens
        * spec.kv_head_count  # config.json num_key_value_heads (grouped-query attention keeps only these)
        * spec.head_dimension  # config.json head_dim, else hidden_size / num_attention_heads
        * DTYPE_BYTES[dtype]
    )


def body_shape(spec: ModelSpec, *, block_tokens: int) -> tuple[int, int, int, int, int]:
    """Shape of one block's body: layers, K then V, heads, tokens, head dimension (protocol.LAYOUT_VERSION 1)."""
    return (spec.layer_count, 2, spec.kv_head_count, block_tokens, spec.head_dimension)


def block_bytes(spec: ModelSpec, *, block_tokens: int, dtype: str) -> int:
    """Bytes of one block's body."""
    return kv_bytes(spec, tokens=block_tokens, dtype=dtype)
