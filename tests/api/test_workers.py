"""/workers: register, heartbeat, deregister, list."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from orchestrator import __version__
from orchestrator.errors import WorkerLost
from orchestrator.store import nodes, schema, worker_reads
from orchestrator.store.moves import Claimant
from orchestrator.store.settle import take_from_dead
from tests.api.conftest import Running
from tests.factories import POLICY, active_leases, gpu, hire, history, row, rows
from tests.fetching import Puppet, refused, register
from tests.waiting import wait_until


def listed(api: Running, worker_id: str) -> dict[str, Any]:
    (worker,) = [w for w in api.get("/workers").json()["workers"] if w["worker_id"] == worker_id]
    return dict(worker)


def lose(api: Running, puppet: Puppet) -> None:
    """As the leader would, without waiting for it."""
    worker = schema.workers.c.worker_id == puppet.worker_id
    change = schema.workers.update().where(worker).values(status="lost")
    api.db.write(lambda conn: conn.execute(change))


def test_the_list_of_workers_has_pages(api: Running) -> None:
    names = [register(api, worker_id=f"w-{n}").worker_id for n in range(5)]
    pages = [api.get("/workers", params={"limit": 2}).json()]
    while (cursor := pages[-1]["next_cursor"]) is not None:
        pages.append(api.get("/workers", params={"limit": 2, "cursor": cursor}).json())
    assert [[worker["worker_id"] for worker in page["workers"]] for page in pages] == [
        names[:2:-1],
        names[2:0:-1],
        names[:1],
    ]
    assert [worker["worker_id"] for worker in api.get("/workers").json()["workers"]] == names[::-1]
    for params in ({"limit": "0"}, {"limit": "1001"}, {"cursor": "x"}, {"cursor": "A" * 513}, {"offset": "1"}):
        answer = api.get("/workers", params=params)
        assert (answer.status_code, answer.json()["field"]) == (422, next(iter(params)))


# --- register ---


def test_a_worker_without_an_id_gets_one_and_learns_how_often_it_must_be_heard(api: Running) -> None:
    answer = api.post("/workers/register", {"slots": 2, "types": ["b", "a", "b"], "hostname": "box", "version": "go-1"})
    worker = answer.json()
    assert (worker["heartbeat_s"], worker["timeout_s"], worker["pool_id"]) == (
        api.backend.settings.worker_heartbeat_s,
        api.backend.settings.worker_timeout_s,
        "default",
    )
    shown = listed(api, worker["worker_id"])
    assert worker["worker_id"].startswith("box:0:")
    assert (shown["kind"], shown["version"], shown["slots"], shown["types"]) == ("http", "go-1", 2, ["a", "b"])
    assert (shown["node_id"], shown["status"], shown["hostname"]) == (None, "active", "box")
    assert [e.event_type for e in rows(api.db, schema.audit) if e.worker_id == worker["worker_id"]] == [
        "worker.registered"
    ]


def test_an_id_of_ones_own_belongs_to_one_worker_at_a_time(api: Running) -> None:
    register(api, worker_id="mine", version="1")
    assert "alive" in refused(
        api.post("/workers/register", {"worker_id": "mine", "slots": 1, "types": ["x"]}), 409, "worker_exists"
    )
    assert listed(api, "mine")["version"] == "1"


def test_the_id_of_a_worker_of_ours_is_taken_too(api: Running) -> None:
    hand = hire(api.db)

    def register_as_it() -> Any:
        return api.post("/workers/register", {"worker_id": hand.worker_id, "slots": 1, "types": ["x"]})

    refused(register_as_it(), 409, "worker_exists")
    hand.go_silent()
    api.db.write(lambda conn: nodes.declare_lost(conn, 10.0, 10))
    refused(register_as_it(), 409, "worker_exists")
    with pytest.raises(WorkerLost):  # it was frozen, and wakes up
        hand.beat()


@pytest.mark.embedded_too
def test_one_of_many_that_register_the_same_id_at_once_gets_it(api: Running) -> None:
    def ask(_n: int) -> int:
        return api.post("/workers/register", {"worker_id": "mine", "slots": 1, "types": ["x"]}).status_code

    with ThreadPoolExecutor(8) as threads:
        assert sorted(threads.map(ask, range(8))) == [200] + 7 * [409]


def test_an_id_is_free_again_when_nothing_of_its_predecessor_is_left(api: Running) -> None:
    hire(api.db, gpu())
    first = register(api, worker_id="mine", node_id="node-1")
    job_id = api.submit(min_memory_mb=100)
    first.one()
    lose(api, first)

    def again() -> Any:
        return api.post("/workers/register", {"worker_id": "mine", "slots": 1, "types": ["echo"], "node_id": "node-1"})

    refused(again(), 409, "worker_exists")

    def taken_back() -> bool:
        # Whom the leader is about to take back itself, this passes over.
        api.db.write(lambda conn: take_from_dead(conn, Claimant("mine", "node-1", "default"), POLICY, 10))
        return bool(row(api.db, job_id).status == "pending")

    wait_until(taken_back, what="its job waits again")
    assert len(active_leases(api.db)) == 1  # nobody has seen its process end
    refused(again(), 409, "worker_exists")
    api.db.write(lambda conn: conn.execute(schema.leases.update().values(state="spent")))
    assert again().status_code == 200
    assert (listed(api, "mine")["jobs_done"], listed(api, "mine")["status"]) == (0, "active")


WRONG = [
    ({"slots": 1}, "types"),
    ({"types": ["a"]}, "slots"),
    ({"slots": 0, "types": ["a"]}, "slots"),
    ({"slots": 1.5, "types": ["a"]}, "slots"),
    ({"slots": True, "types": ["a"]}, "slots"),
    ({"slots": 1025, "types": ["a"]}, "slots"),
    ({"slots": 1, "types": []}, "types"),
    ({"slots": 1, "types": ["a b"]}, "types.0"),
    ({"slots": 1, "types": "a"}, "types"),
    ({"slots": 1, "types": ["a"] * 257}, "types"),
    ({"slots": 1, "types": ["a"], "worker_id": "../x"}, "worker_id"),
    ({"slots": 1, "types": ["a"], "worker_id": ""}, "worker_id"),
    ({"slots": 1, "types": ["a"], "worker_id": "a" * 129}, "worker_id"),
    ({"slots": 1, "types": ["a"], "node_id": "(none)"}, "node_id"),
    ({"slots": 1, "types": ["a"], "pool_id": "{}"}, "pool_id"),
    ({"slots": 1, "types": ["a"], "pid": 7}, "pid"),
    ({"slots": 1, "types": ["a"], "pid": 0, "node_id": "n"}, "pid"),
    ({"slots": 1, "types": ["a"], "version": "v" * 65}, "version"),
    ({"slots": 1, "types": ["a"], "hostname": "<script>"}, "hostname"),
    ({"slots": 1, "types": ["a"], "role": "admin"}, "role"),
]


def test_a_registration_that_is_wrong_names_the_field(maria_api: Running) -> None:
    with maria_api.adding_no_row():
        for body, field in WRONG:
            answer = maria_api.post("/workers/register", body)
            refused(answer, 422, "invalid_input")
            assert answer.json()["field"] == field


# --- heartbeat ---


def test_a_heartbeat_shows_the_load_and_what_it_leaves_out_stays(api: Running) -> None:
    puppet = register(api)
    assert puppet.beat(busy=3, done=10, failed=2).json() == {"worker_id": puppet.worker_id}
    puppet.beat(busy=1)
    shown = listed(api, puppet.worker_id)
    assert (shown["busy"], shown["load"], shown["jobs_done"], shown["jobs_failed"]) == (1, 0.25, 10, 2)
    assert 0 <= shown["heartbeat_age_seconds"] < 5


def test_the_age_of_a_heartbeat_is_told_by_the_databases_clock(api: Running) -> None:
    hand = hire(api.db)
    hand.go_silent(7)
    assert 7 <= listed(api, hand.worker_id)["heartbeat_age_seconds"] < 12


def test_workers_of_ours_are_listed_as_processes(api: Running) -> None:
    assert listed(api, hire(api.db).worker_id)["kind"] == "process"


def test_a_heartbeat_keeps_the_leases_also_of_a_worker_that_does_not_say_it_is_busy(api: Running) -> None:
    hire(api.db, gpu())
    puppet = register(api, node_id="node-1")
    api.submit(min_memory_mb=100)
    puppet.one()
    (before,) = active_leases(api.db)
    puppet.beat()
    (after,) = active_leases(api.db)
    assert (before.last_heartbeat, after.last_heartbeat is None) == (None, False)
    assert after.expires_at >= before.expires_at


def test_a_lost_worker_is_told_to_stop(api: Running) -> None:
    puppet = register(api)
    lose(api, puppet)
    refused(puppet.beat(), 410, "worker_lost")
    refused(puppet.ask(), 410, "worker_lost")
    assert listed(api, puppet.worker_id)["status"] == "lost"


def test_nobody_speaks_for_a_worker_of_ours_nor_for_one_that_nobody_knows(api: Running) -> None:
    hand = hire(api.db)
    for path in ("/workers/heartbeat", "/workers/deregister", "/jobs/claim"):
        for worker_id in (hand.worker_id, "nobody"):
            refused(api.post(path, {"worker_id": worker_id}), 404, "worker_not_found")
    assert listed(api, hand.worker_id)["status"] == "active"


def test_a_heartbeat_that_is_wrong_changes_nothing(maria_api: Running) -> None:
    puppet = register(maria_api)
    with maria_api.adding_no_row():
        for said in ({"busy": -1}, {"done": 2**31}, {"failed": "1"}, {"busy": 1.0}, {"mood": "good"}):
            refused(puppet.beat(**said), 422, "invalid_input")
    assert listed(maria_api, puppet.worker_id)["busy"] == 0


# --- deregister ---


def test_who_leaves_hands_back_what_it_has_uncharged_and_its_memory(api: Running) -> None:
    hire(api.db, gpu())
    puppet = register(api, node_id="node-1")
    kept, cancelled = api.submit(min_memory_mb=100), api.submit()
    claims = {claim["job_id"]: claim for claim in puppet.all(2)}
    assert claims.keys() == {kept, cancelled}
    puppet.sign(claims[kept])
    api.post(f"/jobs/{cancelled}/cancel")
    for number in (2, 0):  # again is fine
        answer = puppet.leave()
        assert (answer.status_code, answer.json()["handed_back"]) == (200, number), answer.text
    job = row(api.db, kept)
    assert (job.status, job.attempt, job.attempts, job.wait_reason) == ("pending", 1, 0, "its worker left")
    assert row(api.db, cancelled).status == "cancelled"
    assert history(api.db, kept)[-1] == "job.handed_back"
    assert active_leases(api.db) == []
    assert listed(api, puppet.worker_id)["status"] == "stopped"
    events = [e.event_type for e in rows(api.db, schema.audit) if e.worker_id == puppet.worker_id and not e.job_id]
    assert events == ["worker.registered", "worker.stopped"]
    refused(puppet.complete(claims[kept]), 409, "not_owner")
    refused(puppet.beat(), 410, "worker_lost")


def test_a_lost_worker_may_leave_and_stays_lost(api: Running) -> None:
    puppet = register(api)
    lose(api, puppet)
    assert puppet.leave().status_code == 200
    assert listed(api, puppet.worker_id)["status"] == "lost"


def test_a_worker_of_ours_says_which_version_it_is(maria_db: Any) -> None:
    worker = nodes.Worker("w", "n", "default", "h", 1, 1, ("echo",), __version__)
    maria_db.write(lambda conn: nodes.register(conn, worker, nodes.Host("sim")))
    ((shown,), _) = maria_db.read(worker_reads.page)
    assert (shown["version"], shown["kind"]) == (__version__, "process")
