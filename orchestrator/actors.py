"""Who acts: the name that stands beside what the audit trail tells.

The edges say it, once: the API for each request, a command for what it does itself, the leader for its term. Whatever
is written inside carries that name (`store.audit.record`), so nobody hands it on. A worker's own arrows have no actor:
their rows name the worker.
"""

from __future__ import annotations

import getpass
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_acting: ContextVar[str | None] = ContextVar("acting", default=None)

#: Characters of a name that somebody else chose.
MAX_NAME = 128


def current() -> str | None:
    """Who acts here and now; None for workers, and for threads that act for many."""
    return _acting.get()


@contextmanager
def acting(name: str) -> Iterator[None]:
    """Everything inside is done by `name`; threads know nothing of it unless they run in a copy of the context."""
    token = _acting.set(name)
    try:
        yield
    finally:
        _acting.reset(token)


def of_request(address: str | None) -> str:
    """Nobody proves who they are yet: what is known of a caller is where it called from."""
    return f"anonymous@{address or 'unknown'}"


def of_user() -> str:
    """Whoever runs a command of ours on this machine."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        name = str(os.getuid())
    return f"cli:{name[:MAX_NAME]}"


def of_leader(holder: str) -> str:
    return f"leader:{holder}"
