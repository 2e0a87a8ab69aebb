"""What a handler gets to know about its job, and the way it reports back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from worker import artifacts
from worker.results import Page, Results
from worker.spawn import CHUNK, Added, Stage

#: Seconds between two reports of progress; more would only fill the pipe.
PROGRESS_EVERY_S = 0.1
#: Seconds before the end of its time in which a handler may still leave by itself; less for the shortest jobs.
LAST_MOMENT_S = 0.5


@dataclass
class Context:
    """`device` is the UUID of the leased GPU (several: comma-separated), "cpu" for a CPU lease, None without one."""

    job_id: str
    type: str
    attempt: int
    agent: str
    model_id: str | None = None
    device: str | None = None
    trace_context: str | None = None
    #: Seconds from its start after which its process is killed; None: never.
    max_runtime_sec: float | None = None
    adapter: str | None = None
    variant: str | None = None
    #: Bytes of JSON that a result may have.
    result_limit: int = 1_048_576
    _report: Callable[[float, str], None] = field(default=lambda _fraction, _note: None, repr=False)
    _is_cancelled: Callable[[], bool] = field(default=lambda: False, repr=False)
    _owns: Callable[[], bool] = field(default=lambda: True, repr=False)
    _keep: Callable[[int, str], None] = field(default=lambda _number, _frame: None, repr=False)
    _fetch: Callable[[int, str | None], Page] = field(default=lambda _after, _name: Page([], False), repr=False)
    _staged: Stage | None = field(default=None, repr=False)
    _last_report: float = field(default=float("-inf"), repr=False)
    _began: float = field(default_factory=time.monotonic, repr=False)

    @property
    def jobs(self) -> tuple[Context, ...]:
        """Itself: a handler that takes jobs one by one has one."""
        return (self,)

    @property
    def cancelled(self) -> bool:
        """Whether somebody cancelled the job. Look often, clean up and raise Cancelled: soon nobody asks any more."""
        return self._is_cancelled()

    @property
    def out_of_time(self) -> bool:
        """Whether its `max_runtime_sec` is nearly over. Who raises OutOfTime then keeps its process, and its model."""
        limit = self.max_runtime_sec
        return limit is not None and time.monotonic() - self._began > limit - min(LAST_MOMENT_S, limit / 10)

    @contextmanager
    def artifact(self, path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
        """Write a file that appears whole, and only if this attempt still owns the job when it is written.

        Raises Superseded otherwise, and leaves what stands at `path` as it is.
        """
        with artifacts.writing(Path(path), self.job_id, self.attempt, self._owns) as file:
            yield file

    def spawn(
        self,
        type: str,
        payload: Mapping[str, Any] | None = None,
        *,
        depends_on: Sequence[Added] | Added = (),
        critical: bool = True,
        **options: Any,
    ) -> Added:
        """Add a task to the job's workflow (one is made, where there is none). It exists once this attempt succeeded.

        `depends_on` are tasks that were added before; `options` the fields of a job (pool_id, priority, …). An attempt
        that does not succeed adds nothing.
        """
        needs = [depends_on] if isinstance(depends_on, Added) else [*depends_on]
        return self._stage.spawn(type, payload, needs, options=options, optional=not critical)

    def map(
        self,
        type: str,
        items: Iterable[Any],
        *,
        chunk: int = CHUNK,
        then: str | tuple[str, Mapping[str, Any]] | None = None,
        payload: Mapping[str, Any] | None = None,
        critical: bool = True,
        **options: Any,
    ) -> Added:
        """Add a task for each `chunk` of items, and one that runs once when all of them have ended.

        A part's payload is `payload` with `index` and, of a range, `start`, `stop` and `step`, otherwise `items`.
        `then`, a type or a type and a payload, gets their results in order from `ctx.results`.
        """
        collects = (then, {}) if isinstance(then, str) else then
        return self._stage.map(type, items, chunk, collects, payload or {}, options=options, optional=not critical)

    @property
    def results(self) -> Results:
        """Of the tasks that it needed, or of the parts of the map that it collects: in order, or one by its name."""
        return Results(self._fetch)

    @property
    def added(self) -> int:
        """How many tasks it added so far."""
        return self._staged.count if self._staged else 0

    def flush(self) -> None:
        """Have all tasks kept that were added; done by itself when the handler returns."""
        if self._staged:
            self._staged.flush()

    @property
    def _stage(self) -> Stage:
        if self._staged is None:
            self._staged = Stage(self._keep, self.result_limit)
        return self._staged

    def progress(self, fraction: float, note: str = "") -> None:
        """Say how far the job is (0…1); shown in its record within a heartbeat."""
        now = time.monotonic()
        if now - self._last_report >= PROGRESS_EVERY_S:
            self._last_report = now
            self._report(min(max(float(fraction), 0.0), 1.0), str(note))


@dataclass
class BatchContext:
    """What a handler with `batch` gets: `jobs` are the contexts of its jobs, in the order of their payloads."""

    type: str
    model_id: str | None
    device: str | None
    jobs: tuple[Context, ...]
    adapter: str | None = None
    variant: str | None = None

    @property
    def cancelled(self) -> bool:
        """Whether nobody wants any of it. One that was cancelled alone may be left out: its result is not stored."""
        return all(job.cancelled for job in self.jobs)

    def progress(self, fraction: float, note: str = "") -> None:
        """Say how far all of them are (0…1)."""
        for job in self.jobs:
            job.progress(fraction, note)
