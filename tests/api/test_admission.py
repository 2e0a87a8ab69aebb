"""Pauses and gates over HTTP: what a client is told, and that nothing which was accepted is lost."""

import json
from typing import Any

import pytest

from orchestrator.api import control
from orchestrator.cli import http, run
from orchestrator.client.api import Api
from orchestrator.policies import Scope, parse
from orchestrator.store import job_reads, policies
from tests.api.conftest import Running
from tests.api.test_job_actions import refused
from tests.factories import gpu, hire, many_jobs, row
from tests.waiting import wait_until

JOB = {"type": "echo", "payload": {}}


def set_gates(api: Running, **fields: Any) -> None:
    document = parse(Scope.ADMISSION, fields)
    api.db.write(lambda conn: policies.put(conn, Scope.ADMISSION, "global", document))
    api.orchestrator.policies.expire()


def test_paused_then_resumed_then_it_runs(api: Running) -> None:
    assert api.get("/control/paused").json() == {"paused": []}
    for _ in range(2):
        answer = api.post("/control/pause", {"scope": "agent", "name": "a", "reason": "upgrade"})
        assert (answer.status_code, answer.json()["key"], answer.json()["version"]) == (200, "agent:a", 1)
    with api.adding_no_row():
        answer = api.post("/jobs/submit", JOB | {"agent": "a"})
    assert "upgrade" in refused(answer, 503, "paused")
    assert int(answer.headers["Retry-After"]) >= 1 and answer.json()["retry_after"] > 0
    batch = api.post("/jobs/submit_batch", {"jobs": [JOB | {"agent": "a"}, JOB | {"agent": "b"}]}).json()
    assert [one.get("error", {}).get("code") for one in batch["jobs"]] == ["paused", None]
    (listed,) = api.get("/control/paused").json()["paused"]
    assert (listed["key"], listed["reason"], listed["action"]) == ("agent:a", "upgrade", "reject")
    api.post("/control/pause", {"scope": "agent", "name": "a", "action": "queue"})
    kept = api.submit(agent="a")
    for was_paused in (True, False):
        answer = api.post("/control/resume", {"scope": "agent", "name": "a"})
        assert answer.json() == {"key": "agent:a", "paused": False, "was_paused": was_paused, "still_paused": []}
    ids = [kept, api.submit(agent="a")]
    wait_until(lambda: row(api.db, kept).queued != "blocked", what="the leader lets it go")
    hand = hire(api.db)
    hand.finish(*hand.claim(*ids))
    assert [api.get(f"/jobs/{job_id}").json()["status"] for job_id in ids] == ["done", "done"]


def test_a_pause_is_resumed_however_many_there_are(maria_api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "MOST_PAUSES", 1)
    for name in ("a", "b"):
        maria_api.post("/control/pause", {"scope": "agent", "name": name})
    answer = maria_api.post("/control/resume", {"scope": "agent", "name": "b"}).json()
    assert (answer["was_paused"], answer["still_paused"]) == (True, ["agent:a"])
    assert maria_api.post("/jobs/submit", JOB | {"agent": "b"}).status_code == 202


def test_everything_may_be_paused_at_once(api: Running) -> None:
    api.post("/control/pause", {"scope": "all"})
    api.post("/control/pause", {"scope": "type", "name": "echo"})
    refused(api.post("/jobs/submit", JOB), 503, "paused")
    assert api.post("/control/resume", {"scope": "all"}).json()["still_paused"] == ["type:echo"]
    refused(api.post("/jobs/submit", JOB), 503, "paused")
    api.submit(type="other")


WRONG_PAUSES: list[dict[str, Any]] = [
    {},
    {"scope": "all", "name": "x"},
    {"scope": "pool"},
    {"scope": "lane", "name": "x"},
    {"scope": "pool", "name": "a b"},
    {"scope": "pool", "name": "x", "action": "cpu"},
    {"scope": "pool", "name": "x", "reason": "x" * 256},
    {"scope": "pool", "name": "x", "until": 5},
]


def test_a_wrong_pause_is_refused_and_pauses_nothing(maria_api: Running) -> None:
    with maria_api.adding_no_row():
        for body in WRONG_PAUSES:
            refused(maria_api.post("/control/pause", body), 422, "invalid_input")


def test_a_flood_over_the_depth_of_a_lane(api: Running) -> None:
    set_gates(api, queue_depth={"max": 10})
    answers = [api.post("/jobs/submit", JOB | {"job_id": f"flood-{n}"}) for n in range(25)]
    accepted = [answer.json()["job_id"] for answer in answers if answer.status_code == 202]
    full = [answer for answer in answers if answer.status_code == 429]
    assert (len(accepted), len(full)) == (10, 15)
    assert "at most 10" in refused(full[0], 429, "queue_full")
    assert int(full[0].headers["Retry-After"]) >= 1
    # A submit that was accepted may be repeated, however full it is.
    assert api.post("/jobs/submit", JOB | {"job_id": accepted[0]}).status_code == 200
    hand = hire(api.db)
    hand.finish(*hand.claim(*accepted))
    wait_until(lambda: api.post("/jobs/submit", JOB).status_code == 202, what="the lane has room")
    assert api.count_jobs() == 11


def test_stale_samples_close_the_gate_and_fresh_ones_open_it(api: Running) -> None:
    set_gates(api, gpu_memory={"over_pct": 90})
    hand = hire(api.db)
    wait_until(lambda: [one["closed"] for one in api.get("/control/gates").json()["gates"]] == [True])
    assert "no GPU was sampled lately" in refused(api.post("/jobs/submit", JOB), 429, "gate_closed")
    api.submit(min_memory_mb=0)

    def opens() -> bool:
        hand.sees(gpu(used_mb=1000))
        return api.post("/jobs/submit", JOB).status_code == 202

    wait_until(opens, what="a sample opens it")


def test_a_quiet_job_and_its_units(api: Running) -> None:
    job_id = api.submit(constraints={"quiet": True}, cost_units=5)
    record = api.get(f"/jobs/{job_id}").json()
    assert (record["queued"], record["blocked_on"], record["constraints"]) == ("blocked", "quiet", {"quiet": True})
    assert record["wait_reason"]
    set_gates(api, capacity={"units": 10, "quiet": [{"from": "00:00", "to": "00:00"}]})
    wait_until(lambda: row(api.db, job_id).queued in ("ready", "announced"), what="always is quiet")
    (capacity,) = api.get("/control/gates").json()["gates"]
    assert (capacity["name"], capacity["closed"]) == ("capacity", False)
    wait_until(lambda: "5 of 10" in api.get("/control/gates").json()["gates"][0]["reason"])
    refused(api.post("/jobs/submit", JOB | {"cost_units": 11}), 422, "invalid_input")


def test_constraints_without_an_effect_are_refused(maria_api: Running) -> None:
    wrong: list[Any] = [{"cpu_heavy": True}, {"quiet": 1}, []]
    for fields in (*({"constraints": one} for one in wrong), {"cost_units": 101}):
        refused(maria_api.post("/jobs/submit", JOB | fields), 422, "invalid_input")


def test_what_is_not_wanted_is_the_same_as_nothing(maria_api: Running) -> None:
    maria_api.submit(job_id="j")
    again = maria_api.post("/jobs/submit", JOB | {"job_id": "j", "constraints": {"quiet": False}})
    assert again.status_code == 200


def test_statistics(api: Running) -> None:
    ids = [api.submit(agent=agent, pool_id="p") for agent in ("a", "a", "b")]
    hand = hire(api.db, pool="p")
    claims = hand.claim(*ids[:2])
    hand.finish(claims[0])
    found = api.get("/jobs/stats").json()
    assert {name: count for name, count in found["status"].items() if count} == {"pending": 1, "claimed": 1, "done": 1}
    oldest = found["pools"]["p"].pop("oldest_pending_seconds")
    assert found["pools"] == {"p": {"pending": 1, "claimed": 1, "running": 0}}
    assert 0 <= oldest <= found["oldest_pending_seconds"] + 1
    assert found["agents"]["a"]["oldest_pending_seconds"] is None
    assert found["agents"]["a"]["claimed"] == found["agents"]["b"]["pending"] == 1
    assert found["oldest_pending_seconds"] >= 0 and found["at_least"] == []
    many_jobs(api.db, 30)
    capped = api.db.read(lambda conn: job_reads.stats(conn, most=20))
    assert (capped["status"]["pending"], capped["at_least"]) == (20, ["pending"])
    assert sum(pool["pending"] for pool in capped["pools"].values()) == 20


def test_on_the_command_line(
    maria_api: Running, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "Api", lambda _url: Api(str(maria_api.http.base_url)))

    def told(*words: str) -> str:
        assert run(["queue", *words]) == 0
        return capsys.readouterr().out

    assert "nothing is paused" in told("paused")
    assert "agent:a is paused; submits are refused" in told("pause", "--agent", "a", "--reason", "why not")
    assert "kept" in told("pause", "--keep")
    assert "why not" in told("paused")
    assert '"action": "queue"' in told("paused", "--json")
    assert "agent:a is resumed" in told("resume", "--agent", "a")
    assert "global is resumed" in told("resume")
    assert "global was not paused" in told("resume")
    maria_api.submit(agent="somebody")
    assert "somebody" in (stats := told("stats")) and "PAUSED" not in stats
    assert json.loads(told("stats", "--json"))["paused"] == []
    assert '"pending": 1' in told("stats", "--json")
    told("pause", "--agent", "a", "--reason", "why not")
    assert {"PAUSED", "agent:a", "why"} <= set(told("stats").split())
    assert [one["key"] for one in json.loads(told("stats", "--json"))["paused"]] == ["agent:a"]
    assert "no gates" in (shown := told("gates")) and "queue_depth is counted at each submit" in shown
    assert run(["queue", "pause", "--agent", "a", "--pool", "p"]) == 2
