"""GET /jobs…"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import httpx
import pytest

from orchestrator.api import waiters
from orchestrator.jobs import ErrorKind
from orchestrator.policies import Scope, parse
from orchestrator.store import paging, policies
from tests.api.conftest import Running
from tests.factories import Hand, done, failed, gpu, hire
from tests.waiting import wait_until

pytestmark = pytest.mark.embedded_too


def finish(hand: Hand, job_id: str, result: str = '{"answer":42}') -> None:
    [claim] = hand.claim(job_id)
    hand.record(ends=[done(claim, result)])


def test_a_record_is_whole_and_its_times_are_utc(api: Running) -> None:
    job_id = api.submit(payload={"x": [1]}, tags=["a", "b"], earliest_start_at="2999-01-01T01:00:00+01:00")
    record = api.get(f"/jobs/{job_id}").json()
    assert (record["status"], record["payload"], record["tags"]) == ("pending", {"x": [1]}, ["a", "b"])
    assert record["pool_id"] == "default"
    assert record["not_before"] == "2999-01-01T00:00:00.000000Z"
    age = datetime.now(UTC) - datetime.fromisoformat(record["created_at"])
    assert record["created_at"].endswith("Z") and abs(age.total_seconds()) < 60
    assert not {"payload_hash", "lease_token", "rank"} & record.keys()


def test_a_finished_job_shows_its_result(api: Running) -> None:
    job_id = api.submit()
    finish(hire(api.db), job_id)
    assert api.get(f"/jobs/{job_id}").json()["result"] == {"answer": 42}
    answer = api.get(f"/jobs/{job_id}/result")
    assert answer.json() == {"job_id": job_id, "status": "done", "result": {"answer": 42}, "run_seconds": 0.5}


def test_no_result_has_three_reasons(api: Running) -> None:
    waiting, broken = api.submit(), api.submit()
    hand = hire(api.db)
    [claim] = hand.claim(broken)
    hand.record(ends=[failed(claim, ErrorKind.PERMANENT)])
    seen = [
        (a.status_code, a.json()["code"]) for a in (api.get(f"/jobs/{i}/result") for i in (waiting, broken, "none"))
    ]
    assert seen == [(409, "result_not_ready"), (404, "result_not_found"), (404, "job_not_found")]


def test_events_tell_the_history(api: Running) -> None:
    job_id = api.submit()
    finish(hire(api.db), job_id)
    events = api.get(f"/jobs/{job_id}/events").json()["events"]
    assert [event["event_type"] for event in events] == ["job.submitted", "job.claimed", "job.done"]
    rest = api.get(f"/jobs/{job_id}/events", params={"after": events[0]["id"], "limit": 1}).json()["events"]
    assert rest == events[1:2]
    assert api.get("/jobs/none/events").json()["code"] == "job_not_found"


def test_names_no_job_can_have_are_not_found(api: Running) -> None:
    api.submit(job_id="a")
    for path in (
        "/jobs/a%20",
        "/jobs/a%0A",
        "/jobs/%2e%2e",
        "/jobs/a%00",
        "/jobs/" + "x" * 5000,
        "/jobs/%ff",
        "/jobs/A",
    ):
        answer = api.get(path)
        assert (answer.status_code, answer.json()["code"]) == (404, "job_not_found"), path


# --- pages ---


def test_pages_walk_all_jobs_once_newest_first(api: Running) -> None:
    ids = [api.submit() for _ in range(7)]
    same = api.post("/jobs/submit_batch", {"jobs": [{"type": "echo", "payload": {}}] * 6}).json()["jobs"]
    seen, cursor = [], None
    for _ in range(20):
        page = api.get("/jobs", params={"limit": 3} | ({"cursor": cursor} if cursor else {})).json()
        seen += page["jobs"]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert sorted(job["job_id"] for job in seen) == sorted(ids + [job["job_id"] for job in same])
    times = [job["created_at"] for job in seen]
    assert times == sorted(times, reverse=True)
    assert "payload" not in seen[0]


def test_pages_can_be_filtered(api: Running) -> None:
    one = api.submit(agent="alice", pool_id="gpu", type="sleep")
    two = api.submit(agent="bob")
    finish(hire(api.db), two)

    def ids(**params: str) -> list[str]:
        return [job["job_id"] for job in api.get("/jobs", params=params).json()["jobs"]]

    assert ids() == [two, one]
    assert ids(agent="alice") == ids(pool_id="gpu") == ids(type="sleep") == ids(status="pending") == [one]
    assert ids(status="done") == [two]
    assert ids(status="done", agent="alice") == []


def test_pages_can_be_of_a_tag(api: Running) -> None:
    tags = ["red", "RED", "é/ß 🦊", "100%", "100", 'a"b', "a&b=c+d", "x" * 128]
    alone = {tag: api.submit(tags=[tag]) for tag in tags}
    every = api.submit(tags=["other", *tags], agent="alice")
    api.submit(agent="alice")
    for tag in tags:
        found = api.get("/jobs", params={"tag": tag}).json()["jobs"]
        assert [job["job_id"] for job in found] == [every, alone[tag]], tag
        hers = api.get("/jobs", params={"tag": tag, "agent": "alice", "status": "pending"}).json()["jobs"]
        assert [(job["job_id"], job["tags"]) for job in hers] == [(every, ["other", *tags])], tag


def test_a_page_may_be_empty_before_the_end(api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paging, "WINDOW", 3)
    rare = api.submit(type="rare")
    for _ in range(7):
        api.submit()
    pages: list[list[str]] = []
    cursor = None
    while not pages or cursor is not None:
        params = {"type": "rare"} | ({"cursor": cursor} if cursor else {})
        page = api.get("/jobs", params=params).json()
        pages.append([job["job_id"] for job in page["jobs"]])
        cursor = page["next_cursor"]
    assert pages == [[], [], [rare]]


def test_the_interface_says_that_only_a_missing_cursor_is_the_end(api: Running) -> None:
    told = api.get("/openapi.json").json()["paths"]["/jobs"]["get"]["description"]
    assert "fewer rows than `limit`" in told and "null at the end, and only there" in told


def test_bad_pages_are_refused(api: Running) -> None:
    bad = [
        {"limit": "0"},
        {"limit": "-1"},
        {"limit": "501"},
        {"limit": "1000000000"},
        {"limit": "x"},
        {"cursor": "x"},
        {"cursor": "🙂"},
        {"cursor": "////"},
        {"cursor": "A" * 513},
        {"status": "unknown"},
        {"agent": "bob "},
        {"agent": "a' OR 1=1"},
        {"tag": ""},
        {"tag": "x" * 129},
        {"offset": "10"},
    ]
    for params in bad:
        answer = api.get("/jobs", params=params)
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_input"), params
        assert answer.json()["field"] == next(iter(params))


# --- waiting ---


def count_questions(api: Running, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What is asked for those who wait, from now on."""
    asked: list[list[str]] = []
    ask = api.backend.waiters._ask

    async def counting(job_ids: list[str]) -> set[str]:
        asked.append(job_ids)
        return await ask(job_ids)

    monkeypatch.setattr(api.backend.waiters, "_ask", counting)
    return asked


def test_a_long_poll_returns_as_soon_as_the_job_ends(api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id, hand = api.submit(), hire(api.db)
    asked = count_questions(api, monkeypatch)
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(api.get, f"/jobs/{job_id}", params={"wait": 20})
        wait_until(lambda: len(api.backend.waiters), what="somebody waits")
        finish(hand, job_id)
        before = len(asked)
        assert answer.result(10).json()["status"] == "done"
        # Counted by questions, not by a clock: a machine may be busy.
        assert (len(asked) - before) * waiters.POLL_S < 2.0


def test_a_long_poll_is_bounded_by_its_own_time_and_by_ours(api: Running, run_api: Callable[..., Running]) -> None:
    job_id = api.submit()
    short = run_api(database_url=api.db.settings.database_url, wait_max_s=0.3)
    for who, wait in ((api, 0.3), (short, 50)):
        started = time.monotonic()
        assert who.get(f"/jobs/{job_id}", params={"wait": wait}).json()["status"] == "pending"
        assert 0.25 < time.monotonic() - started < 5
        assert len(who.backend.waiters) == 0


def test_waiting_for_what_does_not_exist_ends_at_once(api: Running) -> None:
    started = time.monotonic()
    assert api.get("/jobs/none", params={"wait": 20}).status_code == 404
    assert time.monotonic() - started < 5


def test_bad_waits_are_refused(api: Running) -> None:
    job_id = api.submit()
    for wait in ("-1", "nan", "inf", "x", ""):
        assert api.get(f"/jobs/{job_id}", params={"wait": wait}).status_code == 422, wait


def test_many_waiters_share_one_question(api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, hand = [api.submit() for _ in range(3)], hire(api.db)
    asked = count_questions(api, monkeypatch)
    with ThreadPoolExecutor(30) as threads:
        answers = [threads.submit(api.get, f"/jobs/{ids[i % 3]}", params={"wait": 20}) for i in range(30)]
        wait_until(lambda: len(api.backend.waiters) == 30, what="all wait")
        wait_until(lambda: asked and sorted(asked[-1]) == sorted(ids), what="one question about all")
        for job_id in ids:
            finish(hand, job_id)
        assert {answer.result(10).json()["status"] for answer in answers} == {"done"}
    count = len(asked)
    poller = api.backend.waiters._poller
    assert poller is not None
    wait_until(poller.done, what="nobody asks when nobody waits")
    assert len(asked) - count <= 1


def test_a_client_that_leaves_waits_no_longer(api: Running) -> None:
    job_id = api.submit()
    with pytest.raises(httpx.ReadTimeout):
        api.get(f"/jobs/{job_id}", params={"wait": 50}, timeout=0.3)
    wait_until(lambda: len(api.backend.waiters) == 0, what="the waiter is removed")


def test_too_many_waiters_are_told_to_come_back(api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiters, "MAX_WAITERS", 0)
    answer = api.get(f"/jobs/{api.submit()}", params={"wait": 5})
    assert (answer.status_code, answer.json()["code"]) == (429, "overloaded")
    assert int(answer.headers["retry-after"]) >= 1


def test_a_poll_that_breaks_wakes_everybody_and_the_next_one_works(
    api: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = api.submit()

    async def boom(_ids: list[str]) -> set[str]:
        raise RuntimeError

    with monkeypatch.context() as patch:
        patch.setattr(api.backend.waiters, "_ask", boom)
        assert api.get(f"/jobs/{job_id}", params={"wait": 20}).status_code == 500
    assert api.get(f"/jobs/{job_id}", params={"wait": 0.1}).status_code == 200


def test_a_server_that_stops_does_not_wait_for_jobs(api: Running) -> None:
    job_id = api.submit()
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(api.get, f"/jobs/{job_id}", params={"wait": 50})
        wait_until(lambda: len(api.backend.waiters), what="somebody waits")
        api.server.should_exit = True
        # Whoever is still there when the server's grace is over gets no such answer.
        assert answer.result(20).json()["status"] == "pending"


def test_a_broken_handler_leaks_nothing(
    api: Running, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = api.submit()

    async def boom(*_args: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(api.backend, "read", boom)
    answer = api.get(f"/jobs/{job_id}")
    assert (answer.status_code, answer.json()["code"]) == (500, "internal_error")
    assert "secret" not in answer.text
    wait_until(lambda: "secret detail" in caplog.text and "Traceback" in caplog.text, what="the trace is logged")


def test_why_a_job_waits(api: Running) -> None:
    job_id = api.submit(min_memory_mb=100, priority="LOW")
    answer = api.get(f"/jobs/{job_id}/explain").json()
    assert (answer["status"], answer["reason"], answer["position"]) == ("pending", "no_worker", 1)
    assert answer["lasts"] is True
    assert answer["evidence"]["needed_mb"] == 100
    hire(api.db, gpu(total_mb=50))
    answer = api.get(f"/jobs/{job_id}/explain").json()
    assert answer["reason"] == "too_large" and "needs 100 MB" in answer["message"]
    assert [card["against"] for card in answer["evidence"]["gpus"]] == ["no_memory"]
    passing = api.get(f"/jobs/{api.submit()}/explain").json()
    assert passing["reason"] in {"in_line", "next"} and passing["lasts"] is False
    unknown = api.get("/jobs/nobody/explain")
    assert (unknown.status_code, unknown.json()["code"]) == (404, "job_not_found")


def test_a_job_shows_its_keys_and_what_it_waits_for(api: Running) -> None:
    policy = parse(Scope.CONCURRENCY, {"max": 0})
    api.db.write(lambda conn: policies.put(conn, Scope.CONCURRENCY, "host:*", policy))
    api.orchestrator.policies.expire()
    body = {"type": "echo", "payload": {}, "concurrency_keys": ["host:example.org"]}
    job_id = api.post("/jobs/submit", body).json()["job_id"]
    shown = api.get(f"/jobs/{job_id}").json()
    assert (shown["concurrency_keys"], shown["blocked_on"]) == (["host:example.org"], "cap:host:example.org")
    assert (shown["queued"], shown["wait_reason"]) == ("blocked", "cap host:example.org is full: 0 of 0 run")
    assert "held_caps" not in shown
    refused = api.post("/jobs/submit", body | {"concurrency_keys": ["agent:me"]})
    assert (refused.status_code, refused.json()["code"]) == (422, "invalid_input")
