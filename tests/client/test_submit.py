"""`orchestrator.client.submit` against a real orchestrator: jobs get in once, as fast as they may."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from orchestrator.cli import run
from orchestrator.client import JobsRefused, Refused, ServerUnreachable, patience, submit, submitting
from orchestrator.client.api import Api
from orchestrator.client.steps import Request
from orchestrator.store import schema
from tests.api.conftest import Running
from tests.factories import rows
from tests.servers import free_port

JOB = {"type": "echo", "payload": {}}


@pytest.fixture
def url(started: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    address = str(started.http.base_url)
    monkeypatch.setenv("GPUORCH_URL", address)
    yield address
    started.http.delete("/policies/agents/polite")
    with started.db.engine.begin() as connection:
        for table in (schema.jobs, schema.rate_buckets):
            connection.execute(table.delete())


def limit(started: Running, **policy: Any) -> None:
    started.http.put("/policies/agents/polite", json=policy).raise_for_status()


def stored(started: Running) -> list[str]:
    return [job.job_id for job in rows(started.db, schema.jobs)]


def test_jobs_over_the_rate_get_in_one_after_the_other_and_once(started: Running, url: str) -> None:
    limit(started, rate=20)
    before = time.monotonic()
    answers = submit([JOB | {"agent": "polite", "payload": {"n": n}} for n in range(50)])
    took = time.monotonic() - before
    assert [answer["created"] for answer in answers] == [True] * 50
    assert sorted(answer["job_id"] for answer in answers) == sorted(stored(started))
    in_order = sorted(rows(started.db, schema.jobs), key=lambda job: job.rank)
    assert [json.loads(job.payload)["n"] for job in in_order][:20] == list(range(20))
    assert took > 1.4, "30 of them had to wait for their tokens"


def test_one_job_waits_for_its_token(started: Running, url: str) -> None:
    limit(started, rate=5, burst=1)
    first, second = (submit(JOB | {"agent": "polite"}, url) for _ in range(2))
    assert first["created"] and second["created"]
    again = submit(JOB | {"agent": "polite", "job_id": first["job_id"]})
    assert (again["created"], len(stored(started))) == (False, 2)


def test_who_would_have_to_wait_too_long_hears_so_at_once(started: Running, url: str) -> None:
    limit(started, rate=0.001, burst=1)
    jobs = [JOB | {"agent": "polite", "job_id": f"j-{n}"} for n in range(3)]
    with pytest.raises(JobsRefused, match=r"2 of 3 jobs were refused; the first with rate_limited") as refused:
        submit(jobs)
    assert [("error" in answer, answer["job_id"]) for answer in refused.value.answers] == [
        (False, "j-0"),
        (True, "j-1"),
        (True, "j-2"),
    ]
    with pytest.raises(Refused, match="429 rate_limited") as one:
        submit(JOB | {"agent": "polite"})
    assert (one.value.retry_after_s or 0) > 900
    assert stored(started) == ["j-0"]


def test_what_waiting_does_not_mend_is_not_repeated(started: Running, url: str) -> None:
    with pytest.raises(Refused, match="422 invalid_input"):
        submit({"type": "echo"})
    with pytest.raises(JobsRefused) as refused:
        submit([JOB, {"type": "echo"}, JOB])
    assert ["error" in answer for answer in refused.value.answers] == [False, True, False]
    assert len(stored(started)) == 2
    assert submit([]) == []


def test_many_are_sent_in_several_requests(started: Running, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submitting, "BATCH", 7)
    asked: list[int] = []
    send = Api.send

    def watched(self: Api, request: Request) -> Any:
        assert isinstance(request.body, bytes)
        asked.append(len(json.loads(request.body)["jobs"]))
        return send(self, request)

    monkeypatch.setattr(Api, "send", watched)
    assert len(submit([JOB] * 20)) == len(stored(started)) == 20
    assert asked == [7, 7, 6]
    monkeypatch.setattr(submitting, "BATCH_BYTES", 200)
    asked.clear()
    assert len(submit([JOB | {"payload": {"x": "y" * 150}}] * 3)) == 3
    assert asked == [1, 1, 1]


def test_the_command_line_waits_too(started: Running, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    limit(started, rate=0.4, burst=1)  # no other token comes before it is asked for, however slow the machine
    for _ in range(2):
        assert run(["jobs", "submit", "echo", "--agent", "polite", "--patience", "10"]) == 0
    assert "waiting: 429 rate_limited" in capsys.readouterr().err
    assert run(["jobs", "submit", "echo", "--agent", "polite", "--patience", "0"]) == 1
    assert len(stored(started)) == 2


# --- servers that fail ---


@pytest.fixture
def lose(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`lose(n)`: the next n answers get lost on the way; or the requests, unless `sent`."""
    send, left, how = Api.send, 0, True
    monkeypatch.setattr(patience, "RETRY_S", 0.01)

    def lossy(self: Api, request: Request) -> Any:
        nonlocal left
        left -= 1
        if left >= 0 and not how:
            raise ServerUnreachable(self.url, "lost", sent=False)
        answer = send(self, request)
        if left >= 0:
            raise ServerUnreachable(self.url, "lost")
        return answer

    def arm(count: int, *, sent: bool = True) -> None:
        nonlocal left, how
        left, how = count, sent

    monkeypatch.setattr(Api, "send", lossy)
    return arm


def test_a_lost_answer_costs_no_second_job(started: Running, url: str, lose: Callable[..., None]) -> None:
    lose(2)
    assert submit(JOB)["created"] is False
    lose(2)
    assert len(submit([JOB, JOB])) == 2
    assert len(stored(started)) == 3


def test_a_server_that_was_never_there_is_told_at_once() -> None:
    for jobs in (JOB, [JOB]):
        with pytest.raises(ServerUnreachable):
            submit(jobs, f"http://127.0.0.1:{free_port()}")


def test_one_that_answered_before_may_be_away_for_a_while(
    started: Running, url: str, lose: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submitting, "BATCH", 1)
    with closing(Api(url)) as api:
        client = submitting.Submitting(api)
        client.one(JOB)
        lose(2, sent=False)
        assert len(client.all([JOB, JOB])) == 2
        lose(1, sent=False)
        with pytest.raises(ServerUnreachable):
            submitting.Submitting(api, away_s=-1.0).all([JOB])
    assert len(stored(started)) == 3
