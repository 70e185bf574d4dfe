"""What a turn costs beside the model, and how much of its prompt is found in caches.

    scripts/bench_turn                  bus and loop overhead of a turn, `sim` engine; idle CPU, memory, seconds to ready
    scripts/bench_turn --real           cached share of prompts, real model: `residency` beside `round_robin`, same load
    scripts/bench_turn [--real] --quick the same with fewer repetitions
    ... --json                          one JSON object on the last line

Every run starts a system of its own on loopback and ends it.

    overhead       = time of the turn at the client - (queue + load + prefill + decode) of its receipt
    reusable       = prompt tokens of a turn that lie in full blocks of what its session said before; none in a first turn
    cached share   = prompt tokens reported as cached (no more than reusable) / reusable; between turns a session waits a moment
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil
from rich.progress import track

from scripts.bench import Results, console, percentile, print_json, show
from shared.engine.convert import ensure_model
from shared.model_dir import models_home
from shared.settings import DEFAULT_MODEL, RoostSettings
from tests.e2e.client import Session
from tests.e2e.system import System

BLOCK_TOKENS = 16
SESSIONS, TURNS, WORKERS = 8, 5, 2
THINK_S_MAX = 1.0
# What every session of an agent begins with.
SYSTEM_PROMPT = (
    "You are a careful assistant of a small workshop that repairs bicycles. You answer in one or two short sentences. "
    "The workshop is open from nine to five on weekdays. Repairs are paid when the bicycle is taken home. "
) * 4
QUESTIONS = (
    "My front brake squeaks. What should I look at first?",
    "How often should I oil the chain?",
    "The rear tyre loses air over night. Is it the valve?",
    "Can I ride with a bent wheel for a week?",
    "What does a new saddle cost?",
)

WORK = ("true the wheel", "oil the chain", "change the tyre", "set the brakes", "fit a saddle", "mend a puncture")


def overhead(models: Path, turns: int, results: Results) -> None:
    """One client, one turn after the other, against simulated workers with the price of a small model."""
    with tempfile.TemporaryDirectory() as folder:
        with System(Path(folder), models, {"ROOST_WORKER_ENGINE": "sim"}) as system:
            began = time.monotonic()
            system.start()
            results.rows["ready_s"] = round(time.monotonic() - began, 2)
            session = Session(system.url, system=SYSTEM_PROMPT)
            rows: list[dict[str, float]] = []
            for number in track(range(turns + 5), "turns", console=console, transient=True):
                sent_at = time.perf_counter()
                answer = session.turn(QUESTIONS[number % len(QUESTIONS)], max_tokens=16, ignore_eos=True)
                total_s = time.perf_counter() - sent_at
                seconds = answer.done["receipt"]["seconds"]
                model_s = seconds["queue"] + seconds["load"] + seconds["prefill"] + seconds["decode"]
                rows.append({"total_ms": total_s * 1000, "overhead_ms": (total_s - model_s) * 1000})
                if number % 20 == 19:
                    session = Session(system.url, system=SYSTEM_PROMPT)
            rows = rows[5:]
            results.rows["turns"] = rows
            spent = [row["overhead_ms"] for row in rows]
            results.checks["turn_overhead_ms_p50"] = round(statistics.median(spent), 2)
            results.rows["turn_overhead_ms_p95"] = round(percentile(spent, 0.95), 2)
            idle(system, results)


def idle(system: System, results: Results, seconds: float = 10.0) -> None:
    """CPU of all processes together while nothing happens, and memory of each."""
    processes = {name: psutil.Process(process.pid) for name, process in system.processes.items()}
    processes["nats-server"] = psutil.Process(system.nats.pid)
    time.sleep(2.0)
    before = {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}
    time.sleep(seconds)
    used = {name: sum(process.cpu_times()[:2]) - before[name] for name, process in processes.items()}
    results.rows["idle_cpu_percent"] = round(100 * sum(used.values()) / seconds, 2)
    results.rows["idle_cpu_percent_by_process"] = {name: round(100 * s / seconds, 2) for name, s in used.items()}
    results.rows["memory_mb"] = {name: process.memory_info().rss // 2**20 for name, process in processes.items()}


def cached_share(models: Path, policy: str, sessions: int, results: Results, engine: str = "torch") -> None:
    """Sessions talk at once; their prompts share the system prompt. Two decode workers."""
    # The policy alone is to be seen, so nothing but the workers' own pools may serve a prefix, and no worker only prefills.
    settings = {
        "ROOST_ROUTER_POLICY": policy,
        "ROOST_WORKER_ENGINE": engine,
        "ROOST_WORKER_THREADS": "1",
        "ROOST_WORKER_POOL_BYTES": str(768 << 20),
    }
    with tempfile.TemporaryDirectory() as folder:
        with System(Path(folder), models, settings) as system:
            services = ("router", "loop", "decode", "gateway")
            system.start(services)
            system.add("decode", 1).start()
            system.wait_ready()
            with ThreadPoolExecutor(sessions) as pool:
                talks = list(pool.map(lambda number: talk(system.url, number, TURNS), range(sessions)))
    rows = [row for talked in talks for row in talked]
    rows.sort(key=lambda row: row["started_at"])
    cached, reusable = (sum(row[name] for row in rows) for name in ("counted", "reusable"))
    results.checks[f"cached_share_{policy}"] = round(cached / reusable, 4)
    results.rows[policy] = rows


def message(session: int, turn: int) -> str:
    """A question after something read: as after a tool's answer, most of a prompt belongs to one session alone."""
    draw = random.Random(session * 100 + turn)
    jobs = (f"Job {draw.randrange(1000)}: {draw.choice(WORK)}, {draw.randrange(5, 90)} minutes." for _ in range(10))
    return " ".join([*jobs, QUESTIONS[(session + turn) % len(QUESTIONS)]])


def talk(url: str, number: int, turns: int) -> list[dict[str, Any]]:
    session = Session(url, system=SYSTEM_PROMPT)
    rows: list[dict[str, Any]] = []
    known, draw = 0, random.Random(number)
    for turn in range(turns):
        # Without it the sessions of a round would come in the order of the last one, and each to its worker by chance.
        time.sleep(draw.uniform(0.0, THINK_S_MAX))
        started_at = time.time()
        answer = session.turn(message(number, turn), max_tokens=24)
        usage = answer.done["usage"]
        rows.append(
            {
                "session": number,
                "turn": turn,
                "started_at": started_at,
                "worker": answer.done["receipt"]["steps"][0]["worker_id"],
                "prompt": usage["prompt_tokens"],
                "cached": answer.cached_tokens,
                "counted": min(answer.cached_tokens, known // BLOCK_TOKENS * BLOCK_TOKENS),
                "reusable": known // BLOCK_TOKENS * BLOCK_TOKENS,
                "seconds": round(time.time() - started_at, 3),
            }
        )
        # The KV of an answer's last token is never computed.
        known = usage["prompt_tokens"] + usage["completion_tokens"] - 1
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", action="store_true", help="cached share with the real model")
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    arguments = parser.parse_args()
    home = RoostSettings().home_path
    ensure_model(DEFAULT_MODEL, home)
    results = Results()
    if arguments.real:
        for policy in ("residency", "round_robin"):
            # Fewer sessions rather than fewer turns: the first rounds, where nothing is resident yet, must not weigh more.
            sessions = 3 if arguments.quick else SESSIONS
            with console.status(f"{sessions} sessions, {WORKERS} decode workers, {policy}"):
                cached_share(models_home(home), policy, sessions, results)
    else:
        overhead(models_home(home), 30 if arguments.quick else 200, results)
    show(results, ("ready_s", "turn_overhead_ms_p95", "idle_cpu_percent", "memory_mb"))
    if arguments.json:
        print_json(results, "scripts/bench_turn")


if __name__ == "__main__":
    main()
