"""`make chaos-pools`: pools are changed at random while processes and nodes die; in every calm they must converge.

python -m tests.chaos.pools [--seed N] [--minutes 5] [--pools 20] [--nodes 3] [--break NAME] [--json] [--folder F]
"""

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.chaos import broken
from tests.chaos.options import chosen, seed_of
from tests.chaos.pools.actions import ACTIONS
from tests.chaos.pools.run import Plan, Report, run
from tests.chaos.showing import (
    show_figures,
    show_histories,
    show_traces,
    show_verdict,
    show_violations,
    tell,
)


def main() -> int:
    options = options_of(sys.argv[1:])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # unwinds, so that no process is left behind
    with broken.sabotaged(plan_of(options), options.sabotage) as plan:
        report = run(plan, tell, options.folder)
    if options.json:
        found = [str(violation) for violation in report.violations]
        print(json.dumps({"seed": plan.seed, "figures": report.figures, "violations": found}, indent=1))
    else:
        _print(report)
    return 1 if report.violations else 0


def plan_of(options: argparse.Namespace) -> Plan:
    return Plan(
        seed=seed_of(options.seed),
        minutes=options.minutes,
        pools=options.pools,
        nodes=options.nodes,
        gpus=options.gpus,
        only=chosen(options.only, ACTIONS),
    )


def _print(report: Report) -> None:
    show_figures(report.figures)
    show_traces(report.traces)
    show_violations(report.violations)
    show_histories(report.violations, report.history)
    show_verdict(report.plan.seed, report.violations)


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.pools", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, help="draw the same pools, jobs and actions as an earlier run")
    parser.add_argument("--minutes", type=float, default=5.0, help="how long it storms, calms included")
    parser.add_argument("--pools", type=int, default=20)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--gpus", default="sim:2x24576", help="the GPUs of each node")
    parser.add_argument("--only", metavar="ACTION,…", help=f"only these: {', '.join(one.name for one in ACTIONS)}")
    parser.add_argument("--break", dest="sabotage", choices=sorted(broken.BUILDS), help="run a broken build")
    parser.add_argument("--folder", type=Path, help="keep logs and the ledger there")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
