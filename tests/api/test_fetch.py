"""HTTP workers and their jobs: dispatchable, claim, heartbeat, complete, fail."""

import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from orchestrator.store import dispatch, nodes, schema
from orchestrator.store.claim import claim_jobs
from orchestrator.store.dialect import utc_shift
from orchestrator.store.moves import Claimant
from orchestrator.store.settle import take_from_dead
from tests.api.conftest import Running
from tests.factories import POLICY, active_leases, gpu, hire, history, row, rows
from tests.fetching import Puppet, refused, register
from tests.waiting import wait_until


def ids(jobs: list[dict[str, Any]]) -> list[str]:
    return [job["job_id"] for job in jobs]


# --- dispatchable ---


def test_what_could_be_claimed_is_listed_in_order_and_stays(api: Running) -> None:
    late, early = api.submit(priority="LOW"), api.submit(priority="HIGH", type="big", min_memory_mb=7)
    api.submit(earliest_start_at="2999-01-01T00:00:00Z")
    api.submit(pool_id="other")
    assert ids(api.get("/jobs/dispatchable").json()["jobs"]) == [early, late]
    jobs = api.get("/jobs/dispatchable").json()["jobs"]
    assert ids(jobs) == [early, late]
    assert (jobs[0]["type"], jobs[0]["priority"] > 0, jobs[0]["min_memory_mb"]) == ("big", True, 7)
    assert 0 <= jobs[0]["waiting_seconds"] < 30
    assert ids(api.get("/jobs/dispatchable?types=echo,other&limit=1").json()["jobs"]) == [late]
    assert api.get("/jobs/dispatchable?pool_id=empty").json() == {"jobs": []}


def test_questions_that_make_no_sense_are_refused(maria_api: Running) -> None:
    for query in ("types=a,,b", "types=", "types=a%20b", "limit=0", "limit=1000", "pool_id=%7B%7D", "kind=x"):
        refused(maria_api.get(f"/jobs/dispatchable?{query}"), 422, "invalid_input")


# --- claim ---


def test_a_claimed_job_comes_with_all_that_is_needed_to_run_it(api: Running) -> None:
    hire(api.db, gpu())
    puppet = register(api, node_id="node-1", pid=4711)
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    body = {
        "type": "echo",
        "payload": {"text": "für Elise\u2028"},
        "agent": "me",
        "model_id": "m",
        "max_runtime_sec": 9,
    }
    answer = api.post("/jobs/submit", body | {"min_memory_mb": 100}, headers={"traceparent": trace})
    job = puppet.one()
    lease = job.pop("lease")
    assert job == {
        "job_id": answer.json()["job_id"],
        "attempt": 1,
        "type": "echo",
        "payload": body["payload"],
        "agent": "me",
        "model_id": "m",
        "max_runtime_sec": 9,
        "trace_context": trace,
    }
    assert lease.pop("expires_at").endswith("Z")
    assert lease == {"mode": "gpu", "gpu_uuid": "GPU-0", "gpu_uuids": ["GPU-0"], "gpu_index": 0, "node_id": "node-1"}
    (held,) = active_leases(api.db)
    assert (held.worker_id, held.pid, held.memory_mb) == (puppet.worker_id, 4711, 100)
    assert row(api.db, job["job_id"]).status == "claimed"


def test_a_job_whose_claim_breaks_keeps_no_other_from_its_worker(
    maria_api: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    puppet = register(maria_api)
    good, bad, other = maria_api.submit(), maria_api.submit(max_attempts=1), maria_api.submit()
    announced(maria_api, good, bad, other)

    def claim(conn: Any, by: Any, job_ids: list[str], *given: Any, **named: Any) -> Any:
        if bad in job_ids:
            raise IndexError("tuple index out of range")
        return claim_jobs(conn, by, job_ids, *given, **named)

    monkeypatch.setattr(dispatch, "claim_jobs", claim)
    assert ids(puppet.claim(4)) == [good, other]
    assert row(maria_api.db, bad).status == "dead_letter"
    assert "it cannot be claimed: IndexError" in maria_api.get(f"/jobs/{bad}/explain").json()["message"]
    assert row(maria_api.db, good).attempts == 1
    assert puppet.claim(4) == []


def announced(api: Running, *job_ids: str) -> None:
    """Whoever announces them holds their rows, and a claim leaves held rows to the next."""
    wait_until(lambda: {row(api.db, job_id).queued for job_id in job_ids} == {"announced"}, what="announced")


def test_jobs_come_in_order_no_more_than_asked_for_nor_than_there_are_slots(api: Running) -> None:
    puppet = register(api, slots=3)
    low, normal, high = api.submit(priority="LOW"), api.submit(), api.submit(priority="HIGH")
    announced(api, low, normal, high)
    (first,) = puppet.claim(1)
    others = puppet.claim(2)
    assert ids([first, *others]) == [high, normal, low]
    announced(api, *[api.submit() for _ in range(5)])
    assert puppet.claim(100) == []
    for job in (first, *others):
        assert puppet.complete(job).status_code == 200
    assert len(puppet.claim(100)) == 3


def test_other_types_and_other_pools_are_left_alone(maria_api: Running) -> None:
    puppet = register(maria_api, types=["mine"])
    mine, other = maria_api.submit(type="mine"), maria_api.submit(type="other")
    elsewhere = maria_api.submit(type="mine", pool_id="gold")
    announced(maria_api, mine, other, elsewhere)
    assert ids(puppet.claim(4)) == [mine]
    assert [row(maria_api.db, job_id).queued is None for job_id in (other, elsewhere)] == [False, False]
    assert row(maria_api.db, other).wait_reason is None


@pytest.mark.parametrize("node", [None, "unknown"])
def test_without_gpus_only_jobs_that_can_do_without_are_taken(api: Running, node: str | None) -> None:
    """A worker that names no node must not be given the GPUs of somebody else's."""
    hire(api.db, gpu())
    puppet = register(api, **({"node_id": node} if node else {}))
    needs, plain = api.submit(min_memory_mb=100), api.submit(min_memory_mb=0)
    falls_back = api.submit(min_memory_mb=100, cpu_fallback=True)
    announced(api, needs, plain, falls_back)
    jobs = puppet.claim(4)
    assert ids(jobs) == [plain, falls_back]
    assert [(job["lease"] or {}).get("mode") for job in jobs] == [None, "cpu"]
    assert jobs[1]["lease"]["node_id"] == node
    assert jobs[1]["lease"]["gpu_uuids"] == []
    assert row(api.db, needs).status == "pending"
    assert [lease.gpu_index for lease in active_leases(api.db)] == [None]


def test_a_job_that_finds_no_room_is_put_off_with_the_reason(api: Running) -> None:
    hire(api.db, gpu(total_mb=1000))
    puppet = register(api, node_id="node-1")
    small, large = api.submit(min_memory_mb=800), api.submit(min_memory_mb=800)
    announced(api, small, large)
    assert ids(puppet.claim(2)) == [small]
    job = row(api.db, large)
    assert (job.status, job.queued) == ("pending", "delayed")
    assert "free" in job.wait_reason


def test_jobs_nobody_can_run_do_not_stand_before_the_others(maria_api: Running) -> None:
    many = [{"type": "unknown", "payload": {}} for _ in range(2 * dispatch.DEPTH + 8)]
    assert maria_api.post("/jobs/submit_batch", {"jobs": many}).json()["refused"] == 0
    mine = maria_api.submit()
    puppet = register(maria_api)
    assert ids(puppet.claim(1, wait_seconds=20)) == [mine]
    deferred = [job for job in rows(maria_api.db, schema.jobs) if job.wait_reason]
    assert deferred and all("no handler" in job.wait_reason for job in deferred)


def test_jobs_that_others_can_run_are_theirs(maria_api: Running) -> None:
    hire(maria_api.db)  # runs echo
    many = [{"type": "echo", "payload": {}} for _ in range(2 * dispatch.DEPTH)]
    maria_api.post("/jobs/submit_batch", {"jobs": many})
    puppet = register(maria_api, types=["mine"])
    assert puppet.claim(4) == []
    assert not any(job.wait_reason for job in rows(maria_api.db, schema.jobs))


def claim_together(
    puppets: list[Puppet], count: int, most: int, then: Callable[[Puppet, dict[str, Any]], None] = lambda *_: None
) -> list[str]:
    """All claim at once until so many were claimed: a claim that finds none may have met rows in somebody's hands."""
    got: list[str] = []

    def work(puppet: Puppet) -> None:
        def enough() -> bool:
            jobs = puppet.claim(most)
            got.extend(ids(jobs))
            for job in jobs:
                then(puppet, job)
            return len(got) >= count

        wait_until(enough, what=lambda: f"{count} jobs: {len(got)} were claimed")

    with ThreadPoolExecutor(len(puppets)) as threads:
        list(threads.map(work, puppets))
    return got


@pytest.mark.embedded_too
def test_many_workers_at_once_get_every_job_once(api: Running) -> None:
    puppets = [register(api, slots=100) for _ in range(4)]
    wanted = api.post("/jobs/submit_batch", {"jobs": [{"type": "echo", "payload": {}} for _ in range(80)]}).json()

    def complete(puppet: Puppet, job: dict[str, Any]) -> None:
        assert puppet.complete(job).status_code == 200

    got = claim_together(puppets, 80, 7, complete)
    assert sorted(got) == sorted(job["job_id"] for job in wanted["jobs"])
    assert {job.attempt for job in rows(api.db, schema.jobs)} == {1}


def test_two_orchestrators_share_the_jobs(maria_db: Any, run_api: Callable[..., Running]) -> None:
    url = str(maria_db.settings.database_url)
    apis = [run_api(database_url=url) for _ in range(2)]
    puppets = [register(api, slots=100) for api in apis for _ in range(2)]
    apis[0].post("/jobs/submit_batch", {"jobs": [{"type": "echo", "payload": {}} for _ in range(80)]})
    got = claim_together(puppets, 80, 5)
    assert (len(got), len(set(got))) == (80, 80)


def test_a_claim_waits_for_a_job_and_no_longer_than_it_said(maria_api: Running) -> None:
    puppet = register(maria_api)
    assert puppet.claim(wait_seconds=0.1) == []
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(puppet.claim, wait_seconds=20)
        wait_until(lambda: len(maria_api.backend.openings) == 1, what="it waits")
        assert maria_api.get("/livez").status_code == 200  # the event loop is free
        job_id = maria_api.submit()
        assert ids(waiting.result(10)) == [job_id]
    assert len(maria_api.backend.openings) == 0


def test_a_claim_says_why_there_is_none_and_waits_until_there_is(api: Running) -> None:
    api.post("/workers/pool", {"pool_id": "gold"})
    puppet, job_id = register(api, pool_id="gold"), api.submit(pool_id="gold")
    api.post("/control/evict_pool", {"pool_id": "gold"})
    claim = {"worker_id": puppet.worker_id}
    closed = {"jobs": [], "closed": "pool gold is evicted"}
    assert api.post("/jobs/claim", claim).json() == closed
    assert api.post("/jobs/claim", claim | {"wait_seconds": 0.2}).json() == closed
    api.post("/workers/pool", {"pool_id": "gold"})
    assert ids(api.post("/jobs/claim", claim | {"wait_seconds": 20}).json()["jobs"]) == [job_id]


def test_the_longest_wait_is_the_servers(maria_db: Any, run_api: Callable[..., Running]) -> None:
    api = run_api(database_url=str(maria_db.settings.database_url), wait_max_s=0.1)
    assert register(api).claim(wait_seconds=3600) == []


def test_one_job_does_not_wake_everybody(maria_api: Running) -> None:
    puppets = [register(maria_api) for _ in range(6)]
    with ThreadPoolExecutor(6) as threads:
        waiting = [threads.submit(puppet.claim, wait_seconds=20) for puppet in puppets]
        wait_until(lambda: len(maria_api.backend.openings) == 6, what="all wait")
        maria_api.submit()
        wait_until(lambda: any(one.done() for one in waiting), what="one got it")
        assert len(maria_api.backend.openings) >= 4
        maria_api.backend.openings.close()
        assert sorted(len(one.result(10)) for one in waiting) == [0, 0, 0, 0, 0, 1]


def test_who_goes_while_waiting_claims_nothing(maria_api: Running) -> None:
    puppet, url = register(maria_api), maria_api.http.base_url
    body = json.dumps({"worker_id": puppet.worker_id, "wait_seconds": 60})
    with socket.create_connection((url.host, url.port), timeout=10) as connection:
        head = f"POST /jobs/claim HTTP/1.1\r\nHost: {url.host}:{url.port}\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        wait_until(lambda: len(maria_api.backend.openings) == 1, what="it waits")
    wait_until(lambda: len(maria_api.backend.openings) == 0, what="nobody waits any more")
    job_id = maria_api.submit()
    assert row(maria_api.db, job_id).status == "pending"
    assert puppet.one()["job_id"] == job_id


def test_what_was_claimed_for_somebody_who_went_is_handed_back(maria_api: Running, monkeypatch: Any) -> None:
    """The answer comes when nobody is there to hear it; the worker lives on and will never speak of the job."""
    puppet, job_id = register(maria_api), maria_api.submit()
    claims, gone = maria_api.orchestrator.remote._claims, threading.Event()
    flush = claims._flush
    monkeypatch.setattr(claims, "_flush", lambda items: gone.wait(10) and flush(items))
    with pytest.raises(httpx.ReadTimeout):
        maria_api.post("/jobs/claim", {"worker_id": puppet.worker_id}, timeout=httpx.Timeout(5, read=0.2))
    wait_until(lambda: not maria_api.server.server_state.connections, what="the server knows")
    gone.set()
    wait_until(lambda: history(maria_api.db, job_id)[-1] == "job.handed_back", what="it is handed back")
    assert (row(maria_api.db, job_id).status, row(maria_api.db, job_id).attempts) == ("pending", 0)


def test_what_was_claimed_too_late_for_an_answer_is_handed_back(
    maria_db: Any, run_api: Callable[..., Running], monkeypatch: Any
) -> None:
    """The database took longer than the request may: the client has its 503 when the claim is committed."""
    api = run_api(database_url=str(maria_db.settings.database_url), db_timeout_s=1.0)
    puppet, job_id = register(api), api.submit()
    claims, answered = api.orchestrator.remote._claims, threading.Event()
    flush = claims._flush
    monkeypatch.setattr(claims, "_flush", lambda items: answered.wait(10) and flush(items))
    refused(puppet.ask(), 503, "database_unavailable")
    answered.set()
    wait_until(lambda: history(api.db, job_id)[-1] == "job.handed_back", what="it is handed back")
    assert ids(puppet.claim(wait_seconds=10)) == [job_id]


def test_a_claim_that_is_wrong_takes_nothing(maria_api: Running) -> None:
    puppet, job_id = register(maria_api), maria_api.submit()
    for wrong in (
        {"max": 0},
        {"max": 101},
        {"max": "1"},
        {"wait_seconds": -1},
        {"wait_seconds": "1"},
        {"types": ["x"]},
    ):
        refused(puppet.ask(**{"most": 1} | wrong), 422, "invalid_input")
    refused(maria_api.post("/jobs/claim", {}), 422, "invalid_input")
    assert row(maria_api.db, job_id).status == "pending"


# --- heartbeat ---


def test_the_first_sign_marks_it_running_and_tells_its_progress(api: Running) -> None:
    puppet, job_id = register(api), api.submit()
    job = puppet.one()
    for said in ({"progress": 0.25, "note": "a quarter"}, {"progress": 1.0}, {}):
        assert puppet.sign(job, **said).json() == {"job_id": job_id, "cancel_requested": False}
    record = api.get(f"/jobs/{job_id}").json()
    assert (record["status"], record["progress"], record["progress_note"]) == ("running", 1.0, "a quarter")
    assert history(api.db, job_id) == ["job.submitted", "job.claimed", "job.running"]


def test_a_sign_brings_news_of_a_cancel(api: Running) -> None:
    puppet, job_id = register(api), api.submit()
    job = puppet.one()
    assert api.post(f"/jobs/{job_id}/cancel").status_code == 202
    assert puppet.sign(job).json()["cancel_requested"] is True
    assert row(api.db, job_id).status == "running"  # until its worker says that it has stopped
    assert "cancelled" in refused(puppet.fail(job, "stopped"), 409, "job_cancelled")
    assert row(api.db, job_id).status == "cancelled"


# --- complete and fail ---


def test_a_job_is_done_once_and_the_same_again_is_fine(api: Running) -> None:
    hire(api.db, gpu())
    puppet, job_id = register(api, node_id="node-1"), api.submit(min_memory_mb=100)
    job = puppet.one()
    for result in ({"b": 1, "a": [None, "ü"]}, {"other": 2}):
        answer = puppet.complete(job, result, run_seconds=1.5)
        assert (answer.status_code, answer.json()) == (200, {"job_id": job_id, "status": "done"})
    stored = api.get(f"/jobs/{job_id}/result").json()
    assert (stored["result"], stored["run_seconds"]) == ({"b": 1, "a": [None, "ü"]}, 1.5)
    assert history(api.db, job_id) == ["job.submitted", "job.claimed", "job.done"]
    assert active_leases(api.db) == []
    assert [g.leased_mb for g in rows(api.db, schema.gpus)] == [0]
    refused(puppet.fail(job), 409, "not_owner")
    refused(puppet.sign(job), 409, "not_owner")


@pytest.mark.parametrize(
    ("said", "status", "kind"),
    [
        ({}, "pending", "transient"),
        ({"kind": "transient", "retry_after_seconds": 0}, "pending", "transient"),
        ({"kind": "permanent"}, "failed", "permanent"),
        ({"skipped": True}, "skipped", None),
    ],
)
def test_a_failure_leads_where_its_kind_says(api: Running, said: dict[str, Any], status: str, kind: str) -> None:
    puppet, job_id = register(api), api.submit()
    job = puppet.one()
    assert puppet.fail(job, "no luck", **said).json() == {"job_id": job_id, "status": status}
    found = row(api.db, job_id)
    assert (found.status, found.error_kind, found.last_error) == (status, kind, "no luck")
    if said.get("retry_after_seconds") == 0:
        (second,) = puppet.claim(wait_seconds=10)
        assert second["attempt"] == 2
        refused(puppet.complete(job), 409, "not_owner")


def test_the_last_attempt_that_fails_is_a_dead_letter(maria_api: Running) -> None:
    puppet, job_id = register(maria_api), maria_api.submit(max_attempts=1)
    job = puppet.one()
    for _ in range(2):  # the answer may get lost
        assert puppet.fail(job).json() == {"job_id": job_id, "status": "dead_letter"}
    assert [letter["job_id"] for letter in maria_api.get("/dlq").json()["dead_letters"]] == [job_id]


def test_after_a_cancel_no_result_counts_however_often_it_comes(api: Running) -> None:
    puppet, job_id = register(api), api.submit()
    job = puppet.one()
    puppet.sign(job)
    api.post(f"/jobs/{job_id}/cancel")
    for _ in range(2):
        refused(puppet.complete(job, {"late": True}), 409, "job_cancelled")
    refused(puppet.fail(job), 409, "job_cancelled")
    assert row(api.db, job_id).status == "cancelled"
    assert rows(api.db, schema.results) == []
    assert history(api.db, job_id).count("job.cancelled") == 1


def test_nobody_ends_what_is_not_theirs(api: Running) -> None:
    hire(api.led().db, gpu())
    owner, other, hand = register(api, node_id="node-1"), register(api, node_id="node-1"), hire(api.db)
    api.submit(min_memory_mb=100)
    job = owner.one()
    ours = api.submit(type="ours", pool_id="ours")
    (claim,) = hand.claim(ours)
    before = rows(api.db, schema.jobs), rows(api.db, schema.leases), rows(api.db, schema.audit)
    wrong_attempt = job | {"attempt": 2}
    strange = {"job_id": ours, "attempt": claim.attempt}
    for puppet, what in (
        (owner, wrong_attempt),
        (other, job),
        (Puppet(api, "nobody"), job),
        (owner, strange),
        (Puppet(api, hand.worker_id), strange),  # the very owner, but it does not come over HTTP
    ):
        for report in (puppet.sign, puppet.complete, puppet.fail):
            assert "nothing was written" in refused(report(what), 409, "not_owner")
    for report in (owner.sign, owner.complete, owner.fail):
        refused(report({"job_id": "unknown", "attempt": 1}), 404, "job_not_found")
        refused(report({"job_id": "no name", "attempt": 1}), 404, "job_not_found")
    assert (rows(api.db, schema.jobs), rows(api.db, schema.leases), rows(api.db, schema.audit)) == before
    assert owner.complete(job).status_code == 200


def test_a_pending_job_is_nobodys(maria_api: Running) -> None:
    puppet, job_id = register(maria_api), maria_api.submit()
    job = puppet.one()
    puppet.fail(job, kind="transient", retry_after_seconds=1000)
    for report in (puppet.sign, puppet.complete, puppet.fail):
        assert "pending" in refused(report(job), 409, "not_owner")
    assert row(maria_api.db, job_id).status == "pending"


def test_one_that_is_refused_does_not_fail_its_neighbours(api: Running) -> None:
    """They share a transaction: a burst in which every third report is wrong, and some come twice."""
    puppet = register(api, slots=24)
    api.post("/jobs/submit_batch", {"jobs": [{"type": "echo", "payload": {}} for _ in range(24)]})
    jobs = [job | {"attempt": 1 + (n % 3 == 0)} for n, job in enumerate(puppet.all(24))]
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(puppet.complete, [job for job in jobs for _ in range(2)]))
    assert [answer.status_code for answer in answers] == [409 if n // 2 % 3 == 0 else 200 for n in range(48)]
    assert len(rows(api.db, schema.results)) == 16


def test_results_are_bounded_like_those_of_slots(maria_db: Any, run_api: Callable[..., Running]) -> None:
    api = run_api(database_url=str(maria_db.settings.database_url), payload_max_bytes=1000, payload_max_depth=5)
    puppet, job_id = register(api), api.submit()
    job = puppet.one()
    deep: list[Any] = []
    for _ in range(5):
        deep = [deep]
    refused(puppet.complete(job, "x" * 999), 413, "payload_too_large")
    refused(puppet.complete(job, "x" * 80_000), 413, "payload_too_large")
    refused(puppet.complete(job, deep), 422, "invalid_input")
    for _ in range(2):
        refused(send(api, job, b'{"a": 1' * 20_000, chunked=True), 413, "payload_too_large")
    assert row(api.db, job_id).status == "claimed"
    assert puppet.complete(job, "x" * 998).status_code == 200


def test_a_hundred_megabytes_are_refused_before_they_arrive(maria_api: Running) -> None:
    puppet, _ = register(maria_api), maria_api.submit()
    job = puppet.one()
    url = maria_api.http.base_url
    with socket.create_connection((url.host, url.port), timeout=10) as connection:
        head = f"POST /jobs/{job['job_id']}/complete HTTP/1.1\r\nHost: {url.host}:{url.port}\r\n"
        connection.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {100 * 2**20}\r\n\r\n{{".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")
    assert puppet.complete(job).status_code == 200


def send(
    api: Running, job: dict[str, Any], raw: bytes, *, chunked: bool = False, what: str = "complete"
) -> httpx.Response:
    content: Any = iter([raw]) if chunked else raw
    path = f"/jobs/{job['job_id']}/{what}"
    return api.http.post(path, content=content, headers={"content-type": "application/json"})


def test_reports_that_make_no_sense_change_nothing(maria_api: Running) -> None:
    puppet, job_id = register(maria_api), maria_api.submit()
    job = puppet.one()
    proof = json.dumps({"worker_id": puppet.worker_id, "attempt": 1})[1:-1]
    for raw in (b"", b"no json", f'{{{proof}, "result": NaN}}', f'{{{proof}, "result": 1, "result": 2}}', b"\xff\xfe"):
        refused(send(maria_api, job, raw.encode() if isinstance(raw, str) else raw), 400, "malformed_body")
    for wrong in (
        {"attempt": 0},
        {"attempt": "1"},
        {"attempt": True},
        {"worker_id": "a b"},
        {"run_seconds": -1},
        {"x": 1},
    ):
        refused(puppet.complete(job, **wrong), 422, "invalid_input")
    refused(puppet.report("complete", job, {}), 422, "invalid_input")  # a result may be null, but not left out
    for failure in (
        {"kind": "fatal"},
        {"retry_after_seconds": -1},
        {"skipped": 1},
        {"skipped": True, "kind": "permanent"},
    ):
        refused(puppet.fail(job, **failure), 422, "invalid_input")
    refused(puppet.fail(job, "x" * 16_385), 422, "invalid_input")
    half_a_pair = f'{{{proof}, "error": "\\ud800"}}'.encode()
    refused(send(maria_api, job, half_a_pair, what="fail"), 422, "invalid_input")
    for sign in ({"progress": 1.1}, {"progress": -0.1}, {"progress": "half"}, {"note": "x" * 256}):
        refused(puppet.sign(job, **sign), 422, "invalid_input")
    found = row(maria_api.db, job_id)
    assert (found.status, found.progress) == ("claimed", None)
    assert puppet.complete(job).status_code == 200


# --- races and losses ---


def test_an_end_and_the_declaration_of_loss_do_not_both_count(api: Running) -> None:
    """Whoever comes first decides, and the other changes nothing."""
    puppet = register(api, slots=30)
    api.post("/jobs/submit_batch", {"jobs": [{"type": "echo", "payload": {}} for _ in range(30)]})
    jobs = puppet.all(30)
    start = threading.Barrier(2)
    dead = Claimant(puppet.worker_id, "(none)", "default")

    def declare() -> int:
        start.wait()
        taken = [api.db.write(lambda conn: take_from_dead(conn, dead, POLICY, 5)) for _ in range(6)]
        return sum(item.arrow is not None for settled in taken for item in settled)

    def complete() -> list[int]:
        start.wait()
        return [puppet.complete(job, job["job_id"]).status_code for job in jobs]

    with ThreadPoolExecutor(2) as threads:
        lost, ended = threads.submit(declare), threads.submit(complete)
        taken, codes = lost.result(), ended.result()
    done = {job["job_id"] for job, code in zip(jobs, codes, strict=True) if code == 200}
    assert {job["job_id"]: row(api.db, job["job_id"]).status for job in jobs} == {
        job["job_id"]: "done" if job["job_id"] in done else "pending" for job in jobs
    }
    assert set(codes) <= {200, 409}
    assert (len(done) + taken, len(rows(api.db, schema.results))) == (30, len(done))


def test_a_silent_worker_is_lost_and_its_jobs_are_run_by_another(api: Running) -> None:
    silent, other = register(api), register(api)
    job_id = api.submit()
    job = silent.one()
    change = schema.workers.update().where(schema.workers.c.worker_id == silent.worker_id)
    api.db.write(lambda conn: conn.execute(change.values(last_heartbeat=utc_shift(-60.0))))
    assert [w.worker_id for w in api.db.write(lambda conn: nodes.declare_lost(conn, 30.0, 10))] == [silent.worker_id]
    (again,) = other.claim(wait_seconds=20)
    assert (again["job_id"], again["attempt"]) == (job_id, 2)
    refused(silent.complete(job), 409, "not_owner")
    assert other.complete(again).status_code == 200
