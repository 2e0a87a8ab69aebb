"""What is counted of jobs: which event of the audit trail adds what to which total, and which ids may still come.

Everybody shows the totals of the cluster, so they are counted in one place (`store.tallies`), each event once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from orchestrator import jobs as job_rules
from orchestrator.jobs import ErrorKind, Status

SUBMITTED, CLAIMED = "job.submitted", str(job_rules.CLAIM.event)
DONE, RETRY, CANCELLED = (str(arrow.event) for arrow in (job_rules.FINISH, job_rules.RETRY, job_rules.STOP))
#: Events that end a job → how it ended.
ENDS = {str(arrow.event): arrow.target for arrow in job_rules.ARROWS if arrow.target in job_rules.TERMINAL}
#: Events that start a job over → the reason that is counted.
ANEW = {str(job_rules.REDRIVE.event): "redrive", str(job_rules.RERUN.event): "rerun"}
#: Events with which a handler came to its end, or was ended.
RAN = frozenset({*ENDS, RETRY}) - {str(job_rules.EXPIRE.event)}
EVENTS = frozenset({SUBMITTED, CLAIMED, RETRY, *ENDS, *ANEW})
#: What became of a job whose worker is lost.
OUTCOMES = {RETRY: "retried", str(job_rules.BURY.event): "buried", CANCELLED: "cancelled"}
#: Why jobs start again; errors that end a job at once are none of them.
_FINAL = {ErrorKind.PERMANENT, ErrorKind.BAD_RESULT, ErrorKind.DEADLINE}
REASONS = (*(kind for kind in ErrorKind if kind not in _FINAL), *ANEW.values())
STATUSES = tuple(status for status in Status if status in job_rules.TERMINAL)

#: Seconds up to which waits and runs are counted together.
BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0)
#: A bucket's label, as Prometheus writes it; the last has no bound.
BUCKETS = (*(str(bound) for bound in BOUNDS), "+Inf")
#: The label under which a histogram's seconds are added up.
SUM = "sum"

#: Types come from clients: the first so many have a label of their own.
MAX_TYPES = 200
OTHER = "other"

SUBMITS, FINISHES, RETRIES, RECLAIMS = (
    "jobs_submitted_total",
    "jobs_finished_total",
    "retries_total",
    "reclaims_total",
)
LATENCY, WAIT, RUN = "job_latency_seconds", "job_wait_seconds", "job_run_seconds"

#: A total's name, its job type and its other label ("" for none) → what is added to it, or what it is.
Totals = dict[tuple[str, str, str], float]


class Times(NamedTuple):
    """Of several events that fell into one bucket: which one, and their seconds together. None: it is not theirs."""

    bucket: int | None
    seconds: float | None


class Group(NamedTuple):
    """Events that add to the same totals."""

    event: str
    #: None: the job is gone, and nobody knows.
    type: str | None
    kind: str | None
    reclaimed: bool
    events: int
    first_id: int
    latency: Times
    wait: Times
    run: Times


def additions(groups: Sequence[Group], known: Collection[str]) -> Totals:
    """What these events add, where these types have labels of their own already."""
    named = _named(groups, known)
    totals: Totals = defaultdict(float)
    for group in groups:
        type = group.type if group.type in named else OTHER
        # A type is known from the first that is seen of it, whatever that is.
        totals[SUBMITS, type, ""] += group.events if group.event == SUBMITTED else 0
        if group.event in ENDS:
            totals[FINISHES, type, ENDS[group.event]] += group.events
        if group.event == RETRY:
            kind = group.kind or ErrorKind.TRANSIENT
            totals[RETRIES, "", kind if kind in REASONS else OTHER] += group.events
        elif group.event in ANEW:
            totals[RETRIES, "", ANEW[group.event]] += group.events
        if group.reclaimed and group.event in OUTCOMES:
            totals[RECLAIMS, "", OUTCOMES[group.event]] += group.events
        for name, times in ((LATENCY, group.latency), (WAIT, group.wait), (RUN, group.run)):
            if times.bucket is not None:
                totals[name, type, BUCKETS[times.bucket]] += group.events
                totals[name, type, SUM] += times.seconds or 0.0
    return dict(totals)


def _named(groups: Iterable[Group], known: Collection[str]) -> set[str]:
    """The types with labels of their own: those that have one, and then whoever came first."""
    named = set(known) - {OTHER}
    for group in sorted(groups, key=lambda group: group.first_id):
        if group.type is not None and len(named) < MAX_TYPES:
            named.add(group.type)
    return named


# ── ids that are missing ────────────────────────────────────────────────────────────────────────────────────────────

#: Seconds after which a missing id will not come any more: no transaction of ours is open for that long.
HOLE_S = 60.0
#: Ranges that are remembered; of more, the oldest are given up.
MAX_HOLES = 500


class Ids(NamedTuple):
    """All ids from the first to the last."""

    first: int
    last: int

    @property
    def many(self) -> int:
        return self.last - self.first + 1


class Hole(NamedTuple):
    """Ids that were given out, or skipped, and are not there; since when, in seconds of the database's clock."""

    first: int
    last: int
    since: float


def still_missing(
    holes: Iterable[Hole], position: int, late: Sequence[Ids], new: Sequence[Ids], now: float
) -> list[Hole]:
    """The holes after a look that found these: late ones inside of the holes, new ones behind the position."""
    left = [hole for hole in holes if now - hole.since < HOLE_S]
    for found in late:
        left = [part for hole in left for part in _without(hole, found)]
    ends = [position, *(ids.last for ids in new)]
    gaps = [Hole(end + 1, ids.first - 1, now) for end, ids in zip(ends, new, strict=False) if ids.first > end + 1]
    return [*left, *gaps][-MAX_HOLES:]


def _without(hole: Hole, found: Ids) -> list[Hole]:
    if found.last < hole.first or found.first > hole.last:
        return [hole]
    parts = [Hole(hole.first, found.first - 1, hole.since), Hole(found.last + 1, hole.last, hole.since)]
    return [part for part in parts if part.first <= part.last]
