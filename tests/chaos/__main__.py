"""`make chaos`: a cluster of real processes under load and faults, then the check of every invariant.

python -m tests.chaos [--jobs 20000] [--faults 200] [--minutes M] [--seed N] [--json]   the storm
python -m tests.chaos --recovery [--kills 50]    from SIGKILL of a worker to the second start of its jobs
python -m tests.chaos --flushall [--jobs 5000]   what a FLUSHALL costs
python -m tests.chaos --break NAME               a build with a guard removed must be caught
"""

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.chaos import broken, flushall, recovery
from tests.chaos.faults import FAULTS
from tests.chaos.kinds import KINDS
from tests.chaos.options import chosen, seed_of
from tests.chaos.run import Plan, Report, run
from tests.chaos.showing import (
    SHOWN,
    concerned,
    show_figures,
    show_histories,
    show_traces,
    show_verdict,
    show_violations,
    tell,
)

#: With --minutes: faults and jobs for each of them.
FAULTS_PER_MINUTE, JOBS_PER_MINUTE = 20, 2000


def main() -> int:
    options = options_of(sys.argv[1:])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # unwinds, so that no process is left behind
    if options.recovery:
        return _show(recovery.measure(options.kills, tell), options)
    if options.flushall:
        return _show(flushall.measure(options.jobs or 5000, tell), options)
    with broken.sabotaged(plan_of(options), options.sabotage) as plan:
        report = run(plan, tell, options.folder)
    return _report(report, options)


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


def _report(report: Report, options: argparse.Namespace) -> int:
    if options.json:
        print(json.dumps(_as_json(report), indent=1))
    else:
        _print(report)
    return 1 if report.violations else 0


def _print(report: Report) -> None:
    show_figures(report.figures)
    show_traces(report.traces)
    show_violations(report.violations)
    show_histories(report.violations, report.history)
    if report.violations:
        print(f"{len(concerned(report.violations))} jobs concerned")
    show_verdict(report.plan.seed, report.violations)


def _as_json(report: Report) -> dict[str, Any]:
    return {
        "seed": report.plan.seed,
        "figures": report.figures,
        "violations": [str(violation) for violation in report.violations],
        "histories": {
            job_id: report.history.of(job_id).splitlines() for job_id in concerned(report.violations)[:SHOWN]
        },
        "exceptions": {message: count for message, (count, _) in report.traces.items()},
    }


def _show(figures: dict[str, Any], options: argparse.Namespace) -> int:
    if options.json:
        print(json.dumps(figures, indent=1))
    else:
        show_figures(figures)
    return 0 if figures["ok"] else 1


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, help="jobs to submit (20000; with --flushall 5000)")
    parser.add_argument("--faults", type=int, default=200, help="faults to inject")
    parser.add_argument("--minutes", type=float, help="about this long instead: minutes or hours")
    parser.add_argument("--seed", type=int, help="draw the same jobs and faults as an earlier run")
    parser.add_argument("--only", metavar="FAULT,…", help=f"only these: {', '.join(fault.name for fault in FAULTS)}")
    parser.add_argument("--kinds", metavar="KIND,…", help=f"only these: {', '.join(kind.name for kind in KINDS)}")
    parser.add_argument("--defaults", action="store_true", help="default times instead of short ones; takes longer")
    parser.add_argument("--break", dest="sabotage", choices=sorted(broken.BUILDS), help="run a broken build")
    parser.add_argument("--folder", type=Path, help="keep logs and the ledger there")
    parser.add_argument("--recovery", action="store_true", help="measure the time from SIGKILL to the second start")
    parser.add_argument("--kills", type=int, default=50, help="kills for --recovery")
    parser.add_argument("--flushall", action="store_true", help="measure the delay of a FLUSHALL")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
