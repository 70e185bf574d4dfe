"""A model directory -> a transformers module that runs with our attention. Weights stay float32 unless asked otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from shared.engine.attention import IMPLEMENTATION, register

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def quiet_transformers() -> None:
    """No progress bars and no advice on stderr, where the service's log is. Errors are exceptions anyway."""
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def load_model(path: Path, *, dtype: str, threads: int | None) -> Any:
    """The causal language model in `path`, ready for inference. Sets torch's thread count for the whole process.

    Raises OSError when the directory is no checkpoint. Never goes to the network.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    register()
    quiet_transformers()
    model: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=DTYPES[dtype], attn_implementation=IMPLEMENTATION, local_files_only=True
    )
    return model.eval().requires_grad_(False)
