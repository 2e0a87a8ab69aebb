"""/control beside pools, and /nodes"""

from collections.abc import Callable
from typing import Any

import pytest

from orchestrator.store import crews
from orchestrator.store.database import Database
from tests.api.conftest import Running
from tests.api.test_job_actions import refused
from tests.factories import hire
from tests.waiting import wait_until


def drained(api: Running) -> dict[str, bool]:
    return {node["node_id"]: node["drain_until"] is not None for node in api.get("/nodes").json()["nodes"]}


def test_nodes_are_drained_by_name_or_all_and_resumed(api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    rung: list[str] = []
    monkeypatch.setattr(api.orchestrator.hub, "ring", rung.append)
    for name in ("a", "b"):
        hire(api.db, node=name)
    for action, body, told, after in (
        ("drain_node", {"node_id": "a", "timeout_seconds": 50}, 1, {"a": True, "b": False}),
        ("drain_node", {"all": True}, 2, {"a": True, "b": True}),
        ("resume_node", {"node_id": "b"}, 1, {"a": True, "b": False}),
        ("resume_node", {"all": True}, 2, {"a": False, "b": False}),
        ("resume_node", {"all": True}, 2, {"a": False, "b": False}),
    ):
        rung.clear()
        answer = api.post(f"/control/{action}", body)
        assert (answer.status_code, answer.json()) == (200, {"nodes": told})
        assert drained(api) == after
        wait_until(lambda: "look" in rung, what="supervisors were rung")


def test_a_node_gets_the_time_that_was_said_or_the_usual(api: Running) -> None:
    hire(api.db, node="a")
    for body, seconds in (({"timeout_seconds": 50}, 50.0), ({}, api.orchestrator.settings.pool_drain_s)):
        api.post("/control/drain_node", {"node_id": "a"} | body)
        left = api.db.read(lambda conn: crews.node_leave_s(conn, "a"))
        assert left is not None and seconds - 20 < left <= seconds


BAD: list[dict[str, Any]] = [
    {},
    {"node_id": "a", "all": True},
    *({"all": value} for value in (False, 1, "true", None)),
    *({"node_id": name} for name in ("", "a b", "../a", "x" * 10_000, 7, ["a"])),
    {"node_id": "a", "pool_id": "p"},
]


def test_which_node_must_be_said_in_one_way(api: Running) -> None:
    hire(api.db, node="a")
    with api.adding_no_row():
        for action in ("drain_node", "resume_node"):
            for body in BAD:
                refused(api.post(f"/control/{action}", body), 422, "invalid_input")
            refused(api.post(f"/control/{action}", {"node_id": "nobody"}), 404, "node_not_found")
        refused(api.post("/control/resume_node", {"node_id": "a", "timeout_seconds": 1}), 422, "invalid_input")
    assert drained(api) == {"a": False}


def test_all_of_no_nodes_is_fine(maria_api: Running) -> None:
    assert maria_api.post("/control/drain_node", {"all": True}).json() == {"nodes": 0}
    assert maria_api.get("/nodes").json() == {"nodes": []}


def test_the_leader_is_hurried_and_a_follower_names_it(db: Database, run_api: Callable[..., Running]) -> None:
    """Once an hour is how often it would look by itself."""
    given = {"database_url": str(db.settings.database_url), "reconcile_interval_s": 3600.0}
    leader = run_api(**given)
    leader.led()
    follower = run_api(**given)
    answer = leader.post("/control/reconcile")
    assert (answer.status_code, answer.json()) == (202, {"hurried": True, "holder": leader.orchestrator.holder})
    assert leader.orchestrator.holder in refused(follower.post("/control/reconcile"), 409, "not_leader")
    assert follower.get("/control/leader").json()["holder"] == leader.orchestrator.holder
    # What a follower is told reaches the leader at once, too.
    follower.post("/workers/pool", {"pool_id": "gold"})
    wait_until(lambda: follower.get("/workers/pool/gold").json()["status_reason"], what="the leader looked at it")


def test_nobody_may_lead(api: Running) -> None:
    api.led()
    api.orchestrator.leader.close()
    assert "nobody leads" in refused(api.post("/control/reconcile"), 409, "not_leader")
