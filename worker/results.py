"""The results of what a task needed, fetched from the supervisor a page at a time: nobody holds all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple


class Result(NamedTuple):
    """What a task ended with; `value` is None where there is none: it was skipped, or failed and was optional."""

    position: int
    job_id: str
    name: str | None
    status: str
    value: Any


class Page(NamedTuple):
    results: list[Result]
    more: bool


@dataclass(frozen=True)
class Results:
    """In the order of `depends_on`, or of a map's parts. May be gone through as often as wanted."""

    #: What follows a position, all or that of one name.
    fetch: Callable[[int, str | None], Page]

    def __iter__(self) -> Iterator[Any]:
        """The values."""
        return (one.value for one in self.details())

    def details(self) -> Iterator[Result]:
        """The same with names and how each of them ended."""
        after, more = -1, True
        while more:
            page, more = self.fetch(after, None)
            yield from page
            after = page[-1].position if page else after

    def __getitem__(self, name: str) -> Any:
        """The value of the task with this name. Raises KeyError for one that is not needed."""
        page, _ = self.fetch(-1, name)
        if not page:
            raise KeyError(name)
        return page[0].value
