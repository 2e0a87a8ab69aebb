"""What the commands of `make chaos` have in common in their options."""

import secrets
from collections.abc import Sequence
from typing import Protocol, TypeVar


class Named(Protocol):
    @property
    def name(self) -> str: ...


AnyNamed = TypeVar("AnyNamed", bound=Named)


def seed_of(given: int | None) -> int:
    return secrets.randbelow(10**6) if given is None else given


def chosen(names: str | None, known: Sequence[AnyNamed]) -> tuple[AnyNamed, ...]:
    """Those that an option `A,B` names; all without it. A name that nothing has is a mistake, not a quiet run."""
    wanted = names.split(",") if names else [one.name for one in known]
    if strange := {*wanted} - {one.name for one in known}:
        raise SystemExit(f"unknown: {', '.join(sorted(strange))}; known: {', '.join(one.name for one in known)}")
    return tuple(one for one in known if one.name in wanted)
