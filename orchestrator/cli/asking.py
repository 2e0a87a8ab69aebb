"""Whether what may hurt is meant: a person is asked, a script must have said so."""

from __future__ import annotations

import sys

import click


def agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise click.UsageError("nobody is here to be asked whether this is meant; say --yes, or try --dry-run first")
    return click.confirm(question)
