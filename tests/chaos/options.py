"""What the commands of `make chaos` have in common: their options, and how a run follows them."""

import argparse
import secrets
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from tests.chaos import broken
from tests.chaos.broken import Plan
from tests.chaos.showing import tell

Report = TypeVar("Report")


class Named(Protocol):
    @property
    def name(self) -> str: ...


AnyNamed = TypeVar("AnyNamed", bound=Named)


def parser_of(program: str, text: str | None) -> argparse.ArgumentParser:
    """With what all of them can be told; each adds its own."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {program}", description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, help="draw the same as an earlier run")
    parser.add_argument("--break", dest="sabotage", choices=sorted(broken.BUILDS), help="run a broken build")
    parser.add_argument("--folder", type=Path, help="keep logs and other files of the run there")
    parser.add_argument("--json", action="store_true")
    return parser


def unwind_on_sigterm() -> None:
    """Like a Ctrl-C, so that no process is left behind."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def performed(
    run: Callable[[Plan, Callable[[str], None], Path | None], Report], plan: Plan, options: argparse.Namespace
) -> Report:
    """The run of that plan, with the build and the folder that the options name."""
    with broken.sabotaged(plan, options.sabotage) as sabotaged:
        return run(sabotaged, tell, options.folder)


def seed_of(given: int | None) -> int:
    return secrets.randbelow(10**6) if given is None else given


def chosen(names: str | None, known: Sequence[AnyNamed]) -> tuple[AnyNamed, ...]:
    """Those that an option `A,B` names; all without it. A name that nothing has is a mistake, not a quiet run."""
    wanted = names.split(",") if names else [one.name for one in known]
    if strange := {*wanted} - {one.name for one in known}:
        raise SystemExit(f"unknown: {', '.join(sorted(strange))}; known: {', '.join(one.name for one in known)}")
    return tuple(one for one in known if one.name in wanted)
