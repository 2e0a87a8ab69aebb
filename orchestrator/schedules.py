"""Recurring jobs: when a schedule fires, and what becomes of the times that nobody was there for.

A schedule is a cron line in a time zone, or an interval counted from its anchor, so that it does not drift. All
moments are UTC without a zone, as the store keeps them. Where clocks are set forward, a line for a time that does not
exist fires right after the gap; where they are set back, a line for a certain time fires once, one with `*` for its
minutes or hours goes on as time does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Annotated, Any, Literal, Self
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from orchestrator.errors import InvalidInput
from orchestrator.jobs import NewJob, readable

#: Of those times that are more than this late, `skip` runs none. A change of leaders is quicker.
ON_TIME = timedelta(seconds=60)
#: How far the search for the latest times looks back at first: as far as they can all be counted in no time.
FIRST_LOOK = timedelta(days=1)
TICK = timedelta(microseconds=1)
#: Characters of a schedule's name: with the time it fires at, it is the id of a job.
MAX_ID = 90

CatchUp = Literal["skip", "last", "all"]

#: What a job that comes again and again cannot have, and why.
NOT_RECURRING = {
    "job_id": "is made of the schedule's id and the time it fires at; leave it out",
    "earliest_start_at": "is one moment; a recurring job starts when its schedule fires",
    "deadline_at": "is one moment; a recurring job would miss it ever after",
}


class ScheduleSpec(BaseModel):
    """A schedule as an operator writes it.

    `catch_up` says what runs of the times that were missed: nothing that is more than a minute late (`skip`), the
    latest alone (`last`), or each, but no more than the latest `catch_up_max` (`all`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    job: dict[str, Any]
    cron: Annotated[str, Field(max_length=255)] | None = None
    every_seconds: Annotated[float, Field(ge=1, le=31_536_000, allow_inf_nan=False)] | None = None
    timezone: Annotated[str, Field(min_length=1, max_length=64)] = "UTC"
    catch_up: CatchUp = "skip"
    catch_up_max: Annotated[int, Field(ge=1, le=100)] = 10
    enabled: bool = True

    @model_validator(mode="after")
    def _one_rhythm(self) -> Self:
        if (self.cron is None) == (self.every_seconds is None):
            raise ValueError("say either cron or every_seconds")
        return self

    @classmethod
    def parse(cls, body: object, max_bytes: int, max_depth: int) -> Self:
        """Validate one; its job as a submit would. Raises InvalidInput that names the field."""
        try:
            spec = cls.model_validate(body)
        except ValidationError as invalid:
            raise readable(invalid, "a schedule") from None
        timing = Timing.of(spec.cron, spec.every_seconds, spec.timezone, datetime(2000, 1, 1))  # noqa: DTZ001 - UTC
        if timing.after(datetime(2000, 1, 1)) is None:  # noqa: DTZ001
            raise InvalidInput("cron: never fires", "cron")
        recurring_job(spec.job, "x", max_bytes, max_depth)
        return spec


def recurring_job(
    template: dict[str, Any], job_id: str, max_bytes: int, max_depth: int, trace_context: str | None = None
) -> NewJob:
    """The job of one firing. Raises InvalidInput."""
    for name, why in NOT_RECURRING.items():
        if name in template:
            raise InvalidInput(f"job.{name}: {why}", f"job.{name}")
    return NewJob.prepare(template | {"job_id": job_id}, max_bytes, max_depth, trace_context)


def fire_id(schedule_id: str, at: datetime) -> str:
    """The id of the job of this firing: the same whoever fires it, so that it is fired once."""
    exact = "%Y%m%dT%H%M%S.%fZ" if at.microsecond else "%Y%m%dT%H%M%SZ"
    return f"schedule:{schedule_id}:{at.strftime(exact)}"


@dataclass(frozen=True)
class Timing:
    """When a schedule fires: by its cron line, or every so often from its anchor on."""

    cron: str | None
    every: timedelta | None
    zone: tzinfo
    anchor: datetime

    @classmethod
    def of(cls, cron: str | None, every_s: float | None, zone: str, anchor: datetime) -> Self:
        """Raises InvalidInput."""
        timing = cls(cron, timedelta(seconds=every_s) if every_s else None, _zone(zone), anchor)
        if cron is not None:
            try:
                CronSim(cron, datetime(2000, 1, 1, tzinfo=UTC))
            except (CronSimError, AssertionError, ValueError) as wrong:
                raise InvalidInput(f"cron: {str(wrong) or 'not a cron line'}; see man 5 crontab", "cron") from None
            if len(cron.split()) != 5:
                raise InvalidInput("cron: five fields: minute, hour, day of month, month, day of week", "cron")
        return timing

    def after(self, moment: datetime) -> datetime | None:
        """The first time later than `moment`; None: never again."""
        if self.every is not None:
            return self.anchor + max((moment - self.anchor) // self.every + 1, 1) * self.every
        return next(self._cron_times(moment), None)

    def latest(self, most: int, since: datetime, until: datetime) -> tuple[list[datetime], int | None]:
        """The latest times from `since` to `until`, at most so many, and how many there are.

        None when that would take counting: of a line that fires every minute there are half a million a year.
        """
        if self.every is not None:
            first = max(-((self.anchor - since) // self.every), 1)
            after_last = max((until - self.anchor) // self.every + 1, first)
            times = [self.anchor + n * self.every for n in range(max(first, after_last - most), after_last)]
            return times, after_last - first
        look = FIRST_LOOK
        while until - look > since:
            found, count = self._within(until - look, until, most)
            if count >= most:
                return found, None
            look *= 4
        return self._within(since - TICK, until, most)

    def _within(self, after: datetime, until: datetime, most: int) -> tuple[list[datetime], int]:
        found: deque[datetime] = deque(maxlen=most)
        count = 0
        for at in self._cron_times(after):
            if at > until:
                break
            found.append(at)
            count += 1
        return list(found), count

    def _cron_times(self, after: datetime) -> Iterator[datetime]:
        times = self._simulated(after)
        while True:
            try:
                found = next(times)
                if _is_shifted(found):
                    # It went through this day hour by hour, and passed over what half an hour's shift left behind.
                    times = self._simulated(max(_as_utc(found) - timedelta(hours=1), after))
                    found = next(times)
                at = _as_utc(found)
            except (StopIteration, OverflowError):  # nothing in fifty years, or beyond the calendar
                return
            # An hour that comes twice lets a line for a certain time look back at its first coming.
            if at > after:
                after = at
                yield at

    def _simulated(self, after: datetime) -> CronSim:
        assert self.cron is not None
        return CronSim(self.cron, after.replace(tzinfo=UTC).astimezone(self.zone))


def _as_utc(at: datetime) -> datetime:
    return at.astimezone(UTC).replace(tzinfo=None)


def _is_shifted(at: datetime) -> bool:
    """Whether clocks were changed on this day before then."""
    return at.replace(hour=0, minute=0, second=0, fold=0).utcoffset() != at.utcoffset()


@dataclass(frozen=True)
class Plan:
    """What is to be done about a schedule that is due: these times fire, so many do not (None: nobody counted)."""

    fires: tuple[datetime, ...]
    missed: int | None
    next_at: datetime | None


def plan(timing: Timing, catch_up: CatchUp, most: int, due: datetime, now: datetime) -> Plan:
    """`due`: the time it should have fired at, which is not later than `now`."""
    times, count = timing.latest(1 if catch_up == "last" else most, due, now)
    fires = tuple(at for at in times if catch_up != "skip" or now - at <= ON_TIME)
    return Plan(fires, None if count is None else count - len(fires), timing.after(now))


def _zone(name: str) -> tzinfo:
    if name == "UTC":  # also where there are no time zones
        return UTC
    try:
        return ZoneInfo(name)
    except (OSError, KeyError, ValueError):  # no such name, a directory of names, no name at all
        message = f"timezone: no time zone {name[:64]!r}; use a name such as Europe/Berlin"
        raise InvalidInput(message, "timezone") from None
