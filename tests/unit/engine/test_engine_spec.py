"""Bytes of KV, and models that the pool cannot hold."""

from __future__ import annotations

from typing import Any

import pytest

from shared.engine.spec import ModelSpec, UnsupportedModel, block_bytes, body_shape, kv_bytes

SMOLLM: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
}


def test_bytes_of_the_default_model() -> None:
    """Sizing: 2 * 30 layers * 16 tokens * 3 heads * 64 * 4 bytes, worked out by hand."""
    spec = ModelSpec.from_config(SMOLLM)
    assert kv_bytes(spec, tokens=1, dtype="float32") == 46_080
    assert block_bytes(spec, block_tokens=16, dtype="float32") == 737_280
    assert block_bytes(spec, block_tokens=16, dtype="bfloat16") == 368_640
    assert body_shape(spec, block_tokens=16) == (30, 2, 3, 16, 64)


def test_old_and_new_rope_settings_are_part_of_the_identity() -> None:
    """A checkpoint with another rotary base makes other keys, however its config spells it."""
    old = {key: value for key, value in SMOLLM.items() if key != "rope_parameters"}
    plain = ModelSpec.from_config({**old, "rope_theta": 10000.0})
    scaled = ModelSpec.from_config({**old, "rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2}})
    assert len({plain.rope_scaling, scaled.rope_scaling, ModelSpec.from_config(SMOLLM).rope_scaling}) == 3


@pytest.mark.parametrize(
    ("changes", "feature"),
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"num_kv_shared_layers": 10}, "share K and V"),
        ({"text_config": {"hidden_size": 1}}, "multimodal"),
    ],
)
def test_models_the_pool_cannot_hold_are_refused_by_name(changes: dict[str, Any], feature: str) -> None:
    """Someone points ROOST_MODEL at a hybrid model: the start says what is missing instead of computing nonsense."""
    with pytest.raises(UnsupportedModel, match=feature):
        ModelSpec.from_config({**SMOLLM, **changes})


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0}},
        {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"type": "longrope"}},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "longrope"},
                "sliding_attention": {"rope_type": "default"},
            }
        },
    ],
    ids=["dynamic", "longrope", "by-layer"],
)
def test_keys_must_not_depend_on_when_they_were_made(rope: dict[str, Any]) -> None:
    """Such an embedding turns by the length so far: one block would have other bytes in another turn. Refused by name."""
    with pytest.raises(UnsupportedModel, match="rotary"):
        ModelSpec.from_config({**SMOLLM, **rope})
