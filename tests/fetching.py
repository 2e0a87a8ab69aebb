"""An HTTP worker, moved by the test instead of by a program."""

from dataclasses import dataclass
from typing import Any

import httpx

from tests.api.conftest import Running
from tests.waiting import wait_until


@dataclass
class Puppet:
    api: Running
    worker_id: str

    def beat(self, **said: Any) -> httpx.Response:
        return self.api.post("/workers/heartbeat", {"worker_id": self.worker_id} | said)

    def leave(self) -> httpx.Response:
        return self.api.post("/workers/deregister", {"worker_id": self.worker_id})

    def ask(self, most: int = 1, **given: Any) -> httpx.Response:
        return self.api.post("/jobs/claim", {"worker_id": self.worker_id, "max": most} | given)

    def one(self) -> dict[str, Any]:
        """Claim a job that waits, perhaps in the hands of whoever announces it: a claim passes over those."""
        (job,) = self.claim(wait_seconds=20)
        return job

    def all(self, count: int) -> list[dict[str, Any]]:
        """Claim so many that wait, in as many steps as it takes."""
        jobs: list[dict[str, Any]] = []

        def enough() -> bool:
            jobs.extend(self.claim(count - len(jobs)))
            return len(jobs) == count

        wait_until(enough, what=f"{count} jobs")
        return jobs

    def claim(self, most: int = 1, **given: Any) -> list[dict[str, Any]]:
        answer = self.ask(most, **given)
        assert answer.status_code == 200, answer.text
        jobs: list[dict[str, Any]] = answer.json()["jobs"]
        return jobs

    def sign(self, job: dict[str, Any], **said: Any) -> httpx.Response:
        return self.report("heartbeat", job, said)

    def complete(self, job: dict[str, Any], result: Any = None, **said: Any) -> httpx.Response:
        return self.report("complete", job, {"result": result} | said)

    def fail(self, job: dict[str, Any], error: str = "it broke", **said: Any) -> httpx.Response:
        return self.report("fail", job, {"error": error} | said)

    def report(self, what: str, job: dict[str, Any], said: dict[str, Any]) -> httpx.Response:
        proof = {"worker_id": self.worker_id, "attempt": job["attempt"]}
        return self.api.post(f"/jobs/{job['job_id']}/{what}", proof | said)


def register(api: Running, **given: Any) -> Puppet:
    """A new worker with 4 slots for `echo`."""
    answer = api.post("/workers/register", {"slots": 4, "types": ["echo"]} | given)
    assert answer.status_code == 200, answer.text
    return Puppet(api, answer.json()["worker_id"])


def refused(answer: httpx.Response, status: int, code: str) -> str:
    """The detail of a refusal that is what it should be."""
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json"), answer.text
    assert answer.json()["code"] == code, answer.text
    detail: str = answer.json()["detail"]
    return detail
