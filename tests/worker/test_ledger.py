"""The ledger alone, on a real database: what it was told is written, whatever the server says meanwhile."""

import json
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from sqlalchemy.exc import DataError, OperationalError, ProgrammingError

import worker.acknowledger
from orchestrator.errors import DatabaseUnavailable
from orchestrator.leases import Remains
from orchestrator.store import schema, unclaimable
from orchestrator.store.claim import HELD, Claim, NotClaimed, claim_jobs
from orchestrator.store.database import RowsHeld
from orchestrator.store.policies import Copy
from orchestrator.store.settle import Left, Release, Start, finish_all
from orchestrator.stream.hub import Hub
from orchestrator.stream.lane import Lane
from tests.factories import (
    POLICY,
    Hand,
    active_leases,
    done,
    gpu,
    hire,
    history,
    holding,
    holding_job,
    now,
    row,
    rows,
    set_job,
    spoil_job,
    status,
    submit,
)
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
    left, run = [*errors], db._run

    def failing(engine: Any, work: Any, *, transaction: bool, **how: Any) -> Any:
        if left and transaction and threading.current_thread().name == "ledger":
            raise left.pop(0)
        return run(engine, work, transaction=transaction, **how)

    monkeypatch.setattr(db, "_run", failing)
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


@pytest.mark.parametrize("count", [1, 2])
def test_a_claim_that_meets_trouble_for_good_is_answered_so_and_costs_no_job_anything(db, ledger, monkeypatch, count):
    ids = submit(db, count)
    fail_first(db, monkeypatch, *[trouble(1317)] * 4)
    with pytest.raises(DatabaseUnavailable, match="the claim failed"):
        ledger.claim(ids).result(10)
    answers = ledger.claim(ids).result(10)
    assert [answers[job_id].attempt for job_id in ids] == [1] * count


def test_a_claim_that_meets_trouble_once_is_tried_again(db, ledger, monkeypatch):
    (job_id,) = submit(db)
    fail_first(db, monkeypatch, trouble(1317))
    assert isinstance(ledger.claim([job_id]).result(10)[job_id], Claim)


def test_an_end_that_our_own_code_stumbles_over_is_tried_again_as_another_attempt(db, hand, ledger, monkeypatch):
    """It may have stumbled over a row of somebody else: that is no reason never to run it again."""
    (claim,) = hand.claim(*submit(db))
    monkeypatch.setattr("worker.ledger.finish_all", Mock(side_effect=KeyError("another's row")))
    ledger.note(done(claim), "1-1")
    wait_until(lambda: row(db, claim.job_id).status == "pending", what="handed on")
    assert (row(db, claim.job_id).error_kind, row(db, claim.job_id).attempts) == ("transient", 1)


# --- jobs whose claim breaks ---


def break_claims(monkeypatch, error: Exception, *broken: str) -> None:
    """Whoever claims these, with whomever, fails."""

    def claim(conn: Any, by: Any, job_ids: Any, *given: Any, **named: Any) -> Any:
        if not set(broken).isdisjoint(job_ids):
            raise error
        return claim_jobs(conn, by, job_ids, *given, **named)

    monkeypatch.setattr("worker.ledger.claim_jobs", claim)


def claimed(answers: dict[str, Claim | NotClaimed]) -> list[str]:
    return [job_id for job_id, answer in answers.items() if isinstance(answer, Claim)]


def test_a_row_that_no_claim_can_read_keeps_no_other_from_being_claimed(db, ledger, caplog):
    bad, *good = submit(db, 5, min_memory_mb=100)
    spoil_job(db, bad, gpu_count=0)
    answers = ledger.claim([*good[:2], bad, *good[2:]]).result(10)
    assert claimed(answers) == good
    assert "it cannot be claimed: IndexError" in answers[bad].reason
    assert status(db, bad) == "pending"
    assert bad in [getattr(line, "job_id", None) for line in caplog.records if line.levelname == "ERROR"]


def test_a_job_whose_claim_breaks_is_charged_and_put_off_and_says_why(db, hand, ledger, monkeypatch):
    bad, good = submit(db, 2)
    break_claims(monkeypatch, KeyError("what it has not"), bad)
    (claim,) = hand.claim(*submit(db))
    ledger.note(done(claim), "1-1")
    assert claimed(ledger.claim([bad, good]).result(10)) == [good]
    waits = row(db, bad)
    why = "it cannot be claimed: KeyError: 'what it has not'"
    assert (waits.status, waits.queued, waits.attempts, waits.wait_reason) == ("pending", "delayed", 1, why)
    assert (waits.worker_id, waits.last_error, waits.error_kind) == (None, why, "transient")
    assert history(db, bad)[1:] == ["job.claimed", "job.retry"]
    wait_done(db, claim)


def test_a_job_whose_claim_breaks_every_time_ends_as_a_dead_letter(db, ledger, monkeypatch):
    (bad,) = submit(db, max_attempts=2)
    break_claims(monkeypatch, IndexError("tuple index out of range"), bad)
    ledger.claim([bad]).result(10)
    set_job(db, bad, queued="announced", not_before=None)
    ledger.claim([bad]).result(10)
    assert (status(db, bad), row(db, bad).attempts) == ("dead_letter", 2)
    assert [letter.job_id for letter in rows(db, schema.dead_letters)] == [bad]


def test_a_claim_whose_answer_was_lost_and_that_breaks_then_is_asked_for_again(db, hand, ledger, monkeypatch):
    """Answered as not claimed, its entry would go, and the job stay this worker's for ever."""
    (stray,) = submit(db)
    hand.claim(stray)
    break_claims(monkeypatch, KeyError("what it has not"), stray)
    with pytest.raises(DatabaseUnavailable, match="is claimed already"):
        ledger.claim([stray]).result(10)


def test_no_job_is_charged_for_a_table_that_is_not_as_it_should_be(db, ledger, monkeypatch):
    (job_id,) = submit(db)
    break_claims(monkeypatch, ProgrammingError("SELECT …", {}, Exception(1054, "Unknown column")), job_id)
    ledger.claim([job_id]).result(10)
    assert (row(db, job_id).queued, row(db, job_id).attempts) == ("delayed", 0)


def test_a_job_that_cannot_be_charged_either_is_put_off_for_long(db, ledger, monkeypatch):
    bad, good = submit(db, 2)
    break_claims(monkeypatch, ValueError("no"), bad)
    monkeypatch.setattr(unclaimable, "record", Mock(side_effect=DataError("UPDATE …", {}, Exception(1264, "range"))))
    assert claimed(ledger.claim([bad, good]).result(10)) == [good]
    waits = row(db, bad)
    assert (waits.queued, waits.attempts, waits.wait_reason) == ("delayed", 0, "it cannot be claimed: ValueError: no")
    assert (waits.not_before - now(db)).total_seconds() > unclaimable.PUT_OFF_S / 2


def test_a_job_of_which_nothing_can_be_written_is_left_where_it_is(db, ledger, monkeypatch):
    bad, good = submit(db, 2)
    break_claims(monkeypatch, ValueError("no"), bad)
    monkeypatch.setattr(unclaimable, "move", Mock(side_effect=DataError("UPDATE …", {}, Exception(4025, "check"))))
    answers = ledger.claim([bad, good]).result(10)
    assert (claimed(answers), type(answers[bad])) == ([good], NotClaimed)
    assert row(db, bad).queued == "ready"


def test_a_job_with_which_the_server_has_trouble_is_put_off_and_not_charged(db, ledger, monkeypatch):
    bad, good = submit(db, 2)
    break_claims(monkeypatch, trouble(1690), bad)
    assert claimed(ledger.claim([bad, good]).result(10)) == [good]
    waits = row(db, bad)
    assert (waits.queued, waits.attempts) == ("delayed", 0)
    assert "the server's trouble" in waits.wait_reason


def test_nothing_is_split_while_the_server_is_away(db, ledger, monkeypatch):
    ids = submit(db, 4)
    left = fail_first(db, monkeypatch, *[DatabaseUnavailable("gone")] * 3)
    with pytest.raises(DatabaseUnavailable, match="gone"):
        ledger.claim(ids).result(10)
    assert len(left) == 2


# --- a server that takes small statements ---


@pytest.fixture
def small_packets(db, mariadb) -> Iterator[None]:
    with mariadb.taking(1 << 20):
        db.engine.dispose()
        yield
    db.engine.dispose()


def test_results_that_are_too_large_together_are_written_one_by_one(db, hand, ledger, small_packets):
    claims = hand.claim(*submit(db, 4))
    ids = submit(db)
    for claim in claims:
        ledger.note(done(claim, json.dumps("a" * 600_000)), "1-1")
    assert claimed(ledger.claim(ids).result(20)) == ids
    wait_done(db, *claims)


#: By its length, by what must be escaped, by what takes four bytes.
TOO_LARGE = ["a" * 1_100_000, '"' * 300_000, "\N{PILE OF POO}" * 300_000]


@pytest.mark.parametrize("text", TOO_LARGE, ids=["long", "escaped", "wide"])
def test_a_result_that_is_larger_than_the_server_takes_fails_its_job_and_no_other(
    db, hand, ledger, small_packets, text
):
    large, small = hand.claim(*submit(db, 2))
    ledger.note(done(large, json.dumps(text, ensure_ascii=False)), "1-1")
    ledger.note(done(small), "1-2")
    wait_until(lambda: row(db, large.job_id).status == "failed", what="failed")
    wait_done(db, small)
    assert "raise its max_allowed_packet" in row(db, large.job_id).last_error
    assert row(db, large.job_id).error_kind == "bad_result"


# --- rows that somebody holds ---


def wait_done(db, *claims: Claim) -> None:
    wait_until(lambda: {status(db, claim.job_id) for claim in claims} == {"done"}, what="done")


def test_an_end_whose_row_is_held_keeps_no_other_from_being_written(db, hand, ledger):
    """F-32."""
    held, first, second = hand.claim(*submit(db, 3))
    with holding_job(db, held.job_id):
        ledger.note(done(held), "1-1")
        ledger.note(done(first), "1-2")
        wait_done(db, first)
        ledger.note(done(second), "1-3")
        wait_done(db, second)
        assert status(db, held.job_id) == "claimed"
    wait_done(db, held)
    assert sorted(result.job_id for result in rows(db, schema.results)) == sorted(
        claim.job_id for claim in (held, first, second)
    )
    assert history(db, held.job_id).count("job.done") == 1


def test_a_start_that_was_put_off_changes_nothing_when_its_end_is_written(db, hand, ledger):
    (claim,) = hand.claim(*submit(db))
    with holding_job(db, claim.job_id):
        ledger.note(Start(claim.job_id, claim.attempt), "1-1")
        wait_until(lambda: ledger._late, what="put off")
        ledger.note(done(claim), "1-1")
        wait_until(lambda: len(ledger._late) == 2, what="both are put off")
    wait_done(db, claim)
    wait_until(lambda: not ledger._late, what="nothing is left")
    events = history(db, claim.job_id)
    assert events.count("job.done") == 1
    assert events.index("job.done") == len(events) - 1


def test_of_an_offer_all_are_claimed_but_the_job_whose_row_is_held(db, hand, ledger):
    first, held, *rest = submit(db, 5)
    with holding_job(db, held):
        answers = ledger.claim([first, held, *rest]).result(20)
        assert answers.pop(held) == NotClaimed(HELD)
        assert sorted(answers) == sorted([first, *rest])
        assert all(isinstance(answer, Claim) for answer in answers.values())
        assert ledger.claim([held]).result(20) == {held: NotClaimed(HELD)}
    assert (status(db, held), row(db, held).attempt) == ("pending", 0)
    assert isinstance(ledger.claim([held]).result(20)[held], Claim)


def test_who_needs_a_gpu_that_is_held_is_left_for_later_and_the_others_are_claimed(db, hand, ledger):
    (leased,), (plain,) = submit(db, min_memory_mb=100), submit(db)
    with holding(db, schema.gpus):
        answers = ledger.claim([leased, plain]).result(20)
        assert answers[leased] == NotClaimed(HELD)
        assert isinstance(answers[plain], Claim)
        waiting = row(db, leased)
        assert (waiting.status, waiting.queued, waiting.wait_reason) == ("pending", "delayed", HELD)
    assert active_leases(db) == []


@pytest.mark.parametrize("table", [schema.jobs, schema.gpus], ids=["its own", "of its GPU"])
def test_a_job_that_is_ours_by_a_lost_answer_is_offered_again_until_its_row_is_free(db, hand, ledger, table):
    """Nobody else would hand it back: its worker lives, and does not know it."""
    (claim,) = hand.claim(*submit(db, min_memory_mb=100))
    with holding(db, table), pytest.raises(RowsHeld):
        ledger.claim([claim.job_id]).result(20)
    again = ledger.claim([claim.job_id]).result(20)[claim.job_id]
    assert isinstance(again, Claim)
    assert again.attempt == 2


def test_a_model_is_not_released_before_the_end_that_left_it_is_written(db, hand, ledger):
    (claim,) = hand.claim(*submit(db, min_memory_mb=100))
    model = f"model:{hand.worker_id}:0"
    left = Left(Remains.MODEL, f"{hand.worker_id}#0", model, "echo")
    with holding_job(db, claim.job_id):
        ledger.note(done(claim)._replace(left=left), "1-1")
        wait_until(lambda: ledger._late, what="put off")
        ledger.note(Release(model, Left()))
        (other,) = hand.claim(*submit(db))
        ledger.note(done(other), "1-2")
        wait_done(db, other)
    wait_done(db, claim)
    wait_until(lambda: active_leases(db) == [], what="the lease is over")
    assert [g.leased_mb for g in rows(db, schema.gpus)] == [0]


def test_an_end_whose_row_is_held_after_the_server_stumbled_holds_up_nobody(db, hand, ledger, monkeypatch):
    held, free = hand.claim(*submit(db, 2))
    fail_first(db, monkeypatch, trouble(1317))
    with holding_job(db, held.job_id):
        ledger.note(done(held), "1-1")
        ledger.note(done(free), "1-2")
        wait_done(db, free)
    wait_done(db, held)


def test_an_end_that_was_put_off_and_can_never_be_stored_keeps_no_release_waiting(db, hand, ledger, monkeypatch, stuck):
    (claim,) = hand.claim(*submit(db))
    model = f"model:{hand.worker_id}:0"
    refused = DataError("INSERT …", {}, Exception(1406, "too long"))
    with holding_job(db, claim.job_id):
        ledger.note(done(claim)._replace(left=Left(Remains.MODEL, "slot", model, "echo")), "1-1")
        wait_until(lambda: ledger._late, what="put off")
        fail_first(db, monkeypatch, refused, refused)
        assert stuck.wait(20)
    wait_until(lambda: not ledger._late, what="that nobody waits for it")


def test_a_ledger_that_is_closed_gives_up_what_somebody_holds(db, hand, ledger, caplog):
    (claim,) = hand.claim(*submit(db, min_memory_mb=100))
    model = f"model:{hand.worker_id}:0"
    with holding_job(db, claim.job_id):
        ledger.note(done(claim)._replace(left=Left(Remains.MODEL, "slot", model, "echo")), "1-1")
        wait_until(lambda: ledger._late, what="put off")
        ledger.note(Release(model, Left()))
        ledger.close(1.0)
        assert not any(thread.is_alive() for thread in ledger._batcher._threads)
    messages = [line.message for line in caplog.records]
    assert messages.count("somebody holds a row") == 1, "not at every try"
    assert messages[-2:] == ["gave up on unwritten results", "a write failed"]
    assert status(db, claim.job_id) == "claimed"
