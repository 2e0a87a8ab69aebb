"""Which caps limit a job."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from orchestrator.jobs import NewJob
from orchestrator.jsontext import listed, names_in
from orchestrator.policies import Book, keys_of

#: Of those who do not know the policies.
NO_BOOK = Book()


class Keyed(Protocol):
    """A job, and what it shares with others; `concurrency_keys` is JSON."""

    @property
    def job_id(self) -> str: ...
    @property
    def type(self) -> str: ...
    @property
    def agent(self) -> str: ...
    @property
    def model_id(self) -> str | None: ...
    @property
    def concurrency_keys(self) -> str | None: ...


def caps_of(book: Book, lane: str, job: Keyed) -> dict[str, int]:
    """The caps that limit a job. A lane that is closed as a whole (`Book.closed`) is not among them.

    Own keys that cannot be read are none here, where jobs are looked at together; its claim refuses such a job.
    """
    return _of(book, lane, job, listed(job.concurrency_keys)) if book.limits else {}


def caps_to_claim(book: Book, lane: str, job: Keyed) -> dict[str, int]:
    """The same, for the one that is to be claimed. Raises ValueError when its keys cannot be read."""
    return _of(book, lane, job, _own_keys(job)) if book.limits else {}


def _own_keys(job: Keyed) -> list[str]:
    try:
        return names_in(job.concurrency_keys)
    except ValueError as wrong:
        raise ValueError(f"concurrency_keys cannot be read: {wrong}") from None


def _of(book: Book, lane: str, job: Keyed, own: Iterable[str]) -> dict[str, int]:
    return _single(book, keys_of(lane, job.agent, job.type, job.model_id, own))


def caps_of_new(book: Book, job: NewJob) -> dict[str, int]:
    spec = job.spec
    return _single(book, keys_of(spec.pool_id, spec.agent, spec.type, spec.model_id, spec.concurrency_keys))


def _single(book: Book, keys: Iterable[str]) -> dict[str, int]:
    return {key: most for key, most in book.capped(keys).items() if most or not key.startswith(("global", "pool:"))}
