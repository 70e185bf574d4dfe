"""The engine with real weights: transformers for the layers, our pool and attention for K and V. On CPU."""

from __future__ import annotations

import time

from shared.engine.fused import FusedDecoder
from shared.engine.grammar import GrammarCompiler
from shared.engine.kv_pool import KvPool
from shared.engine.loader import DTYPES, load_model
from shared.engine.options import EngineOptions, engine_info
from shared.engine.paged_engine import PagedEngine
from shared.engine.runner import ModuleDecoder, Runner
from shared.model_dir import ModelDirectory


class TorchEngine(PagedEngine):
    """Implements protocol.Engine. Loads the weights and takes the pool's memory when made (seconds)."""

    def __init__(self, model: ModelDirectory, options: EngineOptions) -> None:
        info = engine_info(model, options)
        weights = load_model(model.path, dtype=options.kv_dtype, threads=options.threads)
        decoder = FusedDecoder(weights) if FusedDecoder.fits(weights) else ModuleDecoder(weights)
        layers, two, heads, tokens, dimension = info.body_shape
        pool = KvPool(
            blocks_total=info.blocks_total,
            shape=(layers, two, heads, tokens, dimension),
            dtype=DTYPES[options.kv_dtype],
        )
        assert pool.block_bytes == info.block_bytes, "one formula for the bytes of a block"
        grammars = GrammarCompiler(model.tokenizer_path, vocab_size=info.vocab_size, eos_token_ids=model.eos_token_ids)
        super().__init__(info, Runner(decoder, pool), clock=time.perf_counter, budget=options.budget, grammars=grammars)
