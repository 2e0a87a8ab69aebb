"""The ledger alone, on a real database: what it was told is written, whatever the server says meanwhile."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy.exc import DataError, OperationalError

import worker.acknowledger
from orchestrator.store import schema
from orchestrator.store.claim import Claim
from orchestrator.store.policies import Copy
from orchestrator.store.settle import finish_all
from orchestrator.stream.hub import Hub
from orchestrator.stream.lane import Lane
from tests.factories import POLICY, Hand, active_leases, done, gpu, hire, row, rows, submit
from tests.waiting import wait_until
from worker.acknowledger import Acknowledger
from worker.ledger import Ledger


@pytest.fixture
def hand(db) -> Hand:
    return hire(db, gpu())


@pytest.fixture
def stuck() -> threading.Event:
    return threading.Event()


@pytest.fixture
def busy() -> threading.Event:
    return threading.Event()


@pytest.fixture
def ledger(db, hand: Hand, redis_url: str, settings, stuck, busy) -> Iterator[Ledger]:
    hub = Hub(settings(redis_url=redis_url))
    acks = Acknowledger()
    opened = Ledger(
        db,
        hub.lane("default"),
        hand.by,
        POLICY,
        acks,
        Copy(),
        memory_for=lambda _type: 0,
        size_of=lambda _type: 0,
        held=set,
        claim_is_near=busy.is_set,
        on_settled=lambda _settled: None,
        on_freed=lambda _lanes: None,
        on_stuck=stuck.set,
    )
    yield opened
    opened.close(5.0)
    acks.close(5.0)
    hub.close()


def fail_first(db, monkeypatch, *errors: Exception) -> list[Exception]:
    """The next transactions raise these, one each; what is left of them."""
    left, write = [*errors], db.write

    def failing(work: Any) -> Any:
        if left and threading.current_thread().name == "ledger":
            raise left.pop(0)
        return write(work)

    monkeypatch.setattr(db, "write", failing)
    return left


def trouble(code: int) -> OperationalError:
    return OperationalError("UPDATE …", {}, Exception(code, "the server's trouble"))


def test_ends_and_claims_share_a_transaction(db, hand, ledger):
    first, second = submit(db, 2, min_memory_mb=100)
    (claim,) = hand.claim(first)
    ledger.note(done(claim), "1-1")
    answers = ledger.claim([second]).result(10)
    assert isinstance(answers[second], Claim)
    wait_until(lambda: row(db, first).status == "done")
    assert [lease.job_id for lease in active_leases(db)] == [second]


@pytest.fixture
def acked(monkeypatch) -> list[list[str]]:
    """What Redis was told, call by call; gathered for longer than any test takes."""
    calls: list[list[str]] = []
    monkeypatch.setattr(Lane, "ack", lambda _lane, entry_ids: calls.append(list(entry_ids)))
    monkeypatch.setattr(worker.acknowledger, "LINGER_S", 60.0)
    return calls


def settle(db, hand: Hand, ledger: Ledger, entry_id: str) -> None:
    (claim,) = hand.claim(*submit(db))
    ledger.note(done(claim), entry_id)
    wait_until(lambda: row(db, claim.job_id).status == "done")


def test_a_busy_lane_gathers_acknowledgements_until_the_ledger_closes(db, hand, ledger, busy, acked):
    busy.set()
    settle(db, hand, ledger, "1-1")
    settle(db, hand, ledger, "1-2")
    assert acked == []
    ledger.close(5.0)
    assert acked == [["1-1", "1-2"]]


def test_a_quiet_lane_acknowledges_at_once(db, hand, ledger, acked):
    settle(db, hand, ledger, "1-1")
    wait_until(lambda: acked == [["1-1"]])


@pytest.mark.parametrize("code", [1317, 1969, 1047, 9999])
def test_a_finished_job_is_done_however_often_the_server_stumbles(db, hand, ledger, monkeypatch, code):
    (claim,) = hand.claim(*submit(db))
    left = fail_first(db, monkeypatch, trouble(code), trouble(code), trouble(code))
    ledger.note(done(claim), "1-1")
    wait_until(lambda: row(db, claim.job_id).status == "done", what="written in the end")
    assert left == []
    assert len(rows(db, schema.results)) == 1


def test_an_end_that_can_never_be_stored_fails_its_job_and_no_other(db, hand, ledger, monkeypatch):
    good, bad = hand.claim(*submit(db, 2, min_memory_mb=100))
    refuse_one(db, monkeypatch, bad.job_id)
    ledger.note(done(good), "1-1")
    ledger.note(done(bad)._replace(result='"refused"'), "1-2")
    wait_until(lambda: row(db, bad.job_id).status == "failed", what="failed")
    wait_until(lambda: row(db, good.job_id).status == "done", what="done")
    assert row(db, bad.job_id).error_kind == "bad_result"
    assert active_leases(db) == []


def test_when_not_even_the_failure_can_be_stored_the_worker_gives_itself_up(db, hand, ledger, monkeypatch, stuck):
    (bad,) = hand.claim(*submit(db))
    refused = DataError("INSERT …", {}, Exception(1406, "Data too long"))
    fail_first(db, monkeypatch, refused, refused)
    ledger.note(done(bad), "1-1")
    assert stuck.wait(10), "otherwise its job would stay owned for ever"


def refuse_one(db, monkeypatch, job_id: str) -> None:
    """The database refuses results of this job, as it would refuse text it cannot hold."""

    def picky(conn: Any, by: Any, ends: Any, seats: Any) -> Any:
        if any(end.job_id == job_id and end.result for end in ends):
            raise DataError("INSERT …", {}, Exception(1406, "Data too long"))
        return finish_all(conn, by, ends, seats)

    monkeypatch.setattr("worker.ledger.finish_all", picky)


def test_a_claim_that_meets_trouble_is_answered_so(db, ledger, monkeypatch):
    (job_id,) = submit(db)
    fail_first(db, monkeypatch, trouble(1317))
    with pytest.raises(Exception, match="the claim failed"):
        ledger.claim([job_id]).result(10)
    assert isinstance(ledger.claim([job_id]).result(10)[job_id], Claim)
