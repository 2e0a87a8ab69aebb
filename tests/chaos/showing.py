"""What a run shows of itself: lines while it runs, then its figures and what it violated."""

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


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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
    for job_id in concerned(violations)[:SHOWN]:
        print(f"  history of {job_id}\n{history.of(job_id)}")


def concerned(violations: Sequence[Violation]) -> list[str]:
    """Jobs of which the violations tell."""
    return list(dict.fromkeys(violation.job_id for violation in violations if violation.job_id))


def show_verdict(seed: int, violations: Sequence[Violated]) -> None:
    print(f"seed {seed}: {f'{len(violations)} violations' if violations else 'every invariant held'}")
