"""`make chaos-leases`: leases on cards of the stand-in driver, under strangers and faults.

python -m tests.chaos.leases [--operations 20000] [--clients 64] [--orchestrators 1] [--seed N] [--json] [--folder F]
"""

import argparse
import json
import secrets
import signal
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

from tests.chaos import broken
from tests.chaos.leases.run import Plan, Report, run

#: Violations of each invariant that are shown.
SHOWN = 5


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # unwinds, so that no process is left behind
    seed = secrets.randbelow(10**6) if options.seed is None else options.seed
    plan = Plan(seed, options.operations, options.clients, options.orchestrators)
    with tempfile.TemporaryDirectory(prefix="orch-broken-") as folder:
        if options.sabotage:
            plan = replace(plan, build=broken.build(options.sabotage, Path(folder)))
        report = run(plan, lambda text: print(text, file=sys.stderr, flush=True), options.folder)
    if options.json:
        found = [str(violation) for violation in report.violations]
        print(json.dumps({"seed": seed, "figures": report.figures, "violations": found}, indent=1))
    else:
        _print(report)
    return 1 if report.violations else 0


def _print(report: Report) -> None:
    for name, value in report.figures.items():
        print(f"  {name:28s} {value}")
    for invariant, count in Counter(found.invariant for found in report.violations).most_common():
        print(f"VIOLATIONS of {invariant}: {count}")
        for violation in [found for found in report.violations if found.invariant == invariant][:SHOWN]:
            print(f"  {violation}")
    verdict = f"{len(report.violations)} violations" if report.violations else "every invariant held"
    print(f"seed {report.plan.seed}: {verdict}")


def _options() -> argparse.Namespace:
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
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
