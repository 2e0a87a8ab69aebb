"""/leases"""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

from orchestrator.leases import token_hash
from orchestrator.store import leases, nodes
from tests.api.conftest import Running
from tests.factories import gpu, hire

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
    answer = api.post("/leases", WANT | {"min_memory_mb": 9000})
    assert answer.status_code == 200
    body = answer.json()
    assert body.keys() == {"granted", "reason", "retry_after"}
    assert body["granted"] is False and "9000" in body["reason"] and body["retry_after"] > 0
    assert api.post("/leases", WANT | {"node_id": "elsewhere"}).json()["granted"] is False


def test_a_fallback_leases_no_gpu(api: Running) -> None:
    body = api.post("/leases", WANT | {"cpu_fallback": True}).json()
    assert (body["granted"], body["mode"], body["gpu_uuid"], body["gpu_index"]) == (True, "cpu", None, None)


def test_several_gpus_are_listed(api: Running) -> None:
    hire(api.db, gpu(0), gpu(1))
    body = api.post("/leases", WANT | {"gpu_count": 2}).json()
    assert sorted(one["gpu_uuid"] for one in body["gpus"]) == ["GPU-0", "GPU-1"]
    assert leased_mb(api) == 2000


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
        WANT | {"token": "mine"},
    ]
    for body in bad:
        answer = api.http.post("/leases", json=body, headers={"content-type": "application/json"})
        assert answer.status_code in {400, 422}, body
        assert answer.json()["code"] in {"invalid_input", "malformed_body"}, body
    assert api.get("/leases").json() == {"leases": []}
    assert leased_mb(api) == 0


def test_concurrent_requests_never_overcommit(api: Running) -> None:
    hire(api.db, gpu(0, 10_000))  # 9000 usable
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda _: api.post("/leases", WANT).json()["granted"], range(40)))
    assert Counter(answers) == {True: 9, False: 31}
    assert leased_mb(api) == 9000
    assert len(api.db.read(leases.active)) == 9
    assert api.db.read(lambda conn: nodes.list_gpus(conn, 60))[0]["leased_mb"] == 9000
