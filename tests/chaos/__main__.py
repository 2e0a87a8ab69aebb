"""`make chaos`: a cluster of real processes under load and faults, then the check of every invariant.

python -m tests.chaos [--jobs 20000] [--faults 200] [--minutes M] [--seed N] [--json]   the storm
python -m tests.chaos --recovery [--kills 50]    from SIGKILL of a worker to the second start of its jobs
python -m tests.chaos --flushall [--jobs 5000]   what a FLUSHALL costs
python -m tests.chaos --break NAME               a build with a guard removed must be caught
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from tests.chaos import flushall, recovery
from tests.chaos.faults import FAULTS
from tests.chaos.kinds import KINDS
from tests.chaos.options import chosen, parser_of, performed, seed_of, unwind_on_sigterm
from tests.chaos.run import Plan, run
from tests.chaos.showing import show_figures, show_jobs_report, tell

#: With --minutes: faults and jobs for each of them.
FAULTS_PER_MINUTE, JOBS_PER_MINUTE = 20, 2000


def main() -> int:
    options = options_of(sys.argv[1:])
    unwind_on_sigterm()
    if options.recovery:
        return _show(recovery.measure(options.kills, tell), options)
    if options.flushall:
        return _show(flushall.measure(options.jobs or 5000, tell), options)
    return show_jobs_report(performed(run, plan_of(options), options), as_json=options.json)


def plan_of(options: argparse.Namespace) -> Plan:
    if options.minutes:
        options.faults = round(options.minutes * FAULTS_PER_MINUTE)
        options.jobs = round(options.minutes * JOBS_PER_MINUTE)
    times: dict[str, Any] = {"times": {}} if options.defaults else {}
    return Plan(
        seed=seed_of(options.seed),
        jobs=options.jobs or 20_000,
        faults=options.faults,
        only=chosen(options.only, FAULTS),
        kinds=chosen(options.kinds, KINDS),
        **times,
    )


def _show(figures: dict[str, Any], options: argparse.Namespace) -> int:
    if options.json:
        print(json.dumps(figures, indent=1))
    else:
        show_figures(figures)
    return 0 if figures["ok"] else 1


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("tests.chaos", __doc__)
    parser.add_argument("--jobs", type=int, help="jobs to submit (20000; with --flushall 5000)")
    parser.add_argument("--faults", type=int, default=200, help="faults to inject")
    parser.add_argument("--minutes", type=float, help="about this long instead: minutes or hours")
    parser.add_argument("--only", metavar="FAULT,…", help=f"only these: {', '.join(fault.name for fault in FAULTS)}")
    parser.add_argument("--kinds", metavar="KIND,…", help=f"only these: {', '.join(kind.name for kind in KINDS)}")
    parser.add_argument("--defaults", action="store_true", help="default times instead of short ones; takes longer")
    parser.add_argument("--recovery", action="store_true", help="measure the time from SIGKILL to the second start")
    parser.add_argument("--kills", type=int, default=50, help="kills for --recovery")
    parser.add_argument("--flushall", action="store_true", help="measure the delay of a FLUSHALL")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
