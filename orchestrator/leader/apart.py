"""Writes of duties that are about many things: a row that somebody holds costs the thing that needs it, no other."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from orchestrator.leader.term import Term
from orchestrator.store.batcher import WARY_S
from orchestrator.store.database import RowsHeld, Waiting

if TYPE_CHECKING:
    from sqlalchemy import Connection

log = logging.getLogger(__name__)

Item = TypeVar("Item")
T = TypeVar("T")
#: Runs a function in a transaction of the term.
Write = Callable[[Callable[["Connection"], Any]], Any]


class Apart:
    """One for each term. After a wait in vain no row is waited for, for a while: all other duties wait as well."""

    def __init__(self, term: Term) -> None:
        self._term = term
        self._wary_until = -math.inf

    def write(self, work: Callable[..., T]) -> T:
        """`work(conn)`; if somebody holds a row of it, `work(conn, unheld=True)`, which passes over what is held."""
        if not self._wary:
            try:
                return self._term.write(work)
            except RowsHeld as met:
                self._beware(met)
        return self._term.write(partial(work, unheld=True), Waiting.MOMENT)

    def each(self, items: Iterable[Item], work: Callable[[Item, Write], T]) -> list[T]:
        """`work(item, write)` for each of them, but for those of which somebody holds a row."""
        done = []
        for item in items:
            try:
                done.append(work(item, self._write))
            except RowsHeld as met:
                self._beware(met)
        return done

    def _write(self, work: Callable[[Connection], T]) -> T:
        return self._term.write(work, Waiting.MOMENT if self._wary else Waiting.ONCE)

    @property
    def _wary(self) -> bool:
        return time.monotonic() < self._wary_until

    def _beware(self, met: RowsHeld) -> None:
        if not self._wary:  # it is said once
            log.warning("somebody holds a row", extra={"error": str(met)})
        self._wary_until = time.monotonic() + WARY_S
