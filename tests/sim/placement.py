"""`make sim-placement`: how much of a production cluster each policy can use, beside what was published for it.

python -m tests.sim.placement [--seeds 10] [--processes 2] [--data ../shared/data]
"""

import argparse
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from orchestrator.placement import Ask, Policy
from tests.sim import trace
from tests.sim.experiment import Decide, Outcome, at_random, by_policy, knowing, run

#: By what the table calls it: how to decide, given the tasks and the seed, and what the paper says.
ROWS: dict[str, tuple[Callable[[list[Ask], int], Decide], str]] = {
    "random": (lambda _, seed: at_random(seed), "87.5"),
    "spread": (lambda *_: by_policy(Policy.SPREAD), "-"),
    "best fit": (lambda *_: by_policy(Policy.BEST_FIT), "93.1"),
    "fragmentation, the default": (lambda *_: by_policy(Policy.FRAGMENTATION), "95.4"),
    "fragmentation, knowing all asks": (lambda tasks, _: knowing(tasks), "-"),
}


def main() -> None:
    options = _options()
    if reason := trace.absent(options.data):
        sys.exit(f"sim-placement replays a production trace, and there is none: {reason}.")
    outcomes: dict[str, list[Outcome]] = defaultdict(list)
    with ProcessPoolExecutor(options.processes) as pool:
        runs = {pool.submit(replay, options.data, name, seed): name for seed in range(options.seeds) for name in ROWS}
        for done, future in enumerate(as_completed(runs), start=1):
            outcomes[runs[future]].append(future.result())
            _show(f"run {done} of {len(runs)} …")
    _show("")
    _report(outcomes, options)


def replay(folder: Path, name: str, seed: int) -> Outcome:
    tasks = trace.tasks(folder)
    return run(trace.machines(folder), tasks, ROWS[name][0](tasks, seed), seed)


def _report(outcomes: dict[str, list[Outcome]], options: argparse.Namespace) -> None:
    gpus, seeds = sum(machine.gpus for machine in trace.machines(options.data)), options.seeds
    print(f"GPU capacity in use after 130 % of it were asked for; {gpus} GPUs, mean ± deviation of {seeds} seeds")
    print(f"{'policy':<32} {'allocated %':>14} {'published':>10} {'µs a decision':>14}")
    for name, (_, published) in ROWS.items():
        found = [outcome.allocated_percent for outcome in outcomes[name]]
        spread = statistics.stdev(found) if len(found) > 1 else 0.0
        each = sum(one.seconds for one in outcomes[name]) / sum(one.decisions for one in outcomes[name])
        figure = f"{statistics.mean(found):.2f} ± {spread:.2f}"
        print(f"{name:<32} {figure:>14} {published:>10} {each * 1e6:>14.0f}")


def _show(progress: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{progress}", end="", file=sys.stderr, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.placement", description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--data", type=Path, default=trace.FOLDER)
    return parser.parse_args()


if __name__ == "__main__":
    main()
