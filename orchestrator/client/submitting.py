"""Submitting jobs politely: who is told to wait does, and a job is one job however often it has to be sent.

Every job has an id before it is sent for the first time, so that an answer which got lost costs nothing: the same id
and content again is the same job.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, overload

from orchestrator import limits
from orchestrator.cancellation import Cancellation
from orchestrator.client.answers import Submitted
from orchestrator.client.api import Api
from orchestrator.client.errors import JobsRefused, Refused
from orchestrator.client.operations import Door, Noun, operation
from orchestrator.client.paths import default_url
from orchestrator.client.patience import BUSY, RETRY_S, Later, Patience, spread
from orchestrator.client.steps import Fan, Operation, Request
from orchestrator.jobs import new_job_id

#: Seconds without a job that gets in, after which a caller gives up.
PATIENCE_S = 300.0
#: Jobs and bytes of one request; servers take more by default.
BATCH, BATCH_BYTES = 500, 4_000_000
#: Bytes of the batches that are in the house together.
PENDING_BYTES = 4 * BATCH_BYTES
#: Refusals of a whole request that may be meant for one of its jobs: what it is, its size, its content.
NOT_FOR_ALL = frozenset({400, 413, 422})
#: Seconds in which those that may come again gather for one request.
GATHER_S = 0.2

JobBody: TypeAlias = Mapping[str, Any]
Jobs: TypeAlias = Iterable[JobBody] | AsyncIterable[JobBody]


@overload
def submit(jobs: JobBody, url: str | None = None, *, patience_s: float = PATIENCE_S) -> Submitted: ...
@overload
def submit(jobs: Iterable[JobBody], url: str | None = None, *, patience_s: float = PATIENCE_S) -> list[Submitted]: ...


def submit(
    jobs: JobBody | Iterable[JobBody], url: str | None = None, *, patience_s: float = PATIENCE_S
) -> Submitted | list[Submitted]:
    """Submit a job, or many; the server's answer for each, in order: `job_id`, `status`, `created`.

    A server that says "later" (an agent's rate, a pause, one that restarts) is asked again then, for up to
    `patience_s` seconds since a job got in. Raises Refused (one job), JobsRefused (many; its `answers` say which got
    in), or ServerUnreachable.
    """
    with Api(url or default_url()) as api:
        submitting = Submitting(api, patience_s)
        return submitting.one(jobs) if isinstance(jobs, Mapping) else submitting.all(jobs)


class Encoded(NamedTuple):
    """A job as it is sent: its id, and all of it as JSON."""

    job_id: str
    text: bytes


class Submitting(Noun[Door]):
    """One caller's submits. `on_wait` is told each reason that differs from the last.

    `away_s`: for so long may a server that answered before be away. Threads may share one, and then have patience
    together. With a `stop` that is cancelled nobody waits any more.
    """

    def __init__(
        self,
        door: Door,
        patience_s: float = PATIENCE_S,
        on_wait: Callable[[str], None] | None = None,
        *,
        away_s: float | None = None,
        stop: Cancellation | None = None,
    ) -> None:
        super().__init__(door)
        self._patience = Patience(door.contact, patience_s, on_wait, away_s=away_s, stop=stop)

    @operation
    def one(self, job: JobBody) -> Operation[Submitted]:
        """Raises Refused or ServerUnreachable."""
        return self._patience.insist(_request("/jobs/submit", encode(job).text))

    @operation
    def all(self, jobs: Jobs, *, threads: int = 1) -> Operation[list[Submitted]]:
        """Raises JobsRefused or ServerUnreachable."""
        answers: list[Submitted] = yield self.fan(jobs, threads)
        if any("error" in answer for answer in answers):
            raise JobsRefused(answers)
        return answers

    @operation
    def encoded(self, jobs: Sequence[Encoded]) -> Operation[list[Submitted]]:
        """The server's answer to each, in order: those with an `error` are not stored, for now (`BUSY`) or for good.

        Raises ServerUnreachable.
        """
        return self._encoded(jobs)

    def fan(self, jobs: Jobs, threads: int) -> Fan:
        """Batches of them as they come, `threads` at a time: one keeps their order."""
        return Fan(
            batched(jobs),
            self._encoded,
            limits.of_this_process(threads).io,
            PENDING_BYTES,
            lambda batch: sum(len(job.text) for job in batch),
            "submit",
        )

    def _encoded(self, jobs: Sequence[Encoded]) -> Operation[list[Submitted]]:
        round_ = _Round(jobs)
        while round_.due:
            places = round_.next_batch(time.monotonic())
            if places:
                yield from self._send(round_, places)
            elif not (yield from self._patience.wait_until(min(round_.due.values()) + GATHER_S, round_.reason)):
                break
        return round_.answers

    def _send(self, round_: _Round, places: list[int]) -> Operation[None]:
        body = b'{"jobs":[%s]}' % b",".join(round_.jobs[place].text for place in places)
        try:
            answer = yield from self._patience.ask(_request("/jobs/submit_batch", body))
        except Refused as refused:  # all of them, for a reason that waiting does not mend
            if refused.status in NOT_FOR_ALL and len(places) > 1:
                # Perhaps because of one of them.
                half = len(places) // 2
                yield from self._send(round_, places[:half])
                yield from self._send(round_, places[half:])
                return
            problem = {"status": refused.status, "code": refused.code, "detail": str(refused)}
            answer = {"jobs": [{"error": problem}] * len(places)}
        if isinstance(answer, Later):
            problem = {"status": 503, "code": answer.error.code, "detail": str(answer.error)}
            answer = {"jobs": [{"error": problem | {"retry_after": answer.retry_after_s}}] * len(places)}
        if round_.take(places, answer["jobs"]):
            self._patience.progress()


class _Round:
    """Many jobs on their way: what was answered to each, and when those that must wait may come again."""

    def __init__(self, jobs: Sequence[Encoded]) -> None:
        self.jobs = jobs
        self.answers: list[Submitted] = [{"job_id": job.job_id} for job in jobs]
        self.due = dict.fromkeys(range(len(jobs)), 0.0)
        self.reason = ""

    def next_batch(self, now: float) -> list[int]:
        """Those that may be sent, in order, as far as they fit into one request."""
        places: list[int] = []
        size = 0
        for place, moment in self.due.items():
            if moment > now:
                continue
            size += len(self.jobs[place].text)
            if places and (len(places) >= BATCH or size > BATCH_BYTES):
                break
            places.append(place)
        return places

    def take(self, places: Sequence[int], answers: Sequence[Any]) -> bool:
        """Whether any got in."""
        now, moment = time.monotonic(), spread(1.0)  # one for all: neighbours keep their order
        for place, answer in zip(places, answers, strict=True):
            self.answers[place] = {"job_id": self.jobs[place].job_id} | answer
            error = answer.get("error")
            if error is None or error.get("status") not in BUSY:
                del self.due[place]
            else:
                self.reason = str(error.get("detail"))
                self.due[place] = now + moment * float(error.get("retry_after") or RETRY_S)
        return any("error" not in answer for answer in answers)


def encode(job: JobBody) -> Encoded:
    job_id = job.get("job_id") or new_job_id()
    return Encoded(str(job_id), json.dumps(dict(job) | {"job_id": job_id}).encode())


def batched(jobs: Jobs) -> Iterable[list[Encoded]] | AsyncIterable[list[Encoded]]:
    """As many as go into one request, taken as they are asked for."""
    return _batches_to_come(jobs) if isinstance(jobs, AsyncIterable) else _batches(jobs)


def _batches(jobs: Iterable[JobBody]) -> Generator[list[Encoded], None, None]:
    gathered = _Gathered()
    for job in jobs:
        if full := gathered.add(encode(job)):
            yield full
    if gathered.batch:
        yield gathered.batch


async def _batches_to_come(jobs: AsyncIterable[JobBody]) -> AsyncGenerator[list[Encoded], None]:
    gathered = _Gathered()
    async for job in jobs:
        if full := gathered.add(encode(job)):
            yield full
    if gathered.batch:
        yield gathered.batch


class _Gathered:
    def __init__(self) -> None:
        self.batch: list[Encoded] = []
        self._size = 0

    def add(self, job: Encoded) -> list[Encoded]:
        """What must go before it, if anything has to."""
        full: list[Encoded] = []
        if self.batch and (len(self.batch) >= BATCH or self._size + len(job.text) > BATCH_BYTES):
            full, self.batch, self._size = self.batch, [], 0
        self.batch.append(job)
        self._size += len(job.text)
        return full


def _request(path: str, body: bytes) -> Request:
    return Request("POST", path, body=body, repeatable=True)
