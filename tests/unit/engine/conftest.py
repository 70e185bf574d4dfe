"""Tiny models, made once a session."""

from __future__ import annotations

import pytest

from shared.engine.torch_engine import TorchEngine
from shared.model_dir import ModelDirectory
from tests import tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelDirectory:
    """A random three-layer Llama with grouped-query attention."""
    return tiny_model.make_model(tmp_path_factory.mktemp("tiny") / "llama", tiny_model.llama())


@pytest.fixture
def engine(tiny: ModelDirectory) -> TorchEngine:
    """A fresh engine with 64 blocks of 16 tokens."""
    return TorchEngine(tiny, tiny_model.options())
