"""/leases"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import select, update

from orchestrator.gpu import GpuProcess, Health
from orchestrator.leases import Denied, LeaseRequest, token_hash
from orchestrator.store import gpus, lease_reads, schema
from tests.api.conftest import Running
from tests.factories import gpu, hire, rows
from tests.waiting import wait_until

WANT = {"agent": "alice", "min_memory_mb": 1000}


def leased_mb(api: Running) -> int:
    return sum(one["leased_mb"] for one in api.get("/gpus").json()["gpus"])


def test_a_lease_from_grant_to_release(api: Running) -> None:
    hire(api.db, gpu(0))
    lease = api.post("/leases", WANT | {"ttl_seconds": 30}).json()
    assert lease.keys() == {"granted", "token", "mode", "gpu_index", "gpu_uuid", "node_id", "expires_at"}
    assert (lease["granted"], lease["mode"], lease["gpu_uuid"], lease["node_id"]) == (
        True,
        "gpu",
        "GPU-0",
        "node-1",
    )
    lasts = datetime.fromisoformat(lease["expires_at"]) - datetime.now(UTC)
    assert 25 < lasts.total_seconds() < 35
    assert leased_mb(api) == 1000
    extended = api.post(f"/leases/{lease['token']}/heartbeat")
    assert extended.status_code == 200 and extended.json()["expires_at"] >= lease["expires_at"]
    assert api.post(f"/leases/{lease['token']}/release").json() == {"released": True}
    assert leased_mb(api) == 0
    assert api.post(f"/leases/{lease['token']}/release").json() == {"released": True}
    ended = api.post(f"/leases/{lease['token']}/heartbeat")
    assert (ended.status_code, ended.json()["code"]) == (410, "lease_ended")


def test_the_default_time_to_live_is_the_setting(api: Running) -> None:
    hire(api.db, gpu(0))
    lasts = datetime.fromisoformat(api.post("/leases", WANT).json()["expires_at"]) - datetime.now(UTC)
    assert abs(lasts.total_seconds() - api.db.settings.lease_ttl_s) < 5


def test_a_refusal_says_why_and_when_to_ask_again(api: Running) -> None:
    hire(api.db, gpu(0, 8000))
    assert api.post("/leases", WANT | {"min_memory_mb": 1200}).json()["granted"]
    answer = api.post("/leases", WANT | {"min_memory_mb": 7000})
    assert answer.status_code == 200
    assert answer.json() == {
        "granted": False,
        "reason": "needs 7000 MB; node-1/0: 6000 of 7200 MB free",
        "code": "no_memory",
        "lasts": False,
        "retry_after": 1.0,
        "gpus": [{"node_id": "node-1", "gpu_index": 0, "free_mb": 6000}],
    }
    elsewhere = api.post("/leases", WANT | {"node_id": "elsewhere"}).json()
    assert (elsewhere["granted"], elsewhere["code"], elsewhere["gpus"]) == (False, "no_gpu", [])
    assert elsewhere["lasts"] is True
    assert elsewhere["reason"] == (
        "needs 1000 MB; no GPU is known on node elsewhere: a worker must run there, and tell of them;"
        " nodes that have some: node-1"
    )


def test_a_refusal_never_shows_less_than_nothing(api: Running) -> None:
    hire(api.db, gpu(0, 8000, foreign_mb=7900))
    body = api.post("/leases", WANT).json()
    assert (body["code"], [one["free_mb"] for one in body["gpus"]]) == ("gate_closed", [0])


def test_a_quarantined_gpu_is_worth_asking_for_later(api: Running) -> None:
    hire(api.db, gpu(0))
    api.db.write(lambda conn: gpus.quarantine(conn, ["GPU-0"], "stuck"))
    body = api.post("/leases", WANT).json()
    assert (body["granted"], body["code"], body["retry_after"]) == (False, "quarantined", 30.0)


def test_a_process_needs_its_node(api: Running) -> None:
    hire(api.db, gpu(0))
    answer = api.post("/leases", WANT | {"pid": 7})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_input")
    assert "node_id" in answer.text
    assert api.post("/leases", WANT | {"pid": 7, "node_id": "node-1"}).json()["granted"] is True
    assert [lease.pid for lease in rows(api.db, schema.leases)] == [7]


def test_the_release_of_a_process_that_lives_waits_for_it(api: Running) -> None:
    hand = hire(api.db, gpu(0))
    token = api.post("/leases", WANT | {"pid": 7, "node_id": "node-1"}).json()["token"]
    held = gpu(0, used_mb=1000, processes=(GpuProcess(8, 1000, lineage=(8, 7, 1)),))
    hand.sees(held)
    assert api.post(f"/leases/{token}/release").json() == {"released": True}
    assert leased_mb(api) == 1000
    ended = api.post(f"/leases/{token}/heartbeat")
    assert (ended.status_code, ended.json()["code"]) == (410, "lease_ended")
    hand.sees(gpu(0))
    assert leased_mb(api) == 0


def test_a_lease_on_a_lost_gpu_says_why_it_ended(api: Running) -> None:
    hand = hire(api.db, gpu(0))
    token = api.post("/leases", WANT).json()["token"]
    hand.sees(gpu(0, health=Health.LOST, health_reason="fell off the bus"))
    ended = api.post(f"/leases/{token}/heartbeat")
    assert (ended.status_code, "fell off the bus" in ended.text) == (410, True)


def test_a_lease_may_ask_for_a_model_of_gpu_and_for_its_host(api: Running) -> None:
    hire(api.db, gpu(0, name="T4"), gpu(1, name="A100"))
    api.db.write(lambda conn: conn.execute(update(schema.nodes).values(cpu_milli=4000, memory_mb=1000)))
    wish = WANT | {"gpu_models": ["A100"], "host_cpus": 2.5, "host_memory_mb": 600, "model_id": "llama"}
    assert api.post("/leases", wish).json()["gpu_uuid"] == "GPU-1"
    (lease,) = rows(api.db, schema.leases)
    assert (lease.host_cpu_milli, lease.host_memory_mb, lease.model_id) == (2500, 600, "llama")
    assert api.post("/leases", wish).json()["code"] == "host_cpu"
    assert api.post("/leases", wish | {"host_cpus": 1.0}).json()["code"] == "host_memory"
    assert api.post("/leases", WANT | {"gpu_models": ["H100"]}).json()["code"] == "wrong_model"


def test_more_than_any_gpu_has_is_no_matter_of_time_and_says_so(api: Running) -> None:
    hire(api.db, gpu(0, total_mb=10_000, name="T4"), gpu(1, total_mb=20_000), node="small")
    hire(api.db, gpu(2, total_mb=40_000), node="large")
    asked = WANT | {"min_memory_mb": 30_000}
    assert api.post("/leases", asked).json()["granted"]
    later = api.post("/leases", asked).json()
    assert (later["granted"], later["code"]) == (False, "no_memory")
    never = api.post("/leases", WANT | {"min_memory_mb": 50_000}).json()
    assert (never["granted"], never["code"], never["retry_after"]) == (False, "too_large", 10.0)
    assert never["lasts"] is True
    assert "the largest can lease 36000 MB, on node large; ask for less, or add a node" in never["reason"]
    many = api.post("/leases", WANT | {"gpu_count": 3}).json()
    assert (many["code"], "at most 2, on node small" in many["reason"]) == ("too_large", True)
    here = api.post("/leases", asked | {"node_id": "small"}).json()
    assert (here["code"], "the largest can lease 18000 MB" in here["reason"]) == ("too_large", True)
    picky = api.post("/leases", WANT | {"min_memory_mb": 10_000, "gpu_models": ["T4"]}).json()
    assert (picky["code"], "the largest can lease 9000 MB" in picky["reason"]) == ("too_large", True)


def test_a_fallback_leases_no_gpu(api: Running) -> None:
    body = api.post("/leases", WANT | {"cpu_fallback": True}).json()
    assert (body["granted"], body["mode"], body["gpu_uuid"], body["gpu_index"]) == (True, "cpu", None, None)


def test_several_gpus_are_listed(api: Running) -> None:
    hire(api.db, gpu(0), gpu(1))
    body = api.post("/leases", WANT | {"gpu_count": 2}).json()
    assert sorted(one["gpu_uuid"] for one in body["gpus"]) == ["GPU-0", "GPU-1"]
    assert leased_mb(api) == 2000
    api.post("/leases", WANT | {"min_memory_mb": 10**6, "cpu_fallback": True})
    both, none = api.get("/leases").json()["leases"]
    assert both["gpus"] == [{"gpu_uuid": "GPU-0", "gpu_index": 0}, {"gpu_uuid": "GPU-1", "gpu_index": 1}]
    assert (both["memory_mb"], none["gpus"]) == (1000, [])


def test_the_list_opens_nothing(api: Running) -> None:
    hire(api.db, gpu(0))
    token = api.post("/leases", WANT).json()["token"]
    answer = api.get("/leases")
    assert token not in answer.text and token_hash(token) not in answer.text
    [shown] = answer.json()["leases"]
    assert (shown["agent_name"], shown["memory_mb"], shown["state"]) == ("alice", 1000, "active")
    for guess in (shown["lease"], token_hash(token)):
        assert api.post(f"/leases/{guess}/release").status_code == 404
    assert leased_mb(api) == 1000


def test_unknown_tokens_are_not_found(api: Running) -> None:
    hire(api.db, gpu(0))
    token = api.post("/leases", WANT).json()["token"]
    for wrong in ("x", token[:-1], f"{token}%20", f"%20{token}", token.swapcase(), "x" * 5000):
        answer = api.post(f"/leases/{wrong}/heartbeat")
        assert (answer.status_code, answer.json()["code"]) == (404, "lease_not_found"), wrong
        assert "gpuorch leases list" in answer.json()["detail"]


def test_bad_requests_lease_nothing(api: Running) -> None:
    hire(api.db, gpu(0))
    bad: list[object] = [
        {},
        {"agent": "a"},
        {"min_memory_mb": 1},
        [],
        None,
        "x",
        *[WANT | {"min_memory_mb": value} for value in (0, -1, 1.5, "1", True, 2**31)],
        *[WANT | {"ttl_seconds": value} for value in (0, -1, 1e18, "1", 86_401, True)],
        *[WANT | {"gpu_count": value} for value in (0, 65, True)],
        *[WANT | {"agent": value} for value in ("", "a b", "a\n", "x" * 129, None)],
        WANT | {"node_id": "../x"},
        *[WANT | {"node_id": "node-1", "pid": value} for value in (0, -1, 2**22 + 1, 1.5, "1", True)],
        *[WANT | {"model_id": value} for value in ("", "x" * 256, 7, ["m"])],
        *[WANT | {"gpu_models": value} for value in ("A100", [""], ["x" * 256], [7], ["a"] * 33, None)],
        *[WANT | {"host_cpus": value} for value in (-0.1, 100_001, "1", True, None)],
        *[WANT | {"host_memory_mb": value} for value in (-1, 1.5, "1", True, 2**31)],
        WANT | {"token": "mine"},
    ]
    with api.adding_no_row():
        for body in bad:
            answer = api.http.post("/leases", json=body, headers={"content-type": "application/json"})
            assert answer.status_code in {400, 422}, body
            assert answer.json()["code"] in {"invalid_input", "malformed_body"}, body
    assert leased_mb(api) == 0


@pytest.mark.embedded_too
def test_the_list_of_leases_has_pages(api: Running) -> None:
    hire(api.db, gpu(0, 10_000))
    tokens = [api.post("/leases", WANT | {"min_memory_mb": 100}).json()["token"] for _ in range(5)]
    seen, pages = [], walk(api, "/leases", "leases")
    for page in pages:
        seen += page["leases"]
        assert not any(secret in str(page) for token in tokens for secret in (token, token_hash(token)))
    assert [len(page["leases"]) for page in pages] == [2, 2, 1]
    assert [lease["lease"] for lease in seen] == [token_hash(token)[:12] for token in tokens]
    assert api.get("/leases").json()["leases"] == seen
    for params in ({"limit": "0"}, {"limit": "1001"}, {"cursor": "x"}, {"cursor": "A" * 513}, {"offset": "1"}):
        answer = api.get("/leases", params=params)
        assert (answer.status_code, answer.json()["field"]) == (422, next(iter(params)))


def walk(api: Running, path: str, noun: str, limit: int = 2) -> list[dict[str, Any]]:
    """All pages of a listing."""
    pages = [api.get(path, params={"limit": limit}).json()]
    while (cursor := pages[-1]["next_cursor"]) is not None:
        pages.append(api.get(path, params={"limit": limit, "cursor": cursor}).json())
        assert pages[-1][noun], "a page of nothing"
    return pages


@pytest.mark.embedded_too
def test_concurrent_requests_never_overcommit(api: Running) -> None:
    hire(api.db, gpu(0, 10_000))  # 9000 usable
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda _: api.post("/leases", WANT).json()["granted"], range(40)))
    assert Counter(answers) == {True: 9, False: 31}
    assert leased_mb(api) == 9000
    assert len(api.db.read(lease_reads.page)[0]) == 9
    assert api.db.read(lambda conn: gpus.list_gpus(conn, 60))[0]["leased_mb"] == 9000


# --- answers that nobody waits for any more ---


@contextmanager
def gpus_locked(api: Running) -> Iterator[None]:
    """No lease can be granted meanwhile: what was asked for waits in the batcher."""
    with api.db.engine.connect() as connection:
        connection.execute(select(schema.gpus).with_for_update()).all()
        yield
        connection.rollback()


def test_a_lease_that_was_granted_too_late_is_given_back(maria_db, run_api: Callable[..., Running]) -> None:
    """Nobody got its token: without this its memory would be taken until the lease ends by itself."""
    api = run_api(database_url=str(maria_db.settings.database_url), db_timeout_s=1.0)
    hire(api.db, gpu(0))
    with gpus_locked(api):
        answer = api.post("/leases", WANT)
        assert (answer.status_code, answer.json()["code"]) == (503, "database_unavailable")
    wait_until(lambda: rows(api.db, schema.leases), what="granted all the same")
    wait_until(lambda: rows(api.db, schema.leases)[0].state == "released", what="given back")
    assert leased_mb(api) == 0
    assert api.post("/leases", WANT).json()["granted"]


def test_a_client_that_hung_up_gets_no_lease(maria_db, run_api: Callable[..., Running]) -> None:
    api = run_api(database_url=str(maria_db.settings.database_url))
    hire(api.db, gpu(0))

    async def ask_and_leave() -> None:
        waiting = asyncio.create_task(api.backend.lease(LeaseRequest("alice", 1000, 60.0)))
        await asyncio.sleep(0)  # it has asked now
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    with gpus_locked(api):
        asyncio.run(ask_and_leave())
        assert rows(api.db, schema.leases) == []
    wait_until(lambda: rows(api.db, schema.leases), what="granted all the same")
    wait_until(lambda: rows(api.db, schema.leases)[0].state == "released", what="given back")
    assert leased_mb(api) == 0


def test_only_what_was_granted_is_given_back(api: Running) -> None:
    """Refused, failed and cancelled requests have nothing to return."""
    denied, failed, cancelled = Future(), Future(), Future()  # type: ignore[var-annotated]
    denied.set_result(Denied("full"))
    failed.set_exception(RuntimeError("broke"))
    cancelled.cancel()
    for late in (denied, failed, cancelled):
        api.backend._give_back(late)
    assert api.get("/leases").json()["leases"] == []
