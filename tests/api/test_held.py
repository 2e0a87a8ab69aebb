"""F-32: a row that somebody holds fails the requests that need it, and none of those that share their transaction."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Event
from typing import Any

import pytest

from orchestrator.heartbeats import Heartbeats
from orchestrator.leases import Granted, LeaseRequest, token_hash
from orchestrator.store import schema
from orchestrator.store.batcher import Batcher
from orchestrator.store.database import Database, RowsHeld, Waiting
from orchestrator.store.dispatch import Fetch
from orchestrator.store.registry import Told
from orchestrator.store.reports import Heard, Report, Sign
from orchestrator.store.submit import Verdict
from tests.api.conftest import Running
from tests.factories import gpu, hire, holding, holding_job, new_job, submit, traffic
from tests.fetchers import enlist
from tests.waiting import wait_until


def beside_a_held_one(
    batcher: Batcher[Any, Any], held: Callable[[], Future[Any]], free: Callable[[], Future[Any]]
) -> Any:
    """What the free one hears, while the held one is refused: both in one batch, since all flushers are busy."""
    blocking: list[Future[Any]] = []
    while batcher._flushing < len(batcher._threads):
        blocking.append(held())
        wait_until(lambda: not batcher._waiting)
    together = held()
    answer = free().result(30)
    for refused in (*blocking, together):
        with pytest.raises(RowsHeld):
            refused.result(30)
    return answer


def test_an_agent_whose_account_is_held_keeps_no_other_from_submitting(maria_api: Running) -> None:
    orchestrator, account = maria_api.orchestrator, schema.lane_accounts
    maria_api.submit(agent="held")
    with holding(maria_api.db, account, account.c.lane == "default", account.c.agent == "held"):
        answer = beside_a_held_one(
            orchestrator._submits,
            lambda: orchestrator.submit([new_job(agent="held")]),
            lambda: orchestrator.submit([new_job(agent="free")]),
        )
    assert answer == [Verdict.CREATED]
    maria_api.submit(agent="held")


def test_a_gpu_that_is_held_keeps_nobody_from_another(maria_api: Running) -> None:
    hire(maria_api.db, gpu(0), node="held")
    hire(maria_api.db, gpu(1), node="free")
    orchestrator = maria_api.orchestrator

    def lease(node: str) -> Future[Any]:
        return orchestrator.lease(LeaseRequest("alice", 1000, 60.0, node_id=node))

    with holding(maria_api.db, schema.gpus, schema.gpus.c.gpu_uuid == "GPU-0"):
        answer = beside_a_held_one(orchestrator._leases, lambda: lease("held"), lambda: lease("free"))
    assert isinstance(answer, Granted)
    assert answer.node_id == "free"


def test_a_worker_whose_row_is_held_keeps_no_other_from_claiming(maria_api: Running) -> None:
    held, free = enlist(maria_api.db), enlist(maria_api.db)
    (job_id,) = submit(maria_api.db)
    remote = maria_api.orchestrator.remote
    with holding(maria_api.db, schema.workers, schema.workers.c.worker_id == held.worker_id):
        claims = beside_a_held_one(
            remote._claims,
            lambda: remote.claim(Fetch(held.worker_id, 1)),
            lambda: remote.claim(Fetch(free.worker_id, 1)),
        )
    assert [claim.job_id for claim in claims] == [job_id]


def test_a_job_whose_row_is_held_keeps_no_other_from_being_reported(maria_api: Running) -> None:
    worker, (held, free) = enlist(maria_api.db), submit(maria_api.db, 2)
    worker.fetch(2)
    remote = maria_api.orchestrator.remote

    def sign(job_id: str) -> Future[Any]:
        return remote.report(Report(worker.worker_id, Sign(job_id, 1)))

    with holding_job(maria_api.db, held):
        answer = beside_a_held_one(remote._reports, lambda: sign(held), lambda: sign(free))
    assert answer == Heard(cancel_requested=False)


# --- heartbeats: who is held waits by itself, and for as long as its caller does ---


def lease_of(api: Running) -> tuple[str, Any]:
    """A token, and the row to hold."""
    token: str = api.post("/leases", {"agent": "alice", "min_memory_mb": 10, "cpu_fallback": True}).json()["token"]
    return token, (schema.leases, schema.leases.c.token == token_hash(token))


def worker_of(api: Running) -> tuple[str, Any]:
    worker_id = enlist(api.db).worker_id
    return worker_id, (schema.workers, schema.workers.c.worker_id == worker_id)


KINDS: dict[str, tuple[Callable[[Running], tuple[str, Any]], Callable[[Heartbeats, str], Future[Any]]]] = {
    "leases": (lease_of, lambda heartbeats, token: heartbeats.of_lease(token)),
    "workers": (worker_of, lambda heartbeats, worker_id: heartbeats.of_worker(Told(worker_id))),
}


@pytest.fixture
def patient_api(maria_db: Database, run_api: Callable[..., Running]) -> Running:
    """Its callers wait for a held row also on a busy machine."""
    return run_api(database_url=maria_db.settings.database_url, db_timeout_s=30.0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_heartbeat_whose_row_is_held_is_written_when_it_is_free(patient_api: Running, kind: str) -> None:
    make, beat = KINDS[kind]
    heartbeats = patient_api.orchestrator.heartbeats
    (held, row), (free, _) = make(patient_api), make(patient_api)
    with holding(patient_api.db, *row):
        late = beat(heartbeats, held)
        beat(heartbeats, free).result(30)
        assert not late.done()
    late.result(30)


@pytest.mark.parametrize("kind", KINDS)
def test_while_one_heartbeat_queues_for_its_row_the_others_go_on(
    patient_api: Running, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, beat = KINDS[kind]
    heartbeats, write = patient_api.orchestrator.heartbeats, patient_api.orchestrator.db.write_batch
    (held, row), (free, _) = make(patient_api), make(patient_api)
    queues, go_on = Event(), Event()

    def queue(work: Any, waiting: Waiting) -> Any:
        if waiting is Waiting.BRIEFLY:
            queues.set()
            assert go_on.wait(30)
        return write(work, waiting)

    monkeypatch.setattr(patient_api.orchestrator.db, "write_batch", queue)
    with holding(patient_api.db, *row):
        late = beat(heartbeats, held)
        assert queues.wait(30)
        beat(heartbeats, free).result(30)
    go_on.set()
    late.result(30)


@pytest.mark.parametrize("kind", KINDS)
def test_a_heartbeat_whose_row_stays_held_is_given_up_with_its_caller(
    maria_db: Database, run_api: Callable[..., Running], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.store.batcher.PATIENT_EVERY_S", 600.0)
    api = run_api(database_url=maria_db.settings.database_url, db_timeout_s=1.0)
    make, beat = KINDS[kind]
    held, row = make(api)
    with holding(api.db, *row), pytest.raises(RowsHeld):
        beat(api.orchestrator.heartbeats, held).result(30)


@pytest.mark.parametrize("kind", KINDS)
def test_heartbeats_that_come_together_share_their_commits(maria_api: Running, kind: str) -> None:
    make, beat = KINDS[kind]
    names = [make(maria_api)[0] for _ in range(8)]
    heartbeats = maria_api.orchestrator.heartbeats
    batcher: Batcher[Any, Any] = getattr(heartbeats, f"_{kind}")
    with traffic(maria_api.orchestrator.db) as seen:
        with batcher._arrived:  # nobody begins before all are there
            answers = [beat(heartbeats, name) for name in names for _ in range(5)]
        for answer in answers:
            answer.result(30)
    table = {"leases": "orchestrator_leases", "workers": "workers"}[kind]
    written = [one for one in seen.statements if one.startswith(f"UPDATE {table} ")]
    assert 1 <= len(written) <= len(batcher._threads), seen.statements
