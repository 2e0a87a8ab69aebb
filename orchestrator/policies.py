"""What operators decide at run time, as documents: an agent's share and rate, the gates, caps of keys, triggers.

A `Book` is all of them at one moment. It is pure: whoever decides about a job is given one, and so the publisher, the
claim, the submit and the explanation of a job cannot disagree. `store.policies` keeps the documents and their history.

A cap belongs to a key. Every job has the keys `global`, `pool:LANE`, `agent:NAME`, `type:NAME`, `model:ID` where it
names one, and those it brings itself (`concurrency_keys`, such as `host:example.org`). `KIND:*` is the cap of every key
of a kind that has none of its own. A pause is a cap of nothing.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, time, timedelta
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from orchestrator.errors import InvalidInput
from orchestrator.names import Name, is_dots, is_name
from orchestrator.triggers import check_template
from orchestrator.wording import first_wrong

#: What a gate does with a job that it does not let pass.
Action = Literal["reject", "queue", "cpu"]

Count = Annotated[int, Field(ge=0, le=1_000_000_000)]
Positive = Annotated[int, Field(ge=1, le=1_000_000_000)]
Weight = Annotated[float, Field(ge=0.01, le=1000, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=0.001, le=1_000_000, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=31_536_000, allow_inf_nan=False)]
Percent = Annotated[float, Field(ge=1, le=100, allow_inf_nan=False)]
#: What a job costs, and what there is of it.
Units = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
#: Jobs of one lane that may wait. They are counted again and again, so there is a limit to the limit.
Depth = Annotated[int, Field(ge=1, le=1_000_000)]
ClockTime = Annotated[str, Field(pattern=r"^([01][0-9]|2[0-3]):[0-5][0-9]$")]
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]


class Scope(StrEnum):
    AGENT = "agent"
    ADMISSION = "admission"
    CONCURRENCY = "concurrency"
    PAUSE = "pause"
    TRIGGER = "trigger"


class Document(BaseModel):
    """A policy as an operator writes it. Unknown fields are refused; what is left out has its default."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, serialize_by_alias=True)


class AgentPolicy(Document):
    """One agent. `low` marks default to nine tenths of the high ones: a gate that closed opens below them."""

    weight: Weight = 1.0
    #: Jobs a second that it may submit, and how many at once after a pause.
    rate: Rate | None = None
    burst: Positive | None = None
    max_in_flight: Positive | None = None
    low_in_flight: Count | None = None
    max_memory_mb: Positive | None = None
    low_memory_mb: Count | None = None
    action: Action = "reject"

    @model_validator(mode="after")
    def _related(self) -> Self:
        if self.burst is not None and self.rate is None:
            raise ValueError("burst: needs a rate")
        for high, low, name in (
            (self.max_in_flight, self.low_in_flight, "low_in_flight"),
            (self.max_memory_mb, self.low_memory_mb, "low_memory_mb"),
        ):
            if low is not None and (high is None or low > high):
                raise ValueError(f"{name}: must not be above {name.replace('low', 'max')}")
        return self

    @property
    def limits(self) -> bool:
        """Whether it has watermarks."""
        return self.max_in_flight is not None or self.max_memory_mb is not None


class CapPolicy(Document):
    """Jobs with this key that may run at once."""

    max: Count


class PausePolicy(Document):
    """Nothing of its scope starts. `action` says what becomes of submits meanwhile: refused, or taken and kept."""

    reason: Annotated[str, Field(max_length=255)] = ""
    action: Literal["reject", "queue"] = "reject"


class MemoryGate(Document):
    """Closed to jobs that need GPU memory when more than `over_pct` of the cluster's was used for so long."""

    over_pct: Percent
    for_seconds: Seconds = 0.0
    action: Action = "reject"


class DepthGate(Document):
    """Closed to a lane in which `max` jobs wait; `lanes` has those with a limit of their own."""

    max: Depth | None = None
    lanes: dict[Name, Depth] = Field(default_factory=dict)
    action: Action = "reject"

    @model_validator(mode="after")
    def _some_limit(self) -> Self:
        if self.max is None and not self.lanes:
            raise ValueError("max: say how many may wait, for all lanes or for some")
        return self

    def limit(self, lane: str) -> int | None:
        return self.lanes.get(lane, self.max)


class QuietHours(Document):
    """In UTC. Hours that end before they begin go on until the next day; `days` are those on which they begin."""

    days: Annotated[list[Day], Field(min_length=1, max_length=7)] | None = None
    begin: ClockTime = Field(alias="from")
    end: ClockTime = Field(alias="to")

    def contains(self, moment: datetime) -> bool:
        begin, end = time.fromisoformat(self.begin), time.fromisoformat(self.end)
        after_midnight = begin >= end and moment.time() < end
        inside = begin <= moment.time() < end if begin < end else after_midnight or moment.time() >= begin
        began = moment - timedelta(days=after_midnight)
        return inside and (self.days is None or DAYS[began.weekday()] in self.days)


class Capacity(Document):
    """What jobs with `cost_units` may cost together, and when it is quiet.

    It is quiet in the hours of `quiet`, and with `follow_load` whenever the GPUs were busy for less than
    `load_below_pct` of the time for so many seconds.
    """

    units: Units
    quiet_units: Units | None = None
    quiet: Annotated[list[QuietHours], Field(max_length=64)] = Field(default_factory=list)
    follow_load: bool = False
    load_below_pct: Percent = 10.0
    load_for_seconds: Seconds = 300.0

    @property
    def most(self) -> float:
        """What it ever is."""
        return max(self.units, self.quiet_units or 0.0)

    def now(self, *, quiet: bool) -> float:
        return self.quiet_units if quiet and self.quiet_units is not None else self.units


class AdmissionPolicy(Document):
    """The gates that all jobs pass."""

    gpu_memory: MemoryGate | None = None
    queue_depth: DepthGate | None = None
    capacity: Capacity | None = None


class TriggerPolicy(Document):
    """Every event of this type becomes a job: `job` is a submit's body with fields of the event (`triggers`)."""

    event: Name
    job: dict[str, Any]
    enabled: bool = True

    @model_validator(mode="after")
    def _usable(self) -> Self:
        try:
            check_template(self.job)
        except InvalidInput as wrong:
            raise ValueError(wrong.message) from None
        return self


DOCUMENTS: dict[Scope, type[Document]] = {
    Scope.AGENT: AgentPolicy,
    Scope.ADMISSION: AdmissionPolicy,
    Scope.CONCURRENCY: CapPolicy,
    Scope.PAUSE: PausePolicy,
    Scope.TRIGGER: TriggerPolicy,
}
#: How what a blocked job waits for begins, if that is a cap; its key follows.
WAITS_FOR_CAP = "cap:"
#: The one name in the scope `admission`.
EVERYWHERE = "global"


#: Characters of the longest key.
MAX_KEY = 200
# What models, hosts and paths are called. A key ends neither in `/`, nor as a path does that means something else.
_KEY = re.compile(r"(?!.*/(history|rollback)$)[A-Za-z0-9._:@+/\-]*([A-Za-z0-9._@+\-]|:\*)")


def named(scope: Scope, name: str) -> str:
    """The name that a policy of this scope may have. Raises InvalidInput."""
    if scope is Scope.CONCURRENCY and (len(name) > MAX_KEY or not _KEY.fullmatch(name)):
        what = f"a key is at most {MAX_KEY} of A-Z a-z 0-9 . _ : @ + / -, such as host:example.org, or KIND:*"
        raise InvalidInput(f"key: {what}", "key")
    if scope is Scope.AGENT and name != "*" and not is_name(name):
        raise InvalidInput(
            "agent: a name is at most 128 of A-Z a-z 0-9 . _ : -, or * for all without their own", "agent"
        )
    if scope is Scope.TRIGGER and not is_name(name):
        raise InvalidInput("trigger: a name is at most 128 of A-Z a-z 0-9 . _ : -", "trigger")
    return name


def new_name(scope: Scope, name: str) -> str:
    """The name that a policy may be given: none of dots alone, between slashes either. Raises InvalidInput."""
    if any(map(is_dots, name.split("/"))):
        field = "key" if scope is Scope.CONCURRENCY else scope.value
        raise InvalidInput(f"{field}: cannot be made of dots alone, which a path would take for the way up", field)
    return named(scope, name)


def parse(scope: Scope, body: object) -> Document:
    """Validate a document. Raises InvalidInput that names the field; nothing was written then."""
    try:
        return DOCUMENTS[scope].model_validate(body)
    except ValidationError as invalid:
        path, words = first_wrong(invalid)
        field = path[:80]
        raise InvalidInput(f"{field}: {words}" if field else words, field or "body") from None


@dataclass(frozen=True)
class Book:
    """All policies at one moment; `generation` grows with every change."""

    generation: int = 0
    agents: Mapping[str, AgentPolicy] = field(default_factory=dict)
    caps: Mapping[str, int] = field(default_factory=dict)
    pauses: Mapping[str, PausePolicy] = field(default_factory=dict)
    admission: AdmissionPolicy = field(default_factory=AdmissionPolicy)
    triggers: Mapping[str, TriggerPolicy] = field(default_factory=dict)

    @classmethod
    def of(cls, generation: int, rows: Iterable[tuple[str, str, Mapping[str, Any]]]) -> Self:
        """From (scope, name, document); documents that a later version wrote and this one cannot read are left out."""
        found: dict[Scope, dict[str, Any]] = {scope: {} for scope in Scope}
        for scope, name, document in rows:
            if scope in set(Scope):
                try:
                    found[Scope(scope)][name] = parse(Scope(scope), document)
                except InvalidInput:
                    continue
        caps = {name: cap.max for name, cap in found[Scope.CONCURRENCY].items()}
        admission = found[Scope.ADMISSION].get(EVERYWHERE, AdmissionPolicy())
        return cls(generation, found[Scope.AGENT], caps, found[Scope.PAUSE], admission, found[Scope.TRIGGER])

    def agent(self, name: str) -> AgentPolicy:
        return self.agents.get(name) or self.agents.get("*") or _USUAL

    def cap(self, key: str) -> int | None:
        """How many jobs with this key may run at once; None: as many as there are."""
        if key in self.pauses:
            return 0
        kind = f"{key.partition(':')[0]}:*"
        return self.caps.get(key, self.caps.get(kind))

    def triggered_by(self, event: str) -> dict[str, TriggerPolicy]:
        """By name, what an event of this type sets off."""
        return {name: one for name, one in self.triggers.items() if one.enabled and one.event == event}

    @property
    def gates(self) -> bool:
        """Whether anything but caps and rates may keep a job out."""
        watched = any(agent.limits for agent in self.agents.values())
        return bool(self.pauses) or watched or self.admission != _NO_GATES

    @property
    def limits(self) -> bool:
        """Whether any key has a cap: most clusters have none, and need not look."""
        return bool(self.caps or self.pauses)

    def closed(self, lane: str) -> str | None:
        """Why nothing of this lane starts, whoever submitted it; None when something may.

        What waits then stays in its order: the lane as a whole waits, and nobody need look at its jobs.
        """
        return next((self.why_full(key, 0) for key in ("global", f"pool:{lane}") if self.cap(key) == 0), None)

    def why_full(self, key: str, in_use: int) -> str:
        """As people read it."""
        if (pause := self.pauses.get(key)) is not None:
            return f"{key} is paused: {pause.reason}" if pause.reason else f"{key} is paused"
        return f"cap {key} is full: {in_use} of {self.cap(key)} run"

    def capped(self, keys: Iterable[str]) -> dict[str, int]:
        """Of these keys those that have a cap, in one order for all who lock them."""
        return {key: most for key in sorted(set(keys)) if (most := self.cap(key)) is not None}


_USUAL = AgentPolicy()
_NO_GATES = AdmissionPolicy()


def keys_of(lane: str, agent: str, type: str, model_id: str | None, own: Iterable[str] = ()) -> list[str]:
    """Every key that may limit a job."""
    # The database takes names that differ in spaces at their end for equal.
    model = [f"model:{model_id}".rstrip()] if model_id else []
    return ["global", f"pool:{lane}", f"agent:{agent}", f"type:{type}", *model, *own]


def resume_command(key: str) -> str:
    """What ends the pause of this key, and no other."""
    scope, colon, name = key.partition(":")
    return f"gpuorch queue resume --{scope} {shlex.quote(name)}" if colon else "gpuorch queue resume"
