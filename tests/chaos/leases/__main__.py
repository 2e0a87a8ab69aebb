"""`make chaos-leases`: leases on cards of the stand-in driver, under strangers and faults.

python -m tests.chaos.leases [--operations 20000] [--clients 64] [--orchestrators 1] [--seed N] [--json] [--folder F]
"""

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.chaos import broken
from tests.chaos.leases.run import Plan, Report, run
from tests.chaos.options import seed_of
from tests.chaos.showing import show_figures, show_verdict, show_violations, tell


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
        operations=options.operations,
        clients=options.clients,
        orchestrators=options.orchestrators,
    )


def _print(report: Report) -> None:
    show_figures(report.figures)
    show_violations(report.violations)
    show_verdict(report.plan.seed, report.violations)


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.leases", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--operations", type=int, default=20_000, help="leases, heartbeats and releases to ask for")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--orchestrators", type=int, default=1)
    parser.add_argument("--seed", type=int, help="draw the same as an earlier run")
    parser.add_argument("--break", dest="sabotage", choices=sorted(broken.BUILDS), help="run a broken build")
    parser.add_argument("--folder", type=Path, help="keep logs and the cards' files there")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
