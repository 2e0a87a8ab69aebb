"""Every arrow: taken from where it starts, with its audit row; refused from elsewhere, without a trace."""

from functools import partial
from typing import Any

import pytest

from orchestrator import jobs as rules
from orchestrator.errors import JobEnded, NotRedrivable
from orchestrator.jobs import ARROWS, OWNED, TERMINAL, ErrorKind, Status
from orchestrator.store import schema
from orchestrator.store.claim import Claim, NotClaimed
from orchestrator.store.dead_letters import lock_ended, redrive_one, start_over
from orchestrator.store.dialect import utc_now, utc_shift
from orchestrator.store.moves import move
from orchestrator.store.settle import End, Outcome, Start
from orchestrator.store.withdraw import cancel, expire_overdue
from tests.factories import hire, history, row, rows, set_job, submit

#: What a worker reports so that an attempt takes this arrow. A job of these tests has one attempt to use up.
ENDS: dict[rules.Arrow, Any] = {
    rules.FINISH: {"outcome": Outcome.DONE, "result": "{}"},
    rules.SKIP: {"outcome": Outcome.SKIPPED, "error": "nothing to do"},
    rules.FAIL: {"outcome": Outcome.FAILED, "error_kind": ErrorKind.PERMANENT, "error": "no"},
    rules.BURY: {"outcome": Outcome.FAILED, "error_kind": ErrorKind.TRANSIENT, "error": "no"},
    rules.RETRY: {"outcome": Outcome.FAILED, "error_kind": ErrorKind.TRANSIENT, "error": "no"},
    rules.HAND_BACK: {"outcome": Outcome.HANDED_BACK, "error": "leaving"},
    rules.STOP: {"outcome": Outcome.CANCELLED},
}
#: What must have happened to the job before, beside its state.
BEFORE: dict[rules.Arrow, Any] = {
    rules.BURY: {"max_attempts": 1},
    rules.STOP: {"cancel_requested_at": utc_now()},
    rules.EXPIRE: {"expires_at": utc_shift(-1.0)},
}
#: Arrows that an attempt takes about itself.
OF_AN_ATTEMPT = [arrow for arrow in ARROWS if arrow.source <= OWNED]


def take(hand, arrow, job_id, attempt=1):
    """Try the arrow through the function that everybody uses; whether it was taken."""
    if arrow is rules.CLAIM:
        return isinstance(hand.offer(job_id)[job_id], Claim)
    if arrow is rules.DEFER:
        answer = hand.offer(job_id, memory_mb=None)[job_id]
        return isinstance(answer, NotClaimed) and answer.reason == "no_handler"
    if arrow is rules.START:
        hand.record(starts=[Start(job_id, attempt)])
        return status_of(hand, job_id) == Status.RUNNING
    if arrow in BY_OTHERS:
        return hand.db.write(lambda conn: BY_OTHERS[arrow](conn, job_id))
    (settled,) = hand.record(ends=[End(job_id, attempt, **ENDS[arrow])])
    return settled.arrow is arrow


def take_cancel(conn, job_id):
    try:
        return cancel(conn, job_id) is Status.CANCELLED
    except JobEnded:
        return False


def take_redrive(conn, job_id):
    try:
        return redrive_one(conn, job_id, 3).job_ids == [job_id]
    except NotRedrivable:
        return False


def take_rerun(conn, job_id):
    ended = [one for one in lock_ended(conn, [job_id]) if one.status in rules.RERUN.source]
    start_over(conn, rules.RERUN, ended)
    return bool(ended)


#: The UPDATE by itself, also to an end that somebody may wait for.
force = partial(move, followed=True)


BY_OTHERS = {
    rules.RERUN: take_rerun,
    rules.CANCEL: take_cancel,
    rules.EXPIRE: lambda conn, _job_id: expire_overdue(conn, 10) == 1,
    rules.REDRIVE: take_redrive,
}


def status_of(hand, job_id):
    return row(hand.db, job_id).status


def job_in(db, state, arrow, *, owner="somebody-else"):
    """A job put into `state` by hand, as attempt 1."""
    return jobs_in(db, [state], arrow, owner=owner)[state]


def jobs_in(db, states, arrow, *, owner="somebody-else"):
    """One for each state."""
    found = dict(zip(states, submit(db, len(states)), strict=True))
    for state, job_id in found.items():
        values = {"attempt": 1, "attempts": 1, "worker_id": owner if state in OWNED else None}
        set_job(db, job_id, status=state, **values, **BEFORE.get(arrow, {}))
    return found


def everything(db):
    tables = (schema.jobs, schema.audit, schema.results, schema.leases, schema.dead_letters)
    return [rows(db, table) for table in tables]


def names(value):
    if not isinstance(value, rules.Arrow):
        return str(value)
    return next(name for name, arrow in vars(rules).items() if arrow is value).lower()


@pytest.mark.parametrize("arrow", ARROWS, ids=names)
def test_an_arrow_leads_from_each_source_to_its_target(db, arrow):
    hand = hire(db)
    for source in sorted(arrow.source):
        owner = hand.worker_id if arrow is not rules.CLAIM else "somebody-else"
        job_id = job_in(db, source, arrow, owner=owner)
        assert take(hand, arrow, job_id), source
        assert status_of(hand, job_id) == arrow.target
        # Deferring is no event of the job's life: it happens every second, and `wait_reason` shows it.
        assert history(db, job_id)[1:] == ([] if arrow is rules.DEFER else [arrow.event])


@pytest.mark.parametrize("arrow", ARROWS, ids=names)
def test_an_arrow_is_refused_from_any_other_state(db, arrow):
    hand = hire(db)
    # A running job is asked to stop instead; test_withdraw looks at that.
    allowed = arrow.source | (OWNED if arrow is rules.CANCEL else set())
    jobs_by_state = jobs_in(db, [state for state in Status if state not in allowed], arrow)
    before = everything(db)
    for state, job_id in jobs_by_state.items():
        taken = take(hand, arrow, job_id)
        # Where the arrow leads, a report is taken for a repetition after a lost answer: yes, but nothing new.
        assert not taken or state == arrow.target, state
    assert everything(db) == before


@pytest.mark.parametrize("arrow", OF_AN_ATTEMPT, ids=names)
@pytest.mark.parametrize("attempt", [0, 2])
def test_an_arrow_is_refused_for_another_attempt(db, arrow, attempt):
    """INV-2, INV-3: a worker that was declared dead and wakes up changes nothing."""
    hand = hire(db)
    job_id = job_in(db, Status.CLAIMED, arrow, owner=hand.worker_id)
    before = everything(db)
    assert not take(hand, arrow, job_id, attempt)
    assert everything(db) == before


@pytest.mark.parametrize("arrow", ARROWS, ids=names)
def test_the_update_itself_is_guarded_by_state_attempt_and_owner(db, arrow):
    """Below the functions: were their checks wrong, the UPDATE still would not match."""
    values: dict[str, Any] = {"delay_s": 1.0} if arrow in {rules.RETRY, rules.DEFER, rules.REDRIVE, rules.RERUN} else {}
    if arrow.source <= OWNED:
        values["owner"] = "somebody-else"
    by_state = jobs_in(db, list(Status), arrow)
    outside = [job_id for state, job_id in by_state.items() if state not in arrow.source]
    inside = [job_id for state, job_id in by_state.items() if state in arrow.source]
    before = everything(db)
    assert db.write(lambda conn: force(conn, arrow, 1, outside, **values)) == 0
    assert db.write(lambda conn: force(conn, arrow, 2, inside, **values)) == 0
    if "owner" in values:
        assert db.write(lambda conn: force(conn, arrow, 1, inside, **values | {"owner": "a-third"})) == 0
    assert everything(db) == before
    assert db.write(lambda conn: force(conn, arrow, 1, inside, **values)) == len(inside)


@pytest.mark.parametrize("arrow", [arrow for arrow in OF_AN_ATTEMPT if arrow.source == OWNED], ids=names)
def test_after_a_cancel_the_update_itself_lets_an_attempt_only_stop(db, arrow):
    """INV-11, below the functions."""
    values: dict[str, Any] = {"owner": "somebody-else"} | ({"delay_s": 1.0} if arrow is rules.RETRY else {})
    ids = list(jobs_in(db, sorted(OWNED), arrow).values())
    for job_id in ids:
        set_job(db, job_id, cancel_requested_at=utc_now())
    moved = db.write(lambda conn: force(conn, arrow, 1, ids, **values))
    assert moved == (len(ids) if arrow is rules.STOP else 0)


@pytest.mark.parametrize("state", sorted(TERMINAL))
def test_the_end_is_the_end_except_for_an_operator(db, state):
    hand = hire(db)
    job_id = job_in(db, state, rules.FINISH)
    set_job(db, job_id, expires_at=utc_shift(-1.0), cancel_requested_at=utc_now())
    before = everything(db)
    for arrow in ARROWS:
        if arrow not in (rules.REDRIVE, rules.RERUN):
            take(hand, arrow, job_id)
    hand.go_silent()
    hand.lose(policy=rules.RetryPolicy(1, 1, 1))
    assert everything(db) == before
    assert take(hand, rules.REDRIVE, job_id) == (state in rules.REDRIVE.source)
