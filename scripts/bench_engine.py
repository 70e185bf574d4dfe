"""How fast the engine is beside plain transformers in the same run, and whether it says the same tokens.

    scripts/bench_engine            prefill, decode of 1 to 16 streams, time to first token, streams beside a long prompt
    scripts/bench_engine --exact    greedy tokens of ragged batches beside those of plain transformers, one prompt alone
    ... --quick                     the same with fewer repetitions
    ... --json                      one JSON object on the last line

Both compute in float32 with as many threads, on the default model, and take turns: a ratio is the median of those of all
rounds, so that what else the machine does meanwhile meets both. Only steps of the stated kind are counted: for decode those
after the prompts, for prefill those up to the first token.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from rich.progress import track
from transformers import AutoModelForCausalLM, DynamicCache

from proto.chat import Sampling
from scripts.bench import Results, console, percentile, print_json, show
from shared.engine.batch import StepBudget
from shared.engine.convert import ensure_model
from shared.engine.options import EngineOptions
from shared.engine.protocol import EngineEvent, EngineRequest, TokensEmitted
from shared.engine.torch_engine import TorchEngine
from shared.limits import MIB
from shared.model_dir import ModelDirectory
from shared.settings import DEFAULT_MODEL, RoostSettings

STREAMS = (1, 4, 8, 16)
PROMPTS = (512, 2048)
DECODE_PROMPT_TOKENS = 64
POOL_BYTES = 1536 * MIB
# Where the two best tokens of the reference are as close as this, either is right: sums in another order differ by more.
TIE_LOGITS = 1e-3


class Ours:
    """The engine, driven step by step."""

    def __init__(self, model: ModelDirectory, budget: StepBudget) -> None:
        self.engine = TorchEngine(model, EngineOptions(pool_bytes=POOL_BYTES, budget=budget))
        self._count = 0

    def add(self, tokens: Sequence[int], generate: int, *, shared: bool = False) -> str:
        """Start a request; one that is not `shared` finds nothing in the pool."""
        self._count += 1
        name = f"r{self._count}"
        namespace = b"shared" if shared else name.encode()
        sampling = Sampling(max_tokens=generate, ignore_eos=True)
        self.engine.claim(EngineRequest(name, namespace.ljust(32, b"-"), tuple(tokens), sampling))
        self.engine.start(name)
        return name

    def step(self) -> tuple[list[EngineEvent], float]:
        """One step and its seconds."""
        began = time.perf_counter()
        events = self.engine.step()
        return events, time.perf_counter() - began

    def finish(self) -> dict[str, list[int]]:
        """Step to the end; the tokens of each request."""
        said: dict[str, list[int]] = {}
        while self.engine.has_work:
            for event in self.engine.step():
                if isinstance(event, TokensEmitted):
                    said.setdefault(event.request_id, []).extend(event.token_ids)
        return said

    def prefill_s(self, tokens: Sequence[int]) -> float:
        """Seconds to the first token, nothing resident."""
        began = time.perf_counter()
        self.add(tokens, 1)
        self.finish()
        return time.perf_counter() - began

    def decode_tps(self, streams: int, steps: int) -> float:
        """Tokens a second of all streams together."""
        for number in range(streams):
            self.add(prompt_of(DECODE_PROMPT_TOKENS, number), steps + 1)
        spent: list[float] = []
        while self.engine.has_work:
            _, seconds = self.step()
            prompt_tokens, decoding, *_ = self.engine.stats().recent_steps[-1]
            if (prompt_tokens, decoding) == (0, streams):
                spent.append(seconds)
        return streams * len(spent) / sum(spent)


class Plain:
    """The same model by transformers alone."""

    def __init__(self, model: ModelDirectory) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32).eval()

    def _forward(self, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        logits: torch.Tensor = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        return logits

    @torch.inference_mode()
    def prefill_s(self, tokens: Sequence[int]) -> float:
        """Seconds to the first token."""
        began = time.perf_counter()
        self._forward(torch.tensor([list(tokens)]), DynamicCache(config=self.model.config)).argmax(-1)
        return time.perf_counter() - began

    @torch.inference_mode()
    def decode_tps(self, streams: int, steps: int) -> float:
        """Tokens a second of one batch of prompts of equal length, which needs no padding."""
        cache = DynamicCache(config=self.model.config)
        prompts = [list(prompt_of(DECODE_PROMPT_TOKENS, number)) for number in range(streams)]
        token = self._forward(torch.tensor(prompts), cache).argmax(-1, keepdim=True)
        began = time.perf_counter()
        for _ in range(steps):
            token = self._forward(token, cache).argmax(-1, keepdim=True)
        return streams * steps / (time.perf_counter() - began)

    @torch.inference_mode()
    def greedy(self, tokens: Sequence[int], count: int) -> list[tuple[int, float]]:
        """Tokens, each with how far its logit was above the next best one."""
        cache = DynamicCache(config=self.model.config)
        ids, said = torch.tensor([list(tokens)]), []
        for _ in range(count):
            best = self._forward(ids, cache)[0].topk(2)
            said.append((int(best.indices[0]), float(best.values[0] - best.values[1])))
            ids = best.indices[:1][None, :]
        return said


def prompt_of(count: int, salt: int) -> list[int]:
    """Token ids without meaning; the price of a token does not depend on which it is."""
    draw = random.Random(salt)
    return [draw.randrange(100, 40_000) for _ in range(count)]


def beside(name: str, ours: Sequence[float], plain: Sequence[float], results: Results) -> float:
    """Note tokens a second of both, by round, and answer the median ratio."""
    ratio = statistics.median(mine / theirs for mine, theirs in zip(ours, plain, strict=True))
    results.rows[name] = {
        "roost_tps": round(statistics.median(ours), 1),
        "transformers_tps": round(statistics.median(plain), 1),
        "ratio": round(ratio, 3),
        "rounds": [[round(mine, 1), round(theirs, 1)] for mine, theirs in zip(ours, plain, strict=True)],
    }
    return round(ratio, 3)


def speed(ours: Ours, plain: Plain, rounds: int, quick: bool, results: Results) -> None:
    """Prefill and decode."""
    prompts, streams = (PROMPTS[:1], (1, 8)) if quick else (PROMPTS, STREAMS)
    steps = 24 if quick else 48
    for count in prompts:
        pairs = []
        for number in track(range(rounds + 1), f"prefill {count}", console=console, transient=True):
            tokens = prompt_of(count, 1000 + number)
            pairs.append((count / ours.prefill_s(tokens), count / plain.prefill_s(tokens)))
        ratio = beside(f"prefill_{count}", *zip(*pairs[1:], strict=True), results)  # the first round warms both up
        results.checks["prefill_vs_transformers"] = min(ratio, results.checks.get("prefill_vs_transformers") or ratio)
    for count in streams:
        pairs = []
        for _ in track(range(rounds), f"decode {count}", console=console, transient=True):
            pairs.append((ours.decode_tps(count, steps), plain.decode_tps(count, steps)))
        ratio = beside(f"decode_{count}", *zip(*pairs, strict=True), results)
        if count in (1, 8):
            results.checks[f"decode{count}_vs_transformers"] = ratio


def first_token(ours: Ours, repeats: int, results: Results) -> None:
    """2,048 tokens resident and 16 new ones."""
    prefix = prompt_of(2048, 7)
    ours.add(prefix, 1, shared=True)
    ours.finish()
    spent = []
    for number in range(repeats):
        began = time.perf_counter()
        ours.add([*prefix, *prompt_of(16, 100 + number)], 1, shared=True)
        ours.finish()
        spent.append(time.perf_counter() - began)
    results.rows["ttft_resident_2048_s"] = [round(seconds, 4) for seconds in spent]
    results.checks["ttft_resident_2048_s"] = round(statistics.median(spent), 4)


def beside_a_prompt(ours: Ours, prompt_tokens: int, results: Results) -> None:
    """Four streams; then a long prompt arrives. Gaps between a stream's tokens before and while it is computed."""
    names = {ours.add(prompt_of(DECODE_PROMPT_TOKENS, 50 + number), 900) for number in range(4)}
    gaps: dict[str, list[float]] = {"before": [], "during": []}
    last: dict[str, float] = {}
    long = ""
    while True:
        events, _ = ours.step()
        now = time.perf_counter()
        said = [event.request_id for event in events if isinstance(event, TokensEmitted)]
        for name in names.intersection(said):
            if name in last:
                gaps["during" if long else "before"].append(now - last[name])
            last[name] = now
        if long and long in said:
            break
        if not long and len(gaps["before"]) >= 4 * 60:
            long = ours.add(prompt_of(prompt_tokens, 99), 1)
    for name in names:
        ours.engine.cancel(name)
    p99 = {when: percentile(values, 0.99) for when, values in gaps.items()}
    results.rows["tpot_p99_s"] = {when: round(seconds, 4) for when, seconds in p99.items()}
    results.checks["tpot_p99_under_prefill_ratio"] = round(p99["during"] / p99["before"], 3)


def exact(model: ModelDirectory, plain: Plain, quick: bool, results: Results) -> None:
    """Batches of ragged prompts that share prefixes, in chunks of several sizes, cold and with blocks resident."""
    lengths = (1, 15, 16, 17, 100) if quick else (1, 15, 16, 17, 33, 100, 257, 700)
    count = 24 if quick else 48
    base = prompt_of(max(lengths), 3)
    prompts = [base[:length] for length in lengths] + [prompt_of(length, 200 + length) for length in lengths]
    right = [plain.greedy(prompt, count) for prompt in track(prompts, "plain", console=console, transient=True)]
    mismatches = ties = compared = 0
    for step_tokens in (64,) if quick else (16, 100, 512):
        ours = Ours(model, StepBudget(alone_tokens=step_tokens, shared_tokens=min(64, step_tokens)))
        for _ in ("cold", "resident"):
            names = [ours.add(prompt, count, shared=True) for prompt in prompts]
            said = ours.finish()
            for name, reference in zip(names, right, strict=True):
                compared += 1
                margin = first_difference(said[name], reference)
                ties += margin is not None and margin < TIE_LOGITS
                mismatches += margin is not None and margin >= TIE_LOGITS
    results.checks["exact_mismatches"] = mismatches
    results.rows["exact"] = {"compared": compared, "tokens_each": count, "ties": ties}


def first_difference(said: Sequence[int], reference: Sequence[tuple[int, float]]) -> float | None:
    """How sure the reference was of the first token that differs; None if none does."""
    assert len(said) == len(reference)
    return next((margin for mine, (token, margin) in zip(said, reference, strict=True) if mine != token), None)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exact", action="store_true", help="compare tokens instead of seconds")
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    arguments = parser.parse_args()
    results = Results()
    with console.status("loading the model twice"):
        model = ensure_model(DEFAULT_MODEL, RoostSettings().home_path)
        plain = Plain(model)
    if arguments.exact:
        exact(model, plain, arguments.quick, results)
    else:
        ours = Ours(model, StepBudget())
        speed(ours, plain, 3 if arguments.quick else 5, arguments.quick, results)
        first_token(ours, 3 if arguments.quick else 7, results)
        beside_a_prompt(ours, 1_000 if arguments.quick else 6_000, results)
    results.rows["threads"] = torch.get_num_threads()
    show(results, [name for name in results.rows if name.startswith(("prefill", "decode", "exact"))])
    if arguments.json:
        print_json(results, "scripts/bench_engine")


if __name__ == "__main__":
    main()
