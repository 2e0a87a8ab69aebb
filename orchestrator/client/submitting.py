"""Submitting jobs politely: who is told to wait does, and a job is one job however often it has to be sent.

Every job has an id before it is sent for the first time, so that an answer which got lost costs nothing: the same id
and content again is the same job.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

from orchestrator.cancellation import Cancellation
from orchestrator.client.api import Api, default_url
from orchestrator.client.asking import AWAY_S, BUSY, RETRY_S
from orchestrator.client.errors import JobsRefused, Refused, ServerUnreachable
from orchestrator.jobs import new_job_id

log = logging.getLogger(__name__)

#: Seconds without a job that gets in, after which a caller gives up.
PATIENCE_S = 300.0
#: Jobs and bytes of one request; servers take more by default.
BATCH, BATCH_BYTES = 500, 4_000_000
#: Refusals of a whole request that may be meant for one of its jobs: what it is, its size, its content.
NOT_FOR_ALL = frozenset({400, 413, 422})
#: Seconds in which those that may come again gather for one request.
GATHER_S = 0.2

Job = Mapping[str, Any]
Answer = dict[str, Any]


@overload
def submit(jobs: Job, url: str | None = None, *, patience_s: float = PATIENCE_S) -> Answer: ...
@overload
def submit(jobs: Sequence[Job], url: str | None = None, *, patience_s: float = PATIENCE_S) -> list[Answer]: ...


def submit(
    jobs: Job | Sequence[Job], url: str | None = None, *, patience_s: float = PATIENCE_S
) -> Answer | list[Answer]:
    """Submit a job, or many; the server's answer for each, in order: `job_id`, `status`, `created`.

    A server that says "later" (an agent's rate, a pause, one that restarts) is asked again then, for up to
    `patience_s` seconds since a job got in. Raises Refused (one job), JobsRefused (many; its `answers` say which got
    in), or ServerUnreachable.
    """
    with closing(Api(url or default_url())) as api:
        submitting = Submitting(api, patience_s)
        return submitting.one(jobs) if isinstance(jobs, Mapping) else submitting.all(jobs)


class Encoded(NamedTuple):
    """A job as it is sent: its id, and all of it as JSON."""

    job_id: str
    text: bytes


@dataclass(frozen=True)
class Later:
    retry_after_s: float
    error: Refused | ServerUnreachable


class Submitting:
    """One caller's submits. `on_wait` is told each reason that differs from the last.

    `away_s`: for so long may a server that answered before be away. Threads may share one, and then have patience
    together. With a `stop` that is cancelled nobody waits any more.
    """

    def __init__(
        self,
        api: Api,
        patience_s: float = PATIENCE_S,
        on_wait: Callable[[str], None] | None = None,
        *,
        away_s: float = AWAY_S,
        stop: Cancellation | None = None,
    ) -> None:
        self._api, self._patience_s, self._away_s = api, patience_s, away_s
        self._on_wait = on_wait or _log_wait
        self._stop = stop or Cancellation()
        self._answered_at: float | None = None
        self._progress_at = time.monotonic()
        self._told = ""

    def one(self, job: Job) -> Answer:
        """Raises Refused or ServerUnreachable."""
        body = _identified(job)
        while True:
            answer: Answer | Later = self._ask("/jobs/submit", body)
            if not isinstance(answer, Later):
                return answer
            if not self._wait_until(time.monotonic() + _spread(answer.retry_after_s), str(answer.error)):
                raise answer.error

    def all(self, jobs: Sequence[Job]) -> list[Answer]:
        """Raises JobsRefused or ServerUnreachable."""
        bodies = [_identified(job) for job in jobs]
        answers = self.encoded([Encoded(body["job_id"], json.dumps(body).encode()) for body in bodies])
        if any("error" in answer for answer in answers):
            raise JobsRefused(answers)
        return answers

    def encoded(self, jobs: Sequence[Encoded]) -> list[Answer]:
        """The server's answer to each, in order: those with an `error` are not stored, for now (`BUSY`) or for good.

        Raises Refused when the server takes nothing from us, or ServerUnreachable.
        """
        round_ = _Round(jobs)
        while round_.due:
            now = time.monotonic()
            places = round_.next_batch(now)
            if places:
                self._send(round_, places)
            elif not self._wait_until(min(round_.due.values()) + GATHER_S, round_.reason):
                break
        return round_.answers

    def _send(self, round_: _Round, places: list[int]) -> None:
        body = b'{"jobs":[%s]}' % b",".join(round_.jobs[place].text for place in places)
        try:
            answer = self._ask("/jobs/submit_batch", body)
        except Refused as refused:  # all of them, for a reason that waiting does not mend
            if refused.status in NOT_FOR_ALL and len(places) > 1:
                # Perhaps because of one of them.
                half = len(places) // 2
                self._send(round_, places[:half])
                self._send(round_, places[half:])
                return
            problem = {"status": refused.status, "code": refused.code, "detail": str(refused)}
            answer = {"jobs": [{"error": problem}] * len(places)}
        if isinstance(answer, Later):
            problem = {"status": 503, "code": answer.error.code, "detail": str(answer.error)}
            answer = {"jobs": [{"error": problem | {"retry_after": answer.retry_after_s}}] * len(places)}
        if round_.take(places, answer["jobs"]):
            self._progress_at = time.monotonic()

    def _ask(self, path: str, body: Mapping[str, object] | bytes) -> Any:
        """The answer, or when to ask again. Raises Refused when waiting does not help, or ServerUnreachable."""
        try:
            answer = self._api.post(path, body)
        except ServerUnreachable as away:
            since = self._answered_at
            if time.monotonic() - since > self._away_s if since is not None else not away.sent:
                raise
            return Later(RETRY_S, away)
        except Refused as refused:
            self._answered_at = time.monotonic()
            if refused.status not in BUSY:
                raise
            return Later(refused.retry_after_s or RETRY_S, refused)
        self._answered_at = time.monotonic()
        return answer

    def _wait_until(self, moment: float, reason: str) -> bool:
        """False, at once, when that is later than anybody would wait, or nobody waits any more."""
        if moment > self._progress_at + self._patience_s:
            return False
        if reason != self._told:
            self._told = reason
            self._on_wait(reason)
        return not self._stop.wait(max(moment - time.monotonic(), 0.0))


class _Round:
    """Many jobs on their way: what was answered to each, and when those that must wait may come again."""

    def __init__(self, jobs: Sequence[Encoded]) -> None:
        self.jobs = jobs
        self.answers: list[Answer] = [{} for _ in jobs]
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

    def take(self, places: Sequence[int], answers: Sequence[Answer]) -> bool:
        """Whether any got in."""
        now, spread = time.monotonic(), _spread(1.0)  # one for all: neighbours keep their order
        for place, answer in zip(places, answers, strict=True):
            self.answers[place] = {"job_id": self.jobs[place].job_id} | answer
            error = answer.get("error")
            if error is None or error.get("status") not in BUSY:
                del self.due[place]
            else:
                self.reason = str(error.get("detail"))
                self.due[place] = now + spread * float(error.get("retry_after") or RETRY_S)
        return any("error" not in answer for answer in answers)


def _identified(job: Job) -> dict[str, Any]:
    return dict(job) | {"job_id": job.get("job_id") or new_job_id()}


def _spread(seconds: float) -> float:
    """Never earlier than told, and not all who wait at the same moment."""
    return seconds * random.uniform(1.0, 1.1)


def _log_wait(reason: str) -> None:
    log.info("waiting to submit: %s", reason)
