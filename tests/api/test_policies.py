"""/policies and `gpuorch policy`: written, kept with their history, in force on every instance."""

import json
import math
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from orchestrator.api.policies import BODY_LIMIT
from orchestrator.cli import run
from orchestrator.store import schema
from orchestrator.store.database import Database
from tests.api.conftest import Running
from tests.api.test_job_actions import refused
from tests.factories import rows
from tests.waiting import wait_until

JOB = {"type": "echo", "payload": {}}
DOCUMENTS = {"agents/alice": {"rate": 5.0, "weight": 2.0}, "concurrency/host:example.org": {"max": 1}, "admission": {}}


def put(api: Running, path: str, document: Any) -> httpx.Response:
    return api.http.put(f"/policies/{path}", json=document)


def test_a_policy_is_written_read_and_forgotten(api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    rung: list[str] = []
    monkeypatch.setattr(api.orchestrator.hub, "ring", rung.append)
    for path, document in DOCUMENTS.items():
        refused(api.get(f"/policies/{path}"), 404, "policy_not_found")
        refused(api.http.delete(f"/policies/{path}"), 404, "policy_not_found")
        rung.clear()
        answer = put(api, path, document)
        assert (answer.status_code, answer.json()["version"], answer.json()["document"]) == (200, 1, document)
        assert answer.json().keys() == {"scope", "name", "version", "document"}
        wait_until(lambda: rung, what="workers are rung")
        found = api.get(f"/policies/{path}").json()
        assert {key: found[key] for key in answer.json()} == answer.json()
        assert api.http.delete(f"/policies/{path}").json()["deleted"]
        refused(api.get(f"/policies/{path}"), 404, "policy_not_found")


def test_what_a_key_may_be_with_its_history_and_the_way_back(api: Running) -> None:
    keys = ["a:b:c/d/e", "agent:*", "global", "host:example.org", "model:meta-llama/Llama-3.1-8B", "path:/x/history/y"]
    keys.append("x" * 200)
    for key in keys:
        for most in (1, 2):
            assert put(api, f"concurrency/{key}", {"max": most}).json()["name"] == key
        assert api.get(f"/policies/concurrency/{key}").json()["document"] == {"max": 2}
        changes = api.get(f"/policies/concurrency/{key}/history").json()["changes"]
        found = [(one["version"], one["before"], one["after"]) for one in changes]
        assert found == [(2, {"max": 1}, {"max": 2}), (1, None, {"max": 1})]
        back = api.post(f"/policies/concurrency/{key}/rollback", {"version": 1})
        assert back.json() == {"scope": "concurrency", "name": key, "version": 3, "document": {"max": 1}}
    assert [one["name"] for one in api.get("/policies/concurrency").json()["policies"]] == keys


def test_what_a_name_may_not_be(api: Running) -> None:
    with api.adding_no_row():
        for key in ("a%20b", "*", "a*", "host:*x", "a/", "x/history", "x/rollback", "x" * 201, "%00", "ä"):
            refused(put(api, f"concurrency/{key}", {"max": 1}), 422, "invalid_input")
        for agent in ("a%20b", "x" * 129, "a*", "a%0A"):
            refused(put(api, f"agents/{agent}", {}), 422, "invalid_input")


def test_a_wrong_document_changes_nothing(api: Running) -> None:
    with api.adding_no_row():
        for path, body, status in (
            ("agents/a", {"rat": 5}, 422),
            ("agents/a", {"rate": "5"}, 422),
            ("agents/a", {"rate": 0}, 422),
            ("agents/a", {"burst": 5}, 422),
            ("agents/a", [], 422),
            ("concurrency/k", {}, 422),
            ("concurrency/k", {"max": 1.5}, 422),
            ("concurrency/k", {"max": 1, "x": "y" * BODY_LIMIT}, 413),
            ("admission", {"unheard": 1}, 422),
        ):
            assert put(api, path, body).status_code == status, (path, body)
    put(api, "agents/b", {"rate": 5})
    with api.adding_no_row():
        for wrong in ({}, {"version": 0}, {"version": "1"}, {"version": 1, "x": 1}, {"version": 2**31}):
            refused(api.post("/policies/agents/b/rollback", wrong), 422, "invalid_input")


def test_the_way_back_to_nothing_and_to_what_never_was(api: Running) -> None:
    put(api, "agents/a", {"rate": 5})
    api.http.delete("/policies/agents/a")
    refused(api.post("/policies/agents/a/rollback", {"version": 9}), 404, "policy_not_found")
    refused(api.get("/policies/agents/b/history"), 404, "policy_not_found")
    assert api.post("/policies/agents/a/rollback", {"version": 1}).json()["version"] == 3
    gone = api.post("/policies/agents/a/rollback", {"version": 2}).json()
    assert (gone["version"], gone["document"]) == (None, None)
    refused(api.get("/policies/agents/a"), 404, "policy_not_found")


def test_pages_of_policies(api: Running) -> None:
    for name in ("b", "a", "c", "*"):
        put(api, f"agents/{name}", {"rate": 5})
    first = api.get("/policies/agents", params={"limit": 3}).json()
    assert ([one["name"] for one in first["policies"]], first["next_cursor"]) == (["*", "a", "b"], "b")
    rest = api.get("/policies/agents", params={"limit": 3, "cursor": "b"}).json()
    assert ([one["name"] for one in rest["policies"]], rest["next_cursor"]) == (["c"], None)
    refused(api.get("/policies/agents", params={"limit": 0}), 422, "invalid_input")


def test_a_change_is_in_force_on_another_instance_within_a_second(
    api: Running, db: Database, run_api: Callable[..., Running]
) -> None:
    other = run_api(database_url=str(db.settings.database_url))
    for _ in range(5):
        other.submit(agent="a")

    def status() -> int:
        return other.post("/jobs/submit", JOB | {"agent": "a"}).status_code

    put(api, "agents/a", {"rate": 0.001})
    wait_until(lambda: status() == 429, timeout=1.0, what="the rate is in force")
    put(api, "agents/a", {"rate": 1000, "burst": 1000})
    wait_until(lambda: status() == 202, timeout=1.0, what="the higher rate is in force")
    put(api, "agents/a", {"rate": 0.001, "burst": 1})
    wait_until(lambda: status() == 429, timeout=1.0, what="the low rate is in force")
    api.http.delete("/policies/agents/a")
    wait_until(lambda: status() == 202, timeout=1.0, what="no rate is in force")


def test_a_change_is_in_force_here_at_once(api: Running) -> None:
    api.submit(agent="a")
    put(api, "agents/a", {"rate": 0.001, "burst": 1})
    answers = [api.post("/jobs/submit", JOB | {"agent": "a"}).status_code for _ in range(3)]
    assert answers == [202, 429, 429]
    put(api, "agents/a", {"rate": 1000})
    assert api.post("/jobs/submit", JOB | {"agent": "a"}).status_code in {202, 429}
    wait_until(lambda: api.post("/jobs/submit", JOB | {"agent": "a"}).status_code == 202, what="tokens drip in")


# --- rates over HTTP ---


def test_over_the_rate_is_429_with_the_exact_wait(api: Running) -> None:
    put(api, "agents/a", {"rate": 0.04, "burst": 1})
    api.submit(agent="a", job_id="first")
    for fields in ({}, {"job_id": "second"}):
        with api.adding_no_row():
            answer = api.post("/jobs/submit", JOB | {"agent": "a"} | fields)
        refused(answer, 429, "rate_limited")
        exact = answer.json()["retry_after"]
        assert 10 < exact <= 25
        assert answer.headers["Retry-After"] == str(math.ceil(exact))
    again = api.post("/jobs/submit", JOB | {"agent": "a", "job_id": "first"})
    assert (again.status_code, again.json()["created"]) == (200, False)
    assert api.submit(agent="b")
    assert api.count_jobs() == 2


def test_a_batch_is_let_in_as_far_as_the_tokens_last(api: Running) -> None:
    put(api, "agents/a", {"rate": 0.1, "burst": 3})
    answer = api.post("/jobs/submit_batch", {"jobs": [JOB | {"agent": "a"}] * 5 + [JOB]}).json()
    assert (answer["created"], answer["refused"]) == (4, 2)
    errors = [item["error"] for item in answer["jobs"] if "error" in item]
    assert [error["code"] for error in errors] == ["rate_limited"] * 2
    assert [error["retry_after"] for error in errors] == pytest.approx([10, 20], abs=2)


def test_a_flood_gets_in_what_the_policy_allows(api: Running) -> None:
    put(api, "agents/a", {"rate": 0.001, "burst": 20})

    def flood(_n: int) -> list[int]:
        return [api.post("/jobs/submit", JOB | {"agent": "a"}).status_code for _ in range(20)]

    with ThreadPoolExecutor(8) as pool:
        counts = Counter(status for answers in pool.map(flood, range(8)) for status in answers)
    assert counts == {202: 20, 429: 140}
    assert api.count_jobs() == 20


# --- the command line ---


@pytest.fixture
def cli(maria_api: Running, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def call(*arguments: str) -> tuple[int, str]:
        code = run(["policy", *arguments, "--url", str(maria_api.http.base_url)])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return call


def test_a_policy_by_fields_keeps_the_others(maria_api: Running, cli: Callable[..., tuple[int, str]]) -> None:
    assert cli("set", "agent", "alice", "rate=5", "weight=2", "action=queue")[0] == 0
    assert cli("set", "agent", "alice", "rate=7", "weight=")[0] == 0
    assert maria_api.get("/policies/agents/alice").json()["document"] == {"rate": 7, "action": "queue"}
    assert cli("set", "agent", "alice", "--json-document", '{"weight": 3}') == (
        0,
        'agent alice  version 3: {"weight": 3.0}\n',
    )
    assert cli("set", "concurrency", "model:a/b", "max=1")[0] == 0
    assert maria_api.get("/policies/concurrency/model:a/b").json()["document"] == {"max": 1}
    assert cli("set", "admission", "--json-document", "{}")[0] == 0


def test_policies_are_shown_listed_rolled_back_and_deleted(cli: Callable[..., tuple[int, str]]) -> None:
    assert cli("list") == (0, "no policies\n")
    cli("set", "agent", "*", "rate=5")
    cli("set", "agent", "*", "rate=6")
    cli("set", "concurrency", "host:example.org", "max=1")
    cli("set", "admission", "--json-document", "{}")
    assert "rate" in cli("get", "agent", "*")[1]
    assert json.loads(cli("get", "agent", "*", "--json")[1])["document"] == {"rate": 6}
    listed = json.loads(cli("list", "--json")[1])["policies"]
    assert [(one["scope"], one["name"]) for one in listed] == [
        ("agent", "*"),
        ("admission", "global"),
        ("concurrency", "host:example.org"),
    ]
    assert "host:example.org" in cli("list", "concurrency")[1] and "example" not in cli("list", "agent")[1]
    assert cli("history", "agent", "*")[1].splitlines()[1].startswith("2 ")
    assert cli("rollback", "agent", "*", "--version", "1") == (0, 'agent *  version 3: {"rate": 5.0}\n')
    assert cli("delete", "agent", "*") == (0, "agent *  deleted: its defaults are in force\n")
    assert cli("rollback", "agent", "*", "--version", "4") == (0, "agent *  has no policy\n")
    code, text = cli("get", "agent", "*")
    assert code == 1 and "policy_not_found" in text


def test_wrong_commands(cli: Callable[..., tuple[int, str]], maria_api: Running) -> None:
    for arguments, code in (
        (["set", "agent"], 2),
        (["set", "agent", "rate=5"], 2),
        (["set", "agent", "a"], 2),
        (["set", "agent", "a", "rate"], 2),
        (["set", "agent", "a", "rate=5", "--json-document", "{}"], 2),
        (["set", "agent", "a", "--json-document", "{"], 2),
        (["set", "agent", "a", "--json-document", "[]"], 2),
        (["set", "agent", "a", "rate=fast"], 1),
        (["set", "agent", "a b", "rate=5"], 1),
        (["set", "planet", "a", "rate=5"], 2),
        (["get", "agent"], 2),
        (["get", "admission", "a"], 2),
        (["list", "--cursor", "a"], 2),
        (["rollback", "agent", "a"], 2),
        (["rollback", "agent", "a", "--version", "1"], 1),
        (["delete", "agent", "a"], 1),
    ):
        assert cli(*arguments)[0] == code, arguments
    assert rows(maria_api.db, schema.policies) == []
