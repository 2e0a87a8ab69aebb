"""Which waiting jobs may share one call of their handler, and one lease; and how many a worker can take now."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

#: Jobs that one call may take, at most.
MAX_BATCH = 1000


@dataclass
class Seats:
    """What free slots can take: each one job, or a batch of one type, which is filled before the next begins."""

    slots: int
    #: Jobs in a full batch, by type.
    sizes: Mapping[str, int]
    #: By type, how many more the batch can take that was begun last.
    places: dict[str, int] = field(default_factory=dict)
    #: The next job in the lane fits nowhere, and those behind it must not overtake it.
    blocked: bool = False

    def take(self, type: str) -> bool:
        """Seat a job beside others of its type, or in a free slot; False when there is no place for it."""
        if self.places.get(type, 0) > 0:
            self.places[type] -= 1
        elif self.slots > 0:
            self.slots -= 1
            self.places[type] = self.sizes.get(type, 1) - 1
        else:
            return False
        return True

    @property
    def waiting(self) -> bool:
        """Whether a batch that has begun would take more, and could get it."""
        return not self.blocked and any(self.places.values())

    @property
    def dry(self) -> bool:
        """Whether the lane had less than could run."""
        return not self.blocked and (self.slots > 0 or any(self.places.values()))


class Waiting(Protocol):
    """What must be known of a job to find it company."""

    @property
    def job_id(self) -> str: ...
    @property
    def type(self) -> str: ...
    @property
    def model_id(self) -> str | None: ...
    @property
    def min_memory_mb(self) -> int | None: ...
    @property
    def gpu_count(self) -> int: ...
    @property
    def cpu_fallback(self) -> int: ...
    @property
    def age_s(self) -> float: ...
    @property
    def rank(self) -> int: ...
    @property
    def alone(self) -> int: ...


Job = TypeVar("Job", bound=Waiting)


class Batch(NamedTuple, Generic[Job]):
    """Jobs that take one slot together; one by itself, where its handler takes them one by one."""

    jobs: Sequence[Job]
    #: Of those that need most the one that has waited longest: the lease is in its name, and ends with it.
    bearer: Job
    memory_mb: int
    #: Those that need as much as that; the others may find room where these do not.
    largest: Sequence[Job]
    #: How its jobs know each other; empty for a job whose type is not batched.
    name: str = ""


def gather(
    waiting: Iterable[Job], size_of: Callable[[str], int], memory_for: Callable[[str], int | None]
) -> list[Batch[Job]]:
    """Batches in order of rank, each by its first job.

    Whoever is left over because there are not as many slots keeps its rank, and comes first the next time: so a
    stream of jobs for one model does not keep out those for another.
    """
    begun: dict[tuple[object, ...], list[Job]] = {}
    found: list[list[Job]] = []
    for job in sorted(waiting, key=_rank):
        size = 1 if job.alone else size_of(job.type)
        company = begun.get(_kind(job, memory_for)) if size > 1 else None
        if company is None or len(company) >= size:
            company = []
            found.append(company)
            if size > 1:
                begun[_kind(job, memory_for)] = company
        company.append(job)
    return [_batch(jobs, memory_for, batched=size_of(jobs[0].type) > 0) for jobs in found]


def _rank(job: Waiting) -> int:
    return job.rank


def _kind(job: Waiting, memory_for: Callable[[str], int | None]) -> tuple[object, ...]:
    """What the jobs of a batch have in common: all that decides where they can run."""
    return job.type, job.model_id, job.gpu_count, job.cpu_fallback, need(job, memory_for) > 0


def need(job: Waiting, memory_for: Callable[[str], int | None]) -> int:
    """GPU memory in MB that a job asks for, or else its handler."""
    return (job.min_memory_mb if job.min_memory_mb is not None else memory_for(job.type)) or 0


def _batch(jobs: Sequence[Job], memory_for: Callable[[str], int | None], *, batched: bool) -> Batch[Job]:
    if len(jobs) == 1:
        return Batch(jobs, jobs[0], need(jobs[0], memory_for), jobs, jobs[0].job_id if batched else "")
    memory = max(need(job, memory_for) for job in jobs)
    largest = [job for job in jobs if need(job, memory_for) == memory]
    bearer = max(largest, key=lambda job: job.age_s)
    return Batch(jobs, bearer, memory, largest, bearer.job_id)
