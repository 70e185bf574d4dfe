"""Which engine to run: with weights, or simulated."""

from __future__ import annotations

import time
from typing import Literal, assert_never

from shared.engine.grammar import GrammarCompiler
from shared.engine.options import EngineOptions
from shared.engine.protocol import Engine
from shared.engine.sim_engine import SimEngine, SimOptions
from shared.model_dir import ModelDirectory

EngineKind = Literal["torch", "sim"]


def create_engine(kind: EngineKind, model: ModelDirectory, options: EngineOptions) -> Engine:
    """An engine over a ready model directory. Takes seconds with `torch`: call it on the engine's own thread.

    Raises UnsupportedModel, PoolTooSmall, OSError on a directory that is no checkpoint.
    """
    match kind:
        case "torch":
            # Local, so that a process with a simulated engine never pays for torch.
            from shared.engine.torch_engine import TorchEngine

            return TorchEngine(model, options)
        case "sim":
            sim = SimOptions.of_model(model, options)
            grammars = GrammarCompiler(
                model.tokenizer_path, vocab_size=sim.vocab_size, eos_token_ids=model.eos_token_ids
            )
            return SimEngine(sim, grammars=grammars, sleep=_Pace(), clock=time.perf_counter)
        case _:
            assert_never(kind)


class _Pace:
    """Sleeps; what the system overslept is taken off the next time, so that steps take on average what they say."""

    def __init__(self) -> None:
        self._late_s = 0.0

    def __call__(self, seconds: float) -> None:
        began, wanted_s = time.monotonic(), seconds - self._late_s
        time.sleep(max(wanted_s, 0.0))
        self._late_s = time.monotonic() - began - wanted_s
