"""/dlq"""

import json
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import insert

from orchestrator.api import bulk
from orchestrator.api.bulk import BulkRedrive
from orchestrator.jobs import ErrorKind
from orchestrator.store import audit, paging, schema
from tests.api.conftest import Running
from tests.api.test_job_actions import DLQ, refused
from tests.factories import hire, history, many_jobs, now, row, rows, set_job, status
from tests.servers import Redis
from tests.waiting import wait_until


def bury(api: Running, count: int = 1, kind: ErrorKind = ErrorKind.TRANSIENT, **fields: Any) -> list[str]:
    hand = hire(api.db)
    claims = hand.claim(*[api.submit(max_attempts=1, **fields) for _ in range(count)])
    for claim in claims:
        hand.fail(claim, kind, error="it broke\n<script>")
    return [claim.job_id for claim in claims]


def bury_many(api: Running, count: int) -> list[str]:
    many_jobs(api.db, count, status="dead_letter", queued=None, attempt=3, attempts=3)
    letters = [{"job_id": f"many-{i:06}", "reason": "timeout", "attempts": 3} for i in range(count)]
    api.db.write(lambda conn: conn.execute(insert(schema.dead_letters), letters))
    return [str(letter["job_id"]) for letter in letters]


def statuses(api: Running, ids: list[str]) -> list[str]:
    return [status(api.db, job_id) for job_id in ids]


# --- look ---


def test_letters_are_listed_latest_first_with_what_one_wants_to_know(api: Running) -> None:
    first, second = bury(api, 2, ErrorKind.TIMEOUT, agent="ann", pool_id="gold")
    body = api.get("/dlq").json()
    assert (body["total"], body["next_cursor"]) == (2, None)
    assert [letter["job_id"] for letter in body["dead_letters"]] == [second, first]
    letter = body["dead_letters"][0]
    assert letter.pop("buried_at").endswith("Z")
    job = {"job_id": second, "type": "echo", "agent": "ann", "pool_id": "gold", "redrives": 0}
    end = {"reason": "timeout", "attempts": 1, "origin_id": "", "last_error": "it broke\n<script>"}
    assert letter == job | end


def test_filters_and_pages(api: Running) -> None:
    ids = bury(api, 5) + bury(api, agent="bob") + bury(api, type="sleep", kind=ErrorKind.TIMEOUT)
    for params, found in (
        ({"agent": "bob"}, ids[5:6]),
        ({"type": "sleep", "reason": "timeout"}, ids[6:]),
        ({"job_id": ids[0]}, ids[:1]),
        ({"pool_id": "gold"}, []),
    ):
        body = api.get("/dlq", params=params).json()
        assert ([letter["job_id"] for letter in body["dead_letters"]], body["total"]) == (found, len(found)), params
    seen, cursor = [], None
    while True:
        body = api.get("/dlq", params={"limit": 3} | ({"cursor": cursor} if cursor else {})).json()
        seen += [letter["job_id"] for letter in body["dead_letters"]]
        assert body["total"] == 7
        if (cursor := body["next_cursor"]) is None:
            break
    assert seen == ids[::-1]


def test_a_page_may_be_empty_before_the_end(api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paging, "WINDOW", 3)
    (rare,) = bury(api, agent="bob")
    bury(api, 5)
    first = api.get("/dlq", params={"agent": "bob"}).json()
    assert (first["dead_letters"], first["total"], first["at_least"]) == ([], 1, False)
    rest = api.get("/dlq", params={"agent": "bob", "cursor": first["next_cursor"]}).json()
    assert ([letter["job_id"] for letter in rest["dead_letters"]], rest["next_cursor"]) == ([rare], None)


def test_whoever_changes_letters_looks_at_all_of_them_a_window_at_a_time(
    api: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paging, "WINDOW", 3)
    ids = bury(api, 5) + bury(api, 4, agent="bob") + bury(api, 4)
    set_job(api.db, ids[6], redrives=3)
    looked = api.post("/dlq/redrive", {"filter": {"agent": "bob"}, "dry_run": True, "max": 2}).json()
    assert (looked["matched"], looked["exhausted"], looked["sample"]) == (4, 1, [ids[5], ids[7]])
    # Counted no further than anybody wants to know, once there are enough to change.
    monkeypatch.setattr(bulk, "MOST_COUNTED", 4)
    purged = api.post("/dlq/purge", {"filter": {}, "max": 2}).json()
    assert (purged["matched"], purged["purged"]) == (4, 2)
    assert api.get(f"/jobs/{ids[1]}").status_code == 404 and api.get(f"/jobs/{ids[2]}").status_code == 200


QUESTIONS: list[dict[str, Any]] = [
    {"limit": 0},
    {"limit": -1},
    {"limit": 1_000_000_000},
    {"limit": "many"},
    {"limit": "1.5"},
    {"cursor": "nonsense"},
    {"cursor": "x" * 513},
    {"cursor": ""},
    {"type": ""},
    {"type": "a b"},
    {"agent": "x" * 129},
    {"pool_id": "%"},
    {"reason": "x" * 33},
    {"job_id": "a/b"},
    {"nonsense": "1"},
]


def test_questions_that_make_no_sense_are_refused(maria_api: Running) -> None:
    """BI-16."""
    for params in QUESTIONS:
        refused(maria_api.get("/dlq", params=params), 422, "invalid_input")


# --- redrive ---


def test_a_dry_run_looks_and_changes_nothing(api: Running) -> None:
    ids = bury(api, 12)
    set_job(api.db, ids[0], redrives=3)
    # The leader writes to the letters too, once.
    wait_until(lambda: all(letter.entry_id for letter in rows(api.db, schema.dead_letters)), what="told")

    def everything() -> list[object]:
        return [rows(api.db, schema.jobs), rows(api.db, schema.dead_letters), rows(api.db, schema.audit)]

    before = everything()
    body = {"filter": {"type": "echo"}, "dry_run": True}
    looked = {"matched": 12, "dry_run": True}
    would_redrive = {"exhausted": 1, "redriven": 0, "would_be": 11, "sample": ids[1:11]}
    would_purge = {"purged": 0, "would_be": 2, "sample": ids[:2]}
    assert api.post("/dlq/redrive", body).json() == looked | would_redrive
    assert api.post("/dlq/purge", body | {"max": 2}).json() == looked | would_purge
    assert everything() == before


def test_a_sample_and_then_the_rest(api: Running, redis_server: Redis) -> None:
    ids = bury(api, 5)
    set_job(api.db, ids[1], redrives=3)
    with redis_server.client() as client:
        wait_until(lambda: all(letter.entry_id for letter in rows(api.db, schema.dead_letters)), what="told")
        assert client.xlen(DLQ) == 5
        sample = api.post("/dlq/redrive", {"filter": {}, "max": 2})
        assert (sample.status_code, sample.json()) == (
            200,
            {"matched": 5, "exhausted": 1, "redriven": 2, "dry_run": False},
        )
        assert statuses(api, ids) == ["pending", "dead_letter", "pending", "dead_letter", "dead_letter"]
        rest = api.post("/dlq/redrive", {"filter": {}})
        assert rest.json() == {"matched": 3, "exhausted": 1, "redriven": 2, "dry_run": False}
        wait_until(lambda: client.xlen(DLQ) == 1, what="taken back")
        assert client.xrange(DLQ)[0][1]["job_id"] == ids[1]
    counted = 'gpu_orchestrator_retries_total{reason="redrive"} 4.0\n'
    wait_until(lambda: counted in api.get("/metrics").text, what="counted")
    wait_until(lambda: row(api.db, ids[0]).queued == "announced", what="announced")
    assert history(api.db, ids[0])[-1] == "job.redriven"


def test_the_filter_chooses(api: Running) -> None:
    echo, sleep, bob = bury(api, 2), bury(api, 2, type="sleep"), bury(api, agent="bob")
    assert api.post("/dlq/redrive", {"filter": {"type": "sleep"}}).json()["redriven"] == 2
    named = api.post("/dlq/redrive", {"filter": {"job_ids": [echo[0], sleep[0], "nobody"]}}).json()
    assert (named["redriven"], named["unknown"]) == (1, [sleep[0], "nobody"])
    assert api.post("/dlq/purge", {"filter": {"agent": "bob"}}).json()["purged"] == 1
    assert api.get(f"/jobs/{bob[0]}").status_code == 404
    assert statuses(api, [*echo, *sleep]) == ["pending", "dead_letter", "pending", "pending"]


@pytest.mark.parametrize(("verb", "done"), [("redrive", "redriven"), ("purge", "purged")])
def test_of_those_that_are_named_the_others_are_told(maria_api: Running, verb: str, done: str) -> None:
    (dead,), waiting = bury(maria_api, agent="ann"), maria_api.submit()
    meant = {"filter": {"job_ids": ["z", dead, waiting, "z"]}}
    for body, count in ((meant | {"dry_run": True}, 0), (meant, 1)):
        answer = maria_api.post(f"/dlq/{verb}", body).json()
        assert (answer["matched"], answer[done], answer["unknown"]) == (1, count, ["z", waiting])
    assert "unknown" not in maria_api.post(f"/dlq/{verb}", {"filter": {"agent": "ann"}}).json()


def test_a_rate_spreads_the_starts_and_not_the_request(api: Running) -> None:
    ids = bury(api, 6)
    answer = api.post("/dlq/redrive", {"filter": {}, "rate": 0.02})
    assert answer.json()["redriven"] == 6
    moment = now(api.db)
    waits = [
        (job.not_before - moment).total_seconds() if job.not_before else 0.0 for job in (row(api.db, i) for i in ids)
    ]
    assert waits == [0.0, *(pytest.approx(50 * n, abs=20) for n in range(1, 6))]
    assert [row(api.db, job_id).queued for job_id in ids[1:]] == ["delayed"] * 5


def test_rates_are_whole_seconds() -> None:
    delay_s = lambda place, rate: BulkRedrive.model_validate({"rate": rate}).delay_s(place)
    assert [delay_s(n, 2.5) for n in range(8)] == [0, 0, 0, 1, 1, 2, 2, 2]
    assert {delay_s(n, None) for n in range(8)} == {0.0}
    assert delay_s(9_999, 0.001) < 31_536_000


@pytest.mark.parametrize(("verb", "done"), [("redrive", "redriven"), ("purge", "purged")])
def test_thousands_in_several_transactions(maria_api: Running, verb: str, done: str) -> None:
    maria_api.orchestrator.leader.close()  # it would make those ready that are due a second later
    ids = bury_many(maria_api, 1700)
    body = {"filter": {}, "max": 1200} | ({"rate": 100} if verb == "redrive" else {})
    answer = maria_api.post(f"/dlq/{verb}", body).json()
    assert (answer["matched"], answer[done]) == (1700, 1200)
    assert len(rows(maria_api.db, schema.dead_letters)) == 500
    left = {job.job_id for job in rows(maria_api.db, schema.jobs) if job.status == "dead_letter"}
    assert left == set(ids[1200:])  # the oldest left first
    if verb == "redrive":
        delayed = [job for job in rows(maria_api.db, schema.jobs) if job.queued == "delayed"]
        assert len(delayed) == 1100  # those of the first second are due at once


def test_what_is_purged_is_gone_and_the_audit_trail_knows(api: Running) -> None:
    (job_id,) = bury(api)
    assert api.post("/dlq/purge", {"filter": {}}).json() == {"matched": 1, "purged": 1, "dry_run": False}
    refused(api.get(f"/jobs/{job_id}"), 404, "job_not_found")
    assert api.get("/dlq").json()["total"] == 0
    events = api.get(f"/jobs/{job_id}/events").json()["events"]
    assert events[-1]["event_type"] == "job.purged"
    assert [event["id"] for event in api.db.read(lambda conn: audit.of_job(conn, job_id))] == [e["id"] for e in events]
    assert api.submit(job_id=job_id) == job_id


# --- refused ---

BODIES: list[Any] = [
    *(None, [], "all", 1, {}),
    {"dry_run": True},
    {"filter": None},
    {"filter": []},
    {"filter": "all"},
    {"filter": {}, "nonsense": 1},
    {"filter": {"nonsense": 1}},
    {"filter": {"job_ids": []}},
    {"filter": {"job_ids": "x"}},
    {"filter": {"job_ids": [1]}},
    {"filter": {"job_ids": ["a b"]}},
    {"filter": {"job_ids": ["x" * 129]}},
    {"filter": {"job_ids": ["x"] * 1001}},
    {"filter": {"type": ""}},
    {"filter": {"type": 1}},
    {"filter": {"agent": "' OR 1=1 --"}},
    {"filter": {"reason": "x" * 33}},
    *({"filter": {}, "max": most} for most in (0, -1, 10_001, 10**18, 1.5, "1", True, None)),
    *({"filter": {}, "dry_run": wish} for wish in ("yes", 1, None)),
]
RATES = [0, -1, 0.0001, 10_001, 10**18, "1", True]


@pytest.mark.parametrize("verb", ["redrive", "purge"])
def test_bodies_that_make_no_sense_change_nothing(maria_api: Running, verb: str) -> None:
    """BI-4, BI-5, BI-7, BI-23: above all, a filter that is missing or empty by mistake does not mean everything."""
    ids = bury_many(maria_api, 3)
    for body in BODIES + [{"filter": {}, "rate": rate} for rate in RATES]:
        if body is None:
            answer = maria_api.http.post(f"/dlq/{verb}", content=b"null", headers={"content-type": "application/json"})
        else:
            answer = maria_api.post(f"/dlq/{verb}", body)
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_input"), (body, answer.text)
    assert statuses(maria_api, ids) == ["dead_letter"] * 3


@pytest.mark.parametrize("verb", ["redrive", "purge"])
def test_bodies_that_cannot_be_read_change_nothing(maria_api: Running, verb: str) -> None:
    ids = bury_many(maria_api, 1)
    sent = {"content-type": "application/json"}
    for content, headers, code in (
        (b"", sent, 400),
        (b"{", sent, 400),
        (b'{"filter": {}, "filter": {}}', sent, 400),
        (b'{"filter": {}, "max": NaN}', sent, 400),
        (b'{"filter": {}}', {"content-type": "text/plain"}, 415),
        (json.dumps({"filter": {"job_ids": ["x" * 100] * 100_000}}).encode(), sent, 413),
    ):
        answer = maria_api.http.post(f"/dlq/{verb}", content=content, headers=headers)
        assert answer.status_code == code, (content[:50], answer.text)
    assert statuses(maria_api, ids) == ["dead_letter"]


def test_a_filter_that_matches_nothing_is_no_error(maria_api: Running) -> None:
    assert maria_api.post("/dlq/redrive", {"filter": {"type": "nobody"}}).json()["redriven"] == 0
    assert maria_api.post("/dlq/purge", {"filter": {"job_ids": ["nobody"]}}).json()["purged"] == 0


def test_redis_away_does_not_fail_a_redrive(
    maria_db, run_api: Callable[..., Running], private_server: Callable[[type[Redis]], Redis]
) -> None:
    redis = private_server(Redis)
    api = run_api(database_url=maria_db.settings.database_url, redis_url=redis.url)
    ids = bury(api, 2)
    wait_until(lambda: all(letter.entry_id for letter in rows(api.db, schema.dead_letters)), what="told")
    redis.kill()
    assert api.post("/dlq/redrive", {"filter": {}, "max": 1}).json()["redriven"] == 1
    assert api.post("/dlq/purge", {"filter": {}}).json()["purged"] == 1
    assert status(api.db, ids[0]) == "pending"


def test_it_is_documented(maria_api: Running) -> None:
    paths = maria_api.get("/openapi.json").json()["paths"]
    for path in ("/dlq/redrive", "/dlq/purge"):
        schema_of = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema_of["required"] == ["filter"]
    assert "rate" in str(paths["/dlq/redrive"]) and "rate" not in str(paths["/dlq/purge"]["post"]["requestBody"])
    assert {parameter["name"] for parameter in paths["/dlq"]["get"]["parameters"]} >= {"type", "reason", "cursor"}
    assert paths["/jobs/{job_id}/cancel"]["post"]["responses"].keys() >= {"200", "202"}
