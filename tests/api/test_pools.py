"""/workers/pool and what /control does to pools"""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from orchestrator.api.pools import BODY_LIMIT
from orchestrator.errors import RedisUnavailable
from orchestrator.pools import MAX_METADATA, METADATA_DEPTH
from orchestrator.store import nodes, schema
from orchestrator.store.claim import Claim, NotClaimed
from orchestrator.store.database import Database
from tests.api.conftest import Running
from tests.api.test_job_actions import refused
from tests.factories import Hand, hire, now, rows, set_job, status, submit
from tests.servers import Redis
from tests.waiting import wait_until

PRELOADS = "stream:orchestrator:preloads"


@pytest.fixture
def api(db: Database, run_api: Callable[..., Running]) -> Running:
    """What happens to workers behind the API's back is seen soon."""
    return run_api(database_url=str(db.settings.database_url), reconcile_interval_s=0.1)


def create(api: Running, pool_id: str = "gold", **fields: Any) -> Any:
    answer = api.post("/workers/pool", {"pool_id": pool_id} | fields)
    assert answer.status_code == 201, answer.text
    return answer.json()


def get(api: Running, pool_id: str = "gold") -> Any:
    return api.get(f"/workers/pool/{pool_id}").json()


def patch(api: Running, pool_id: str = "gold", **fields: Any) -> Any:
    return api.http.patch(f"/workers/pool/{pool_id}", json=fields)


def send(api: Running, method: str, path: str, body: Any) -> Any:
    """What the client's own encoder would refuse, too."""
    content = json.dumps(body).encode()
    return api.http.request(method, path, content=content, headers={"Content-Type": "application/json"})


def state(api: Running, pool_id: str = "gold") -> str:
    found: str = get(api, pool_id)["status"]
    return found


def events(api: Running, pool_id: str = "gold") -> list[str]:
    return [
        row.event_type for row in rows(api.db, schema.audit) if row.pool_id == pool_id and "pool." in row.event_type
    ]


def nested(depth: int) -> dict[str, Any]:
    return {"a": nested(depth - 1)} if depth > 1 else {}


# --- create ---


def test_a_pool_is_made_once_and_asked_for_as_often_as_one_likes(api: Running) -> None:
    body = {"pool_id": "gold", "agent_name": "Ann", "model_id": "llama", "metadata": {"b": [1], "a": None}}
    first, again = api.post("/workers/pool", body), api.post("/workers/pool", body)
    assert (first.status_code, again.status_code) == (201, 200)
    assert (first.json()["created"], again.json()["created"]) == (True, False)
    made = get(api)
    assert made | body == made
    assert (made["desired_workers"], made["revision"], made["created_at"][-1]) == (1, 1, "Z")
    other = api.post("/workers/pool", body | {"desired_workers": 2})
    told = refused(other, 409, "pool_exists")
    assert "gpuorch pools scale" in told and "PATCH /workers/pool/gold" in told
    assert get(api)["desired_workers"] == 1
    assert events(api).count("pool.created") == 1


def test_a_pool_without_an_id_gets_one(api: Running) -> None:
    ids = [api.post("/workers/pool", {}).json()["pool_id"] for _ in range(2)]
    assert len(set(ids)) == 2 and all(pool_id.startswith("pool-") for pool_id in ids)
    assert [pool["pool_id"] for pool in api.get("/workers/pool").json()["pools"]] == sorted(ids)


@pytest.mark.embedded_too
def test_fifty_who_ask_for_one_pool_at_once_make_one(api: Running) -> None:
    with ThreadPoolExecutor(50) as threads:
        codes = list(threads.map(lambda _: api.post("/workers/pool", {"pool_id": "gold"}).status_code, range(50)))
    assert sorted(codes) == [200] * 49 + [201]
    assert events(api).count("pool.created") == 1


@pytest.mark.embedded_too
def test_of_fifty_who_ask_for_different_pools_of_one_name_one_wins(api: Running) -> None:
    def ask(n: int) -> Any:
        return api.post("/workers/pool", {"pool_id": "gold", "desired_workers": n}).status_code

    with ThreadPoolExecutor(20) as threads:
        codes = list(threads.map(ask, range(20)))
    assert sorted(codes) == [201] + [409] * 19


def test_a_closed_pool_begins_anew_with_the_next_revision(api: Running) -> None:
    create(api, model_id="old")
    for revision, closing in enumerate(("drain_pool", "evict_pool"), 2):
        api.post(f"/control/{closing}", {"pool_id": "gold"})
        wait_until(lambda: state(api) in {"stopped", "evicted"})
        made = create(api, model_id=f"new-{revision}")
        assert (made["status"], made["revision"], made["drain_until"]) == ("starting", revision, None)


def test_a_pool_that_drains_cannot_be_made_again_yet(api: Running) -> None:
    create(api)
    hire(api.db, pool="gold")
    api.post("/control/drain_pool", {"pool_id": "gold"})
    refused(api.post("/workers/pool", {"pool_id": "gold"}), 409, "pool_closed")
    refused(patch(api, desired_workers=2), 409, "pool_closed")


BAD_NAMES = [
    *(
        "",
        " ",
        "a b",
        "../x",
        "a/b",
        "%2e%2e",
        "{}",
        "*",
        "a\nERROR fake",
        "gold\u200b",
        "\u202egold",
        "góld",
        "x" * 129,
    ),
    *("'; DROP TABLE worker_pools;--", "<script>alert(1)</script>", "gold ", "x" * 10_000, 7, True, ["gold"], "\ud800"),
]


def test_names_that_are_none(maria_api: Running) -> None:
    with maria_api.adding_no_row():
        for name in BAD_NAMES:
            for path in ("/workers/pool", "/control/drain_pool", "/control/evict_pool"):
                refused(send(maria_api, "POST", path, {"pool_id": name}), 422, "invalid_input")


def test_paths_that_name_no_pool(api: Running) -> None:
    create(api)
    with api.adding_no_row():
        for name in ("nobody", "GOLD", "gold%20", "gold%0a", "%7B%7D", "x" * 10_000, "%F0%9F%98%80", "*"):
            for method in ("GET", "DELETE"):
                refused(api.http.request(method, f"/workers/pool/{name}"), 404, "pool_not_found")
            refused(patch(api, name, desired_workers=1), 404, "pool_not_found")


UNKNOWN = [{"workers": 3}, {"num_workers": 1}, {"status": "running"}, {"revision": 7}, {"provider": "aws"}]
BAD_FIELDS: list[dict[str, Any]] = [
    *({"desired_workers": n} for n in (-1, 1.5, "3", 10**18, None, True, 4097)),
    *({"min_workers": 2, "desired_workers": n} for n in (0, 1)),
    {"min_workers": 2},
    {"max_workers": 1, "desired_workers": 2},
    *({"slots": n} for n in (0, -1, 513, 1.0, "1")),
    *({field: 9, "slots": 512} for field in ("desired_workers", "max_workers")),
    *({"gpu_count": n} for n in (0, 65, -1)),
    *({"min_memory_mb": n} for n in (-1, 2**31, 0.5)),
    *({"hold_seconds": n} for n in (-1, 10**18, 1.5, "600")),
    *({"model_id": text} for text in ("", "x" * 256, 7, "\ud800")),
    {"variant": "x" * 65},
    *({"type": text} for text in ("", "../echo", "x" * 65)),
    {"metadata": "{}"},
    {"metadata": []},
    {"metadata": {"a": "x" * MAX_METADATA}},
    {"metadata": {"a": "\ud800"}},
    {"metadata": nested(METADATA_DEPTH + 1)},
]


def test_what_makes_no_sense_is_refused_when_made_and_when_changed(maria_api: Running) -> None:
    create(maria_api)
    with maria_api.adding_no_row():
        for fields in [*BAD_FIELDS, *UNKNOWN]:
            refused(send(maria_api, "POST", "/workers/pool", fields), 422, "invalid_input")
            refused(send(maria_api, "PATCH", "/workers/pool/gold", fields), 422, "invalid_input")
        refused(send(maria_api, "PATCH", "/workers/pool/gold", {"pool_id": "other"}), 422, "invalid_input")
    (row,) = rows(maria_api.db, schema.worker_pools)
    assert (row.revision, row.desired_workers, row.metadata) == (1, 1, None)


def test_metadata_may_be_as_long_and_as_deep_as_allowed(api: Running) -> None:
    long = {"a": "ü" * (MAX_METADATA - 8)}
    create(api, "long", metadata=long)
    create(api, "deep", metadata=nested(METADATA_DEPTH))
    assert get(api, "long")["metadata"] == long
    body = b'{"metadata": {"a": "' + b"x" * BODY_LIMIT + b'"}}'
    answer = api.http.post("/workers/pool", content=body, headers={"Content-Type": "application/json"})
    refused(answer, 413, "payload_too_large")


def test_the_lane_of_jobs_without_a_pool_is_no_pool(api: Running) -> None:
    assert "default" in refused(api.post("/workers/pool", {"pool_id": "default"}), 422, "invalid_input")


# --- look ---


def test_pools_are_listed_by_id_in_pages(api: Running) -> None:
    for pool_id in ("c", "a", "b"):
        create(api, pool_id)
    first = api.get("/workers/pool", params={"limit": 2}).json()
    assert [pool["pool_id"] for pool in first["pools"]] == ["a", "b"] and first["next_cursor"] == "b"
    rest = api.get("/workers/pool", params={"limit": 2, "cursor": "b"}).json()
    assert ([pool["pool_id"] for pool in rest["pools"]], rest["next_cursor"]) == (["c"], None)
    refused(api.get("/workers/pool", params={"limit": 0}), 422, "invalid_input")
    refused(api.get("/workers/pool", params={"status": "x"}), 422, "invalid_input")


def test_a_pool_is_shown_with_its_workers_and_its_oldest_running_job(api: Running) -> None:
    create(api)
    hand = hire(api.db, pool="gold", slots=3)
    (claim,) = hand.claim(api.submit(pool_id="gold"))
    hand.start(claim)
    hand.beat(busy=1, ready=3, slots=3, load_seconds=1.5)
    pool = get(api)
    assert pool["load_seconds"] == 1.5
    assert (pool["workers"], pool["running"], pool["ready_slots"]) == (1, 1, 3)
    assert pool["oldest_running_seconds"] >= 0
    assert [member["worker_id"] for member in pool["members"]] == [hand.worker_id]
    listed = api.get("/workers/pool").json()["pools"][0]
    assert (listed["running"], listed["last_heartbeat"][-1]) == (1, "Z")


def test_gauges_of_pools(api: Running) -> None:
    create(api, "gold")
    create(api, "silver")
    api.post("/control/evict_pool", {"pool_id": "silver"})
    hire(api.db, pool="bronze")

    def shows(line: str) -> bool:
        return f"gpu_orchestrator_{line}\n" in api.get("/metrics").text

    wait_until(lambda: shows('worker_pools_total{status="starting"} 1.0'))
    for line in (
        'worker_pools_total{status="evicted"} 1.0',
        'worker_pools_total{status="running"} 0.0',
        'worker_pool_workers{pool_id="gold"} 0.0',
        'worker_pool_workers{pool_id="bronze"} 1.0',
    ):
        assert shows(line), line
    assert 'worker_pool_workers{pool_id="silver"}' not in api.get("/metrics").text


# --- change ---


def test_scaling_keeps_the_revision_and_another_model_raises_it(api: Running) -> None:
    create(api, model_id="a")
    scaled = patch(api, desired_workers=3, min_workers=1, hold_seconds=5).json()
    assert (scaled["desired_workers"], scaled["min_workers"], scaled["revision"]) == (3, 1, 1)
    swapped = patch(api, model_id="b", adapter="lora", variant="fp8").json()
    assert (swapped["model_id"], swapped["adapter"], swapped["revision"]) == ("b", "lora", 2)
    assert patch(api, model_id="b").json()["revision"] == 2  # no change is none
    assert patch(api).status_code == 200
    assert patch(api, adapter=None).json()["adapter"] is None
    told = refused(patch(api, max_workers=2), 422, "invalid_input")
    assert told.startswith("desired_workers (3) must not exceed max_workers (2)")
    assert [e for e in events(api) if e in {"pool.changed", "pool.swapped"}] == ["pool.changed", *["pool.swapped"] * 2]


# --- drain and evict ---


def ended(status: str, pool_id: str = "gold", *, already: bool) -> dict[str, object]:
    return {"pool_id": pool_id, "status": status, "already": already}


def test_a_drain_waits_for_what_runs_and_then_stops(api: Running) -> None:
    create(api)
    hand = hire(api.db, pool="gold")
    (claim,) = hand.claim(api.submit(pool_id="gold"))
    waiting = api.submit(pool_id="gold")
    answer = api.post("/control/drain_pool", {"pool_id": "gold", "timeout_seconds": 100})
    assert (answer.status_code, answer.json()) == (202, ended("draining", already=False))
    assert 90 < get(api)["drain_seconds_left"] <= 100
    assert isinstance(hand.offer(waiting)[waiting], NotClaimed)
    hand.beat(busy=1, draining=True)
    wait_until(lambda: get(api)["status_reason"] == "1 workers have not left yet")
    hand.finish(claim)
    api.db.write(lambda conn: nodes.deregister(conn, hand.worker))
    wait_until(lambda: state(api) == "stopped")
    assert (status(api.db, claim.job_id), status(api.db, waiting)) == ("done", "pending")
    again = api.post("/control/drain_pool", {"pool_id": "gold"})
    assert (again.status_code, again.json()) == (200, ended("stopped", already=True))
    assert [e for e in events(api) if "drain" in e or "stop" in e] == ["pool.draining", "pool.stopped"]


def test_draining_twice_sets_the_time_anew(api: Running) -> None:
    create(api)
    hire(api.db, pool="gold")
    for seconds in (1000, 10):
        answer = api.post("/control/drain_pool", {"pool_id": "gold", "timeout_seconds": seconds})
        assert (answer.status_code, answer.json()["already"]) == (202, False)
        assert seconds - 10 < get(api)["drain_seconds_left"] <= seconds
    assert events(api).count("pool.draining") == 2
    assert api.post("/control/drain_pool", {"pool_id": "gold"}).status_code == 202
    assert get(api)["drain_seconds_left"] > api.orchestrator.settings.pool_drain_s - 10


def test_evicting_what_is_unknown_finished_or_evicted(api: Running) -> None:
    refused(api.post("/control/evict_pool", {"pool_id": "gold"}), 404, "pool_not_found")
    refused(api.post("/control/drain_pool", {"pool_id": "gold"}), 404, "pool_not_found")
    create(api)
    for already in (False, True):
        answer = api.post("/control/evict_pool", {"pool_id": "gold"})
        assert (answer.status_code, answer.json()) == (200, ended("evicted", already=already))
    assert api.post("/control/drain_pool", {"pool_id": "gold"}).json() == ended("evicted", already=True)
    assert events(api).count("pool.evicted") == 1
    create(api, "silver")
    api.post("/control/drain_pool", {"pool_id": "silver"})
    wait_until(lambda: state(api, "silver") == "stopped")
    assert api.post("/control/evict_pool", {"pool_id": "silver"}).json() == ended("stopped", "silver", already=True)


def test_a_pool_that_drains_can_still_be_evicted(api: Running) -> None:
    create(api)
    hire(api.db, pool="gold")
    api.post("/control/drain_pool", {"pool_id": "gold"})
    assert api.post("/control/evict_pool", {"pool_id": "gold"}).json() == ended("evicted", already=False)


def test_times_that_are_none(maria_api: Running) -> None:
    create(maria_api)
    times: list[Any] = [-1, 1e18, "10", True, [], 31_536_001]
    with maria_api.adding_no_row():
        for timeout in times:
            body = {"timeout_seconds": timeout}
            refused(maria_api.post("/control/drain_pool", {"pool_id": "gold"} | body), 422, "invalid_input")
            refused(maria_api.post("/control/drain_node", {"all": True} | body), 422, "invalid_input")
    assert state(maria_api) == "starting"


def test_supervisors_are_rung_and_the_leader_is_asked(api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    rung: list[str] = []
    monkeypatch.setattr(api.orchestrator.hub, "ask_for_pools", asked.append)
    monkeypatch.setattr(api.orchestrator.hub, "ring", rung.append)
    create(api)
    patch(api, desired_workers=2)
    wait_until(lambda: asked == ["gold"] * 2)
    for nth, action in enumerate(("drain_pool", "evict_pool"), 1):
        api.post(f"/control/{action}", {"pool_id": "gold"})
        wait_until(lambda: rung.count("look") == nth and len(asked) == 2 + nth)  # noqa: B023 - called at once


def test_the_leader_hears_of_it_from_any_instance(api: Running, redis_server: Redis) -> None:
    create(api)
    with redis_server.client() as client:
        wait_until(lambda: client.exists(PRELOADS), what="a request was sent, or somebody listens")
        wait_until(lambda: client.xinfo_stream(PRELOADS)["entries-added"] == 1, what="a request was sent")
        wait_until(lambda: client.xlen(PRELOADS) == 0, what="the leader took it")


def test_redis_may_be_away_for_all_of_this(
    db: Database, run_api: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise RedisUnavailable("away")

    api = run_api(database_url=str(db.settings.database_url), reconcile_interval_s=3600.0)
    monkeypatch.setattr(api.orchestrator.hub, "ring", away)
    monkeypatch.setattr(api.orchestrator.hub, "ask_for_pools", away)
    create(api)
    assert patch(api, desired_workers=2).status_code == 200
    assert api.post("/control/drain_pool", {"pool_id": "gold"}).status_code == 202
    wait_until(lambda: state(api) == "stopped")  # the leader is this one, and hurried
    assert api.http.delete("/workers/pool/gold").status_code == 200


# --- delete ---


def test_only_a_closed_pool_without_workers_is_deleted(api: Running) -> None:
    create(api)
    hand = hire(api.db, pool="gold")
    refused(api.http.delete("/workers/pool/gold"), 409, "pool_busy")
    api.post("/control/drain_pool", {"pool_id": "gold"})
    refused(api.http.delete("/workers/pool/gold"), 409, "pool_busy")
    api.post("/control/evict_pool", {"pool_id": "gold"})
    refused(api.http.delete("/workers/pool/gold"), 409, "pool_busy")
    api.db.write(lambda conn: nodes.deregister(conn, hand.worker))
    assert api.http.delete("/workers/pool/gold").json() == {"pool_id": "gold", "deleted": True, "waiting": 0}
    refused(api.http.delete("/workers/pool/gold"), 404, "pool_not_found")
    assert rows(api.db, schema.worker_pools) == []
    assert events(api)[-1] == "pool.deleted"


def test_who_deletes_a_pool_is_told_of_the_jobs_that_still_wait_for_it(api: Running) -> None:
    create(api)
    api.submit(pool_id="gold")
    (later,) = submit(api.db, pool_id="gold")
    set_job(api.db, later, queued="delayed", not_before=now(api.db) + timedelta(hours=1))
    api.submit()  # of another lane
    api.post("/control/evict_pool", {"pool_id": "gold"})
    assert api.http.delete("/workers/pool/gold").json()["waiting"] == 2


# --- races ---


def one_by_one(hand: Hand, job_ids: list[str]) -> list[Claim | NotClaimed]:
    return [hand.offer(job_id)[job_id] for job_id in job_ids]


def test_no_claim_is_committed_after_the_answer_to_a_drain(api: Running) -> None:
    """INV-22: claims that were first are seen by whoever looks after the answer; none comes later."""
    create(api)
    hands = [hire(api.db, pool="gold") for _ in range(4)]
    ids = [[api.submit(pool_id="gold") for _ in range(10)] for _ in hands]
    with ThreadPoolExecutor(4) as threads:
        work = [threads.submit(one_by_one, hand, mine) for hand, mine in zip(hands, ids, strict=True)]
        wait_until(lambda: any(row.status == "claimed" for row in rows(api.db, schema.jobs)))
        assert api.post("/control/drain_pool", {"pool_id": "gold"}).status_code == 202
        owned = sum(row.status == "claimed" for row in rows(api.db, schema.jobs))
        answers = [answer for future in work for answer in future.result()]
    assert sum(isinstance(answer, Claim) for answer in answers) == owned
    assert sum(row.status == "claimed" for row in rows(api.db, schema.jobs)) == owned
