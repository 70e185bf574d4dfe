"""`python -m tests.sim --seed 7 --verbose` replays one seed; `--seeds 100..200` runs many and stops at the first that fails."""

from __future__ import annotations

import argparse
import time

from rich.progress import track

from tests.sim.auditor import checked


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seed", type=int, help="this one only")
    parser.add_argument("--seeds", default="0..20", help="from..to, the last one not included")
    parser.add_argument("--verbose", action="store_true", help="print what happens")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        began = time.perf_counter()
        print(checked(arguments.seed, verbose=arguments.verbose), f"{time.perf_counter() - began:.1f} s")
        return
    first, last = map(int, arguments.seeds.split(".."))
    sums: dict[str, int] = {}
    for seed in track(range(first, last), "seeds"):
        for name, count in checked(seed).items():
            sums[name] = sums.get(name, 0) + count
    print(sums)


if __name__ == "__main__":
    main()
