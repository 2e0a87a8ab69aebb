"""POST /jobs/{id}/cancel and /retry"""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import update

from orchestrator.errors import RedisUnavailable
from orchestrator.jobs import ErrorKind
from orchestrator.store import schema
from tests.api.conftest import Running
from tests.factories import gpu, hire, history, row, rows, set_job
from tests.servers import Redis
from tests.waiting import wait_until

CONTROL = "stream:orchestrator:control"
DLQ = "stream:orchestrator:dlq"


def refused(answer: Any, status: int, code: str) -> str:
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json"), answer.text
    assert answer.json()["code"] == code
    return answer.json()["detail"]


# --- cancel ---


def test_a_waiting_job_is_cancelled_and_nobody_is_called(api: Running, redis_server: Redis) -> None:
    job_id = api.submit()
    for _ in range(2):
        answer = api.post(f"/jobs/{job_id}/cancel")
        assert (answer.status_code, answer.json()) == (
            200,
            {"job_id": job_id, "status": "cancelled", "cancel_requested": True},
        )
    job = api.get(f"/jobs/{job_id}").json()
    assert (job["status"], job["stop_seconds"]) == ("cancelled", pytest.approx(0, abs=0.01))
    assert history(api.db, job_id) == ["job.submitted", "job.cancelled"]
    with redis_server.client() as client:
        assert client.xlen(CONTROL) == 0


@pytest.mark.parametrize("state", ["claimed", "running"])
def test_the_worker_of_a_running_job_is_rung_up(api: Running, redis_server: Redis, state: str) -> None:
    hand = hire(api.db, gpu())
    (claim,) = hand.claim(api.submit(min_memory_mb=100))
    if state == "running":
        hand.start(claim)
    answer = api.post(f"/jobs/{claim.job_id}/cancel")
    assert (answer.status_code, answer.json()) == (
        202,
        {"job_id": claim.job_id, "status": state, "cancel_requested": True},
    )
    with redis_server.client() as client:
        wait_until(lambda: client.xlen(CONTROL) == 1, what="the bell rang")
    assert api.get(f"/jobs/{claim.job_id}").json()["cancel_requested_at"].endswith("Z")
    # INV-11: after that answer no success is accepted.
    hand.finish(claim)
    job = api.get(f"/jobs/{claim.job_id}", params={"wait": 5}).json()
    assert job["status"] == "cancelled" and "result" not in job and job["stop_seconds"] > 0
    refused(api.get(f"/jobs/{claim.job_id}/result"), 404, "result_not_found")
    assert api.post(f"/jobs/{claim.job_id}/cancel").status_code == 200


def test_asking_again_while_it_stops_rings_again_and_is_one_request(api: Running) -> None:
    hand = hire(api.db)
    (claim,) = hand.claim(api.submit())
    assert [api.post(f"/jobs/{claim.job_id}/cancel").status_code for _ in range(3)] == [202] * 3
    assert history(api.db, claim.job_id).count("job.cancel_requested") == 1


def test_a_job_that_ended_is_not_cancelled(api: Running) -> None:
    hand = hire(api.db)
    done, failed = hand.claim(api.submit(), api.submit())
    hand.finish(done)
    hand.fail(failed, ErrorKind.PERMANENT)
    assert "done already" in refused(api.post(f"/jobs/{done.job_id}/cancel"), 409, "job_ended")
    refused(api.post(f"/jobs/{failed.job_id}/cancel"), 409, "job_ended")


def test_a_waiting_job_gets_another_priority(api: Running) -> None:
    job_id = api.submit()
    answer = api.post(f"/jobs/{job_id}/priority", json={"priority": "HIGH"})
    assert (answer.status_code, answer.json()) == (
        200,
        {"job_id": job_id, "status": "pending", "priority": 50, "before": 0},
    )
    assert api.get(f"/jobs/{job_id}").json()["priority"] == 50
    assert history(api.db, job_id)[-1] == "job.priority"
    bodies: list[Any] = [{}, [], {"priority": 101}, {"priority": "URGENT"}, {"priority": 1.5}, {"priority": 1, "x": 1}]
    for wrong in bodies:
        refused(api.post(f"/jobs/{job_id}/priority", json=wrong), 422, "invalid_input")
    hire(api.db).claim(job_id)
    assert "claimed" in refused(api.post(f"/jobs/{job_id}/priority", json={"priority": 1}), 409, "job_not_waiting")
    assert api.get(f"/jobs/{job_id}").json()["priority"] == 50
    refused(api.post("/jobs/nobody/priority", json={"priority": 1}), 404, "job_not_found")


NAMES = ["nobody", "x" * 129, "a%20b", "%00", "..%2f", "job%0a", "%F0%9F%92%A5", "%FF", "a'--"]


@pytest.mark.parametrize("verb", ["cancel", "retry"])
def test_a_job_that_cannot_exist_is_not_found(maria_api: Running, verb: str) -> None:
    """BI-6."""
    for name in NAMES:
        answer = maria_api.post(f"/jobs/{name}/{verb}")
        assert answer.status_code == 404, (name, answer.text)
    assert maria_api.get(f"/jobs/x/{verb}").status_code == 405


def test_redis_away_does_not_fail_a_cancel(
    maria_db, run_api: Callable[..., Running], private_server: Callable[[type[Redis]], Redis]
) -> None:
    redis = private_server(Redis)
    api = run_api(database_url=maria_db.settings.database_url, redis_url=redis.url, redis_timeout_s=20.0)
    hand = hire(api.db)
    claims = hand.claim(*[api.submit() for _ in range(6)])
    os.kill(redis.pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        answers = [api.post(f"/jobs/{claim.job_id}/cancel") for claim in claims[:3]]
        assert {answer.status_code for answer in answers} == {202}
        assert time.monotonic() - started < 20.0, "nobody waits for the bell"
    finally:
        os.kill(redis.pid, signal.SIGCONT)
    redis.kill()
    assert {api.post(f"/jobs/{claim.job_id}/cancel").status_code for claim in claims[3:]} == {202}
    assert {job.cancel_requested_at is not None for job in rows(api.db, schema.jobs)} == {True}


def test_one_bell_serves_all_who_ask_while_it_is_about_to_ring(
    maria_api: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen Redis must not be owed one message for each of a thousand cancels."""
    rung, frozen = [], [True]

    def slow(what: str) -> None:
        rung.append(what)
        wait_until(lambda: not frozen, what="thawed")
        raise RedisUnavailable("away")

    monkeypatch.setattr(maria_api.orchestrator.hub, "ring", slow)
    teller = maria_api.backend.teller
    teller.ring()
    wait_until(lambda: rung, what="the first bell")
    for _ in range(1000):
        teller.ring()
    assert teller._waiting == 2
    frozen.clear()
    wait_until(lambda: teller._waiting == 0, what="all told")
    assert rung == ["look"] * 2
    teller.ring()
    wait_until(lambda: len(rung) == 3, what="it rings again")


# --- retry ---


def bury(api: Running, **fields: Any) -> str:
    hand = hire(api.db)
    (claim,) = hand.claim(api.submit(max_attempts=1, **fields))
    hand.fail(claim)
    return claim.job_id


def test_a_dead_letter_is_started_over_and_announced(api: Running, redis_server: Redis) -> None:
    job_id = bury(api)
    with redis_server.client() as client:
        wait_until(lambda: client.xlen(DLQ) == 1, what="the stream was told")
        wait_until(lambda: rows(api.db, schema.dead_letters)[0].entry_id, what="and that is known")
        answer = api.post(f"/jobs/{job_id}/retry")
        assert (answer.status_code, answer.json()) == (200, {"job_id": job_id, "status": "pending", "redrives": 1})
        wait_until(lambda: client.xlen(DLQ) == 0, what="taken back")
        wait_until(lambda: row(api.db, job_id).queued == "announced", what="announced")
    assert rows(api.db, schema.dead_letters) == []
    assert hire(api.db).claim(job_id)[0].attempt == 2


def test_failed_and_cancelled_jobs_may_be_started_over_too(api: Running) -> None:
    hand = hire(api.db)
    (claim,) = hand.claim(api.submit())
    hand.fail(claim, ErrorKind.PERMANENT)
    waiting = api.submit()
    api.post(f"/jobs/{waiting}/cancel")
    for job_id in (claim.job_id, waiting):
        assert api.post(f"/jobs/{job_id}/retry").status_code == 200
        job = api.get(f"/jobs/{job_id}").json()
        assert (job["status"], job["redrives"], job["cancel_requested_at"]) == ("pending", 1, None)


@pytest.mark.parametrize("state", ["pending", "claimed", "running", "done", "skipped"])
def test_other_jobs_are_not(api: Running, state: str) -> None:
    """BI-23."""
    job_id = api.submit()
    # Owned by somebody alive: the leader would take it from anybody else.
    set_job(api.db, job_id, status=state, redrives=1, worker_id=hire(api.db).worker_id)
    assert state in refused(api.post(f"/jobs/{job_id}/retry"), 409, "not_redrivable")


def test_a_job_is_started_over_only_so_often(db, run_api: Callable[..., Running]) -> None:
    api = run_api(database_url=str(db.settings.database_url), redrive_max=1)
    job_id = bury(api)
    assert api.post(f"/jobs/{job_id}/retry").status_code == 200
    refused(api.post(f"/jobs/{job_id}/retry"), 409, "not_redrivable")
    hand = hire(api.db)
    (claim,) = hand.claim(job_id)
    hand.fail(claim)
    assert "1 times" in refused(api.post(f"/jobs/{job_id}/retry"), 409, "redrive_limit")


# --- everything that failed ---


def fail(api, *job_ids: str, status: str = "failed") -> None:
    for job_id in job_ids:
        api.submit(job_id=job_id)
    rows = update(schema.jobs).where(schema.jobs.c.job_id.in_(job_ids))
    over = {"status": status, "queued": None, "attempt": 1, "attempts": 1}
    api.db.write(lambda conn: conn.execute(rows.values(**over)))


def test_all_that_failed_is_started_over(api):
    fail(api, "a", "b")
    looked = api.post("/jobs/retry_failed", {"filter": {}, "dry_run": True}).json()
    assert looked == {
        "matched": 2,
        "exhausted": 0,
        "redriven": 0,
        "dry_run": True,
        "would_be": 2,
        "sample": ["a", "b"],
    }
    answer = api.post("/jobs/retry_failed", {"filter": {"status": "failed"}, "max": 1})
    assert answer.status_code == 200
    assert answer.json() == {"matched": 2, "exhausted": 0, "redriven": 1, "dry_run": False}
    assert (api.get("/jobs/a").json()["status"], api.get("/jobs/b").json()["status"]) == ("pending", "failed")
    # One in so many seconds: the first now, the next when nobody looks any more.
    fail(api, "c")
    assert api.post("/jobs/retry_failed", {"filter": {}, "rate": 0.01}).json()["redriven"] == 2
    assert [api.get(f"/jobs/{job_id}").json()["not_before"] is None for job_id in ("b", "c")] == [True, False]


def test_what_to_start_over_must_be_said(maria_api):
    bodies: list[dict] = [{}, {"filter": {"status": "done"}}, {"filter": {}, "max": 0}, {"filter": {}, "rate": 0}]
    for body in (*bodies, {"filters": {}}):
        assert maria_api.post("/jobs/retry_failed", body).status_code == 422, body
