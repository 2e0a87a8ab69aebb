"""What a run shows of itself: lines while it runs, then its figures and what it violated."""

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tests.chaos.checker import Violation
from tests.chaos.history import History

#: Violations of each invariant that are shown, and jobs whose whole history is.
SHOWN = 5


class Violated(Protocol):
    @property
    def invariant(self) -> str: ...


class Seeded(Protocol):
    @property
    def seed(self) -> int: ...


class Report(Protocol):
    @property
    def plan(self) -> Seeded: ...
    @property
    def figures(self) -> Mapping[str, Any]: ...
    @property
    def violations(self) -> Sequence[Violated]: ...


class JobsReport(Report, Protocol):
    """Of a run of jobs: has their histories, and exceptions in the logs that nobody expected."""

    @property
    def violations(self) -> Sequence[Violation]: ...
    @property
    def history(self) -> History: ...
    @property
    def traces(self) -> Mapping[str, tuple[int, str]]: ...


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def show_report(report: Report, *, as_json: bool) -> int:
    """The exit code: 1 when an invariant did not hold."""
    if as_json:
        print(json.dumps(_summary(report), indent=1))
    else:
        show_figures(report.figures)
        show_violations(report.violations)
        show_verdict(report.plan.seed, report.violations)
    return 1 if report.violations else 0


def show_jobs_report(report: JobsReport, *, as_json: bool) -> int:
    """The exit code: 1 when an invariant did not hold."""
    if as_json:
        jobs = concerned(report.violations)[:SHOWN]
        histories = {job_id: report.history.of(job_id).splitlines() for job_id in jobs}
        exceptions = {message: count for message, (count, _) in report.traces.items()}
        print(json.dumps(_summary(report) | {"histories": histories, "exceptions": exceptions}, indent=1))
    else:
        show_figures(report.figures)
        show_traces(report.traces)
        show_violations(report.violations)
        show_histories(report.violations, report.history)
        show_verdict(report.plan.seed, report.violations)
    return 1 if report.violations else 0


def _summary(report: Report) -> dict[str, Any]:
    found = [str(violation) for violation in report.violations]
    return {"seed": report.plan.seed, "figures": report.figures, "violations": found}


def show_figures(figures: Mapping[str, Any]) -> None:
    for name, value in figures.items():
        print(f"  {name:28s} {value}")


def show_traces(traces: Mapping[str, tuple[int, str]]) -> None:
    for message, (count, first) in traces.items():
        print(f"  unexpected exception, {count} times: {message}\n{first}\n")


def show_violations(violations: Sequence[Violated]) -> None:
    for invariant, count in Counter(found.invariant for found in violations).most_common():
        print(f"VIOLATIONS of {invariant}: {count}")
        for violation in [found for found in violations if found.invariant == invariant][:SHOWN]:
            print(f"  {violation}")


def show_histories(violations: Sequence[Violation], history: History) -> None:
    jobs = concerned(violations)
    for job_id in jobs[:SHOWN]:
        print(f"  history of {job_id}\n{history.of(job_id)}")
    if jobs:
        print(f"{len(jobs)} jobs concerned")


def concerned(violations: Sequence[Violation]) -> list[str]:
    """Jobs of which the violations tell."""
    return list(dict.fromkeys(violation.job_id for violation in violations if violation.job_id))


def show_verdict(seed: int, violations: Sequence[Violated]) -> None:
    print(f"seed {seed}: {f'{len(violations)} violations' if violations else 'every invariant held'}")
