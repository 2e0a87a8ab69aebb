"""What a job is: the body a client submits, the states it passes, and the arrows between them.

    pending ──claim──▶ claimed ──start──▶ running ──▶ done | skipped | failed | cancelled | dead_letter
     ▲  │ ▲               │                  │                   │         │            │
     │  │ └────── retry, hand_back ──────────┘                   │         │            │
     │  └─────── cancel ▶ cancelled, expire ▶ failed             │         │            │
     └─────────────────────── redrive (an operator) ─────────────┴─────────┴────────────┘
     ▲                        a task of a workflow may also be run again, from every end

Nothing here touches a server. `store.moves.move` takes every arrow from this table, so this page is the only place
that knows which state may follow which. A waiting job may also be deferred: it stays pending, until later.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from orchestrator.backoff import doubled
from orchestrator.errors import InvalidInput, PayloadTooLarge
from orchestrator.identity import fresh_id
from orchestrator.jsontext import canonical_json
from orchestrator.names import OWN_KINDS, Key, NewJobId, NewName, TypeName
from orchestrator.ranking import MAX_PRIORITY, PRIORITY_NAMES
from orchestrator.setting_values import RetryRule
from orchestrator.settings import Settings
from orchestrator.wording import in_our_words

DEFAULT_LANE = "default"


class Status(StrEnum):
    PENDING = "pending"
    CLAIMED = "claimed"
    RUNNING = "running"
    DONE = "done"
    SKIPPED = "skipped"
    FAILED = "failed"
    CANCELLED = "cancelled"
    DEAD_LETTER = "dead_letter"


class Queued(StrEnum):
    """Where a pending job waits."""

    DELAYED = "delayed"
    READY = "ready"
    ANNOUNCED = "announced"
    #: Until what its row names lets it go (`store.blocked`).
    BLOCKED = "blocked"


@dataclass(frozen=True)
class Ready:
    """A job that is due, as it is announced in its lane."""

    job_id: str
    type: str
    trace_context: str | None
    #: It goes before others for its deadline.
    urgent: bool = False


TERMINAL = frozenset({Status.DONE, Status.SKIPPED, Status.FAILED, Status.CANCELLED, Status.DEAD_LETTER})
OWNED = frozenset({Status.CLAIMED, Status.RUNNING})
#: Where those wait that a worker could take.
DUE = (Queued.READY, Queued.ANNOUNCED)


@dataclass(frozen=True)
class Arrow:
    """One allowed transition; `event` names its audit row. Only deferring has none: it changes no status."""

    event: str | None
    source: frozenset[Status]
    target: Status


#: A short job's start and end often reach the database in one commit; then it goes from claimed to its end
#: directly. That is why every ending leaves from both owned states.
CLAIM = Arrow("job.claimed", frozenset({Status.PENDING}), Status.CLAIMED)
START = Arrow("job.running", frozenset({Status.CLAIMED}), Status.RUNNING)
FINISH = Arrow("job.done", OWNED, Status.DONE)
SKIP = Arrow("job.skipped", OWNED, Status.SKIPPED)
FAIL = Arrow("job.failed", OWNED, Status.FAILED)
BURY = Arrow("job.dead_letter", OWNED, Status.DEAD_LETTER)
RETRY = Arrow("job.retry", OWNED, Status.PENDING)
HAND_BACK = Arrow("job.handed_back", OWNED, Status.PENDING)
#: The process of a cancelled attempt is gone, however it went: until then the job counts as running.
STOP = Arrow("job.cancelled", OWNED, Status.CANCELLED)
DEFER = Arrow(None, frozenset({Status.PENDING}), Status.PENDING)
CANCEL = Arrow("job.cancelled", frozenset({Status.PENDING}), Status.CANCELLED)
EXPIRE = Arrow("job.expired", frozenset({Status.PENDING}), Status.FAILED)
#: The only way out of an ending; an operator takes it, and only so many times.
REDRIVE = Arrow("job.redriven", frozenset({Status.FAILED, Status.CANCELLED, Status.DEAD_LETTER}), Status.PENDING)
#: The same for a task that ended well: somebody wants it, and all that follows it, run again.
RERUN = Arrow("job.rerun", frozenset({Status.DONE, Status.SKIPPED}), Status.PENDING)

ARROWS = (CLAIM, START, FINISH, SKIP, FAIL, BURY, RETRY, HAND_BACK, STOP, DEFER, CANCEL, EXPIRE, REDRIVE, RERUN)


class ErrorKind(StrEnum):
    """Why an attempt ended badly; stored as `error_kind`."""

    TRANSIENT = "transient"
    PERMANENT = "permanent"
    TIMEOUT = "timeout"
    WORKER_LOST = "worker_lost"
    GPU_LOST = "gpu_lost"
    BAD_RESULT = "bad_result"
    DEADLINE = "deadline_exceeded"
    #: The call for its whole batch failed, or the process died under it: nobody knows by whose fault.
    BATCH = "batch"


#: Ends that took a process or a GPU with them. Counted apart, so that a job that does it every time ends soon.
CRASHES = frozenset({ErrorKind.WORKER_LOST, ErrorKind.GPU_LOST})
#: After these a job runs alone: what it does then is its own doing, and it takes no neighbour down again.
ALONE_AFTER = CRASHES | {ErrorKind.BATCH, ErrorKind.TIMEOUT}


@dataclass(frozen=True)
class RetryPolicy:
    """How often and how soon failed attempts are repeated; a job type, or a job itself, may say otherwise."""

    base_s: float
    cap_s: float
    max_crashes: int
    max_attempts: int = 5
    by_type: Mapping[str, RetryRule] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: Settings) -> Self:
        return cls(
            settings.retry_base_s,
            settings.retry_cap_s,
            settings.max_crashes,
            settings.job_retry_max,
            settings.retry_by_type,
        )

    def for_job(self, type: str, base_s: float | None = None, cap_s: float | None = None) -> Self:
        """The policy of one job: what it says itself, else its type, else everybody's."""
        rule = self.by_type.get(type)
        if rule is None and base_s is None and cap_s is None:
            return self
        rule = rule or RetryRule()
        base = _first(base_s, rule.base_s, self.base_s)
        # Who asks for longer first waits than the usual longest one means it.
        cap = _first(cap_s, max(_first(rule.cap_s, self.cap_s), base))
        return replace(self, base_s=base, cap_s=cap, max_attempts=int(_first(rule.max_attempts, self.max_attempts)))


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)


@dataclass(frozen=True)
class Next:
    """What follows a failed attempt."""

    arrow: Arrow
    delay_s: float = 0.0


def backoff(attempts: int, policy: RetryPolicy, spin: float | None = None) -> float:
    """Seconds until the next try: exponential with full jitter, so that a crowd of failures spreads out."""
    ceiling = doubled(policy.base_s, attempts - 1, policy.cap_s)
    return ceiling * (random.random() if spin is None else spin)


def after_failure(
    kind: ErrorKind,
    *,
    attempts: int,
    max_attempts: int,
    crashes: int,
    policy: RetryPolicy,
    retry_after_s: float | None = None,
) -> Next:
    """Decide what a failed attempt leads to; `attempts` and `crashes` include this one."""
    if kind in (ErrorKind.PERMANENT, ErrorKind.BAD_RESULT):
        return Next(FAIL)
    if attempts >= max_attempts or (kind in CRASHES and crashes >= policy.max_crashes):
        return Next(BURY)
    if kind in CRASHES:
        return Next(RETRY)  # nothing speaks against the job itself: it waited long enough already
    return Next(RETRY, backoff(attempts, policy) if retry_after_s is None else retry_after_s)


def new_job_id() -> str:
    return fresh_id("job")


def _named_priority(value: object) -> object:
    number = PRIORITY_NAMES.get(value) if isinstance(value, str) else value
    if not isinstance(number, int) or isinstance(number, bool) or abs(number) > MAX_PRIORITY:
        raise ValueError(f"must be {', '.join(PRIORITY_NAMES)} or a whole number of -{MAX_PRIORITY}…{MAX_PRIORITY}")
    return number


def _default_lane(value: object) -> object:
    return DEFAULT_LANE if value is None else value


def _iso_text(value: object) -> object:
    """A number would be taken for seconds since 1970; only ISO 8601 is meant."""
    if not isinstance(value, str) or value.strip().isdigit():
        raise ValueError("give an ISO 8601 time with a zone, such as 2030-01-31T12:00:00Z")
    return value


def as_utc(value: datetime | None, field: str) -> datetime | None:
    """As the store keeps it. Raises InvalidInput."""
    try:
        return value.astimezone(UTC).replace(tzinfo=None) if value else None
    except OverflowError:
        raise InvalidInput(f"{field}: beyond the calendar", field) from None


def _own_keys(keys: list[str]) -> list[str]:
    """In one order: the same keys are the same content."""
    if len(set(keys)) < len(keys):
        raise ValueError("name each key once")
    if taken := [key for key in keys if key.partition(":")[0] in OWN_KINDS]:
        kinds = ", ".join(sorted(OWN_KINDS))
        raise ValueError(
            f"{taken[0]!r}: every job has the keys of {kinds} by itself; use another word before the colon"
        )
    return sorted(keys)


Priority = Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY), BeforeValidator(_named_priority)]
Moment = Annotated[AwareDatetime, Field(strict=False), BeforeValidator(_iso_text)]


def _wanted(constraints: dict[str, bool] | None) -> dict[str, bool] | None:
    """What is not wanted is no constraint: {"quiet": false} is the same content as nothing."""
    return {name: wanted for name, wanted in (constraints or {}).items() if wanted} or None


#: What a job wants of the time at which it runs. `quiet`: it waits until the admission policy says that it is.
Constraints = Annotated[dict[Literal["quiet"], bool] | None, AfterValidator(_wanted)]


class JobSpec(BaseModel):
    """A job as a client describes it. Unknown fields are refused; every field here has an effect."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    type: TypeName
    payload: dict[str, Any]
    job_id: NewJobId | None = None
    agent: NewName = "anonymous"
    pool_id: Annotated[NewName, BeforeValidator(_default_lane)] = DEFAULT_LANE
    model_id: Annotated[str, Field(min_length=1, max_length=255)] | None = None
    priority: Priority = 0
    min_memory_mb: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    gpu_count: Annotated[int, Field(ge=1, le=64)] = 1
    cpu_fallback: bool = False
    cost_units: Annotated[float, Field(ge=0, le=100)] | None = None
    constraints: Constraints = None
    #: The workflow that runs, of which it becomes a task.
    workflow_id: NewName | None = None
    expected_duration_sec: Annotated[float, Field(gt=0, le=31_536_000)] | None = None
    earliest_start_at: Moment | None = None
    deadline_at: Moment | None = None
    max_runtime_sec: Annotated[float, Field(gt=0, le=31_536_000)] | None = None
    max_attempts: Annotated[int, Field(ge=1, le=100)] | None = None
    retry_base_sec: Annotated[float, Field(gt=0, le=31_536_000)] | None = None
    retry_cap_sec: Annotated[float, Field(gt=0, le=31_536_000)] | None = None
    #: What it shares with others that must not all run at once, such as `host:example.org`.
    concurrency_keys: Annotated[list[Key], Field(default_factory=list, max_length=16), AfterValidator(_own_keys)]
    tags: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=128)]], Field(default_factory=list, max_length=32)
    ]

    @classmethod
    def parse(cls, body: object) -> Self:
        """Validate one submitted body.

        Raises InvalidInput that names the field.
        """
        try:
            return cls.model_validate(body)
        except ValidationError as invalid:
            raise readable(invalid, "a job") from None


def readable(invalid: ValidationError, what: str) -> InvalidInput:
    """The first thing that is wrong with it."""
    first = invalid.errors(include_url=False, include_input=False)[0]
    field = ".".join(str(part) for part in first["loc"]) or "body"
    if first["type"] == "extra_forbidden":
        return InvalidInput(f"unknown field {field[:80]!r}; see /openapi.json for the fields of {what}", field[:80])
    return InvalidInput(f"{field[:80]}: {in_our_words(first)}", field[:80])


_BEGINNING = datetime(1, 1, 1)  # noqa: DTZ001 - the database's clock has no zone
_NOT_OPTIONS = {"job_id", "payload", "earliest_start_at", "deadline_at"}
_DEFAULTS = {name: field.get_default(call_default_factory=True) for name, field in JobSpec.model_fields.items()}


@dataclass(frozen=True)
class NewJob:
    """A validated job on its way into the store: the spec, its canonical payload and its fingerprint."""

    spec: JobSpec
    job_id: str
    generated_id: bool
    payload: str
    content_hash: str
    not_before: datetime | None
    deadline: datetime | None = None
    trace_context: str | None = None

    @property
    def start_by(self) -> datetime | None:
        """The latest start that meets its deadline, as far as it says how long it takes."""
        if self.deadline is None:
            return None
        takes = timedelta(seconds=self.spec.expected_duration_sec or 0.0)
        return self.deadline - min(takes, self.deadline - _BEGINNING)

    @classmethod
    def prepare(cls, body: object, max_bytes: int, max_depth: int, trace_context: str | None = None) -> NewJob:
        """Check a body and fix everything that identifies its content.

        Raises InvalidInput or PayloadTooLarge; nothing has been written then.
        """
        spec = JobSpec.parse(body)
        payload = canonical_json(spec.payload, "payload", max_depth)
        if len(payload.encode()) > max_bytes:
            raise PayloadTooLarge(f"payload is larger than {max_bytes} bytes; pass a reference to the data", "payload")
        later = as_utc(spec.earliest_start_at, "earliest_start_at")
        deadline = as_utc(spec.deadline_at, "deadline_at")
        if later and deadline and deadline <= later:
            raise InvalidInput("deadline_at: not after earliest_start_at; the job could never run", "deadline_at")
        # The same moment in another zone is the same content; an option left out is its default.
        given = spec.model_fields_set - _NOT_OPTIONS
        options = sorted((k, v) for k, v in spec.__dict__.items() if k in given and v != _DEFAULTS[k])
        digest = hashlib.sha256(f"{options!r}\n{later} {deadline}\n{payload}".encode()).hexdigest()
        job_id = spec.job_id or new_job_id()
        return cls(spec, job_id, spec.job_id is None, payload, digest, later, deadline, trace_context)
