"""Rates: so many new jobs and no more, whoever stores them; and nothing for what was not let in."""

from concurrent.futures import Future, ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace

import pytest
from sqlalchemy import update

from orchestrator.admission import FREELY, Admitted
from orchestrator.errors import Overloaded, RateLimited
from orchestrator.policies import AgentPolicy, Scope
from orchestrator.store import admission as admitting
from orchestrator.store import policies, rates, schema
from orchestrator.store.admission import Admission
from orchestrator.store.dialect import utc_shift
from orchestrator.store.submit import Verdict, submit_jobs
from orchestrator.telemetry import metrics
from tests.factories import POLICY, meeting, new_job, rows, traffic


@pytest.fixture(autouse=True)
def _copies_stay_fresh(monkeypatch):
    """However long a test takes: what an admission knows without asking, it knows by a copy that is fresh."""
    monkeypatch.setattr(policies, "FRESH_S", 600.0)


@pytest.fixture
def limit(db):
    def put(agent="a", rate=0.001, burst=5, **given):
        document = AgentPolicy(rate=rate, burst=burst, **given)
        db.write(lambda conn: policies.put(conn, Scope.AGENT, agent, document))

    return put


def jobs(count, agent="a", **fields):
    return [new_job(agent=agent, **fields) for _ in range(count)]


def send(db, batch, admission=None):
    ruling = (admission or Admission(policies.Copy())).ruling()
    answers = submit_jobs(db, batch, POLICY, admit=ruling.decide)
    ruling.committed()
    return answers


def created(answers):
    return answers.count(Verdict.CREATED)


def tokens(db, agent="a"):
    return {row.agent: row.tokens for row in rows(db, schema.rate_buckets)}.get(agent)


def pass_time(db, seconds):
    back = update(schema.rate_buckets).values(refilled_at=utc_shift(-seconds))
    db.write(lambda conn: conn.execute(back))


def test_a_burst_passes_and_the_rest_is_told_when_to_come_again(db, limit):
    limit(rate=0.5, burst=5)
    answers = send(db, jobs(8))
    assert answers[:5] == [Verdict.CREATED] * 5
    waits = [answer.retry_after_s for answer in answers[5:]]
    assert all(isinstance(answer, RateLimited) for answer in answers[5:])
    assert waits == pytest.approx([2, 4, 6], abs=0.1)
    assert len(rows(db, schema.jobs)) == len(rows(db, schema.audit)) - 1 == 5


def test_tokens_drip_in_by_the_clock_of_the_database(db, limit):
    limit(rate=0.01, burst=5)
    send(db, jobs(5))
    assert created(send(db, jobs(2))) == 0
    pass_time(db, 225)
    assert created(send(db, jobs(5))) == 2
    pass_time(db, 1000)
    assert created(send(db, jobs(9))) == 5


def test_a_clock_that_was_set_back_stops_nobody_for_longer(db, limit):
    limit(rate=0.01, burst=5)
    send(db, jobs(4))
    pass_time(db, -3600)
    assert created(send(db, jobs(2))) == 1
    pass_time(db, 100)
    assert created(send(db, jobs(2))) == 1


def test_agents_have_buckets_of_their_own_and_those_without_a_rate_none(db, limit):
    limit("*", burst=2)
    limit("vip", burst=3)
    db.write(lambda conn: policies.put(conn, Scope.AGENT, "free", AgentPolicy(weight=2.0)))
    batch = [job for agent in ("b", "vip", "c", "free") for job in jobs(4, agent)]
    answers = send(db, batch)
    assert [created(answers[n : n + 4]) for n in range(0, 16, 4)] == [2, 3, 2, 4]
    assert {row.agent for row in rows(db, schema.rate_buckets)} == {"b", "vip", "c"}


def test_repeats_cost_nothing_and_are_answered_also_over_the_rate(db, limit):
    limit(burst=2)
    first = new_job(agent="a", job_id="x")
    assert created(send(db, [first, first])) == 1
    assert tokens(db) == pytest.approx(1, abs=0.01)
    send(db, jobs(1))
    other = new_job(agent="a", job_id="x", payload={"other": 1})
    answers = send(db, [first, other, new_job(agent="a", job_id="y")])
    assert answers[:2] == [Verdict.EXISTS, Verdict.CONFLICT]
    assert isinstance(answers[2], RateLimited)


def refuse(kinds):
    """A step that refuses jobs of these types."""
    refusal = Overloaded("no")
    return lambda _conn, _book, fresh: [refusal if job.spec.type in kinds else FREELY for job in fresh]


@pytest.mark.parametrize("where", ["before", "after"])
def test_what_another_step_refuses_costs_no_token(db, limit, where):
    limit(burst=5)
    admission = Admission(policies.Copy(), **{where: [refuse({"bad"})]})
    answers = send(db, jobs(3, type="bad") + jobs(2), admission)
    assert [answer is Verdict.CREATED for answer in answers] == [False] * 3 + [True] * 2
    assert tokens(db) == pytest.approx(3, abs=0.01)


def test_a_step_sees_only_what_those_before_it_let_pass(db, limit):
    limit(burst=2)
    seen = []

    def look(_conn, _book, fresh):
        seen.append([job.spec.type for job in fresh])
        return [Admitted(blocked_on="gate:x", reason="later") for _ in fresh]

    admission = Admission(policies.Copy(), before=[refuse({"bad"}), look], after=[look])
    batch = jobs(1, type="bad") + jobs(3, type="good")
    ruling = admission.ruling()
    decisions = db.write(lambda conn: ruling.decide(conn, batch))
    assert seen == [["good"] * 3, ["good"] * 2]
    assert [isinstance(decision, Admitted) for decision in decisions] == [False, True, True, False]


def test_two_steps_that_let_pass_agree(db):
    first = Admitted(on_cpu=True)
    second = Admitted(blocked_on="cap:x", reason="full")
    admission = Admission(policies.Copy(), before=[lambda *_: [first]], after=[lambda *_: [second]])
    assert db.write(lambda conn: admission.ruling().decide(conn, jobs(1))) == [Admitted("cap:x", "full", on_cpu=True)]


def test_all_who_store_jobs_at_once_share_a_bucket(db, db_url, open_database, limit):
    limit(burst=50)
    databases, threads = (db, open_database(db_url)), 8
    barrier = Barrier(threads)

    def race(n):
        admission = Admission(policies.Copy())
        barrier.wait(30)
        return sum(created(send(databases[n % 2], jobs(4), admission)) for _ in range(5))

    with ThreadPoolExecutor(threads) as pool:
        assert sum(pool.map(race, range(threads))) == 50
    assert len(rows(db, schema.jobs)) == 50


def test_a_bucket_that_two_find_missing_is_one_bucket(maria_db, monkeypatch):
    document = AgentPolicy(rate=0.001, burst=1)
    maria_db.write(lambda conn: policies.put(conn, Scope.AGENT, "a", document))
    monkeypatch.setattr(rates, "_locked", meeting(2, rates._locked))
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: send(maria_db, jobs(1)), range(2)))
    assert sum(map(created, answers)) == len(rows(maria_db, schema.jobs)) == 1


def test_a_commit_whose_answer_is_lost_costs_its_tokens_once(db, limit, lose_commits):
    limit(burst=5)
    admission = Admission(policies.Copy())
    batch = [new_job(agent="a", job_id=f"j-{n}") for n in range(3)]
    lose_commits(1)
    assert set(send(db, batch, admission)) <= {Verdict.CREATED, Verdict.EXISTS}
    assert tokens(db) == pytest.approx(2, abs=0.01)


def test_without_rates_no_statement_and_with_one_three(db, limit):
    admission = Admission(policies.Copy())
    send(db, jobs(1), admission)
    with traffic(db) as free:
        send(db, jobs(50), admission)
    assert not [s for s in free.statements if "rate_buckets" in s or "policies" in s]
    limit(burst=1000)
    for agent in ("b", "c", "d"):
        limit(agent, burst=1000)
    admission.policies.expire()
    batch = [job for agent in "abcd" for job in jobs(50, agent)]
    send(db, batch, admission)
    batch = [job for agent in "abcd" for job in jobs(50, agent)]
    with traffic(db) as limited:
        assert created(send(db, batch, admission)) == 200
    assert len(limited.statements) <= len(free.statements) + 3, limited.statements


# --- refusals without the database ---


def test_an_empty_bucket_is_remembered_and_nothing_asked(db, limit):
    limit(rate=0.01, burst=2)
    admission = Admission(policies.Copy())
    assert admission.refuse_early(jobs(1)) is None
    send(db, jobs(3), admission)
    refused = admission.refuse_early(jobs(2)) or []
    assert [error.retry_after_s for error in refused] == pytest.approx([100, 200], abs=5)
    assert admission.refuse_early(jobs(1) + jobs(1, "other")) is None
    # It may have been stored already, and would wait very long for that answer.
    assert admission.refuse_early(jobs(1, job_id="mine")) is None


def test_what_is_remembered_refills_with_time(db, limit, monkeypatch):
    limit(rate=2.0, burst=2)
    admission = Admission(policies.Copy())
    send(db, jobs(2), admission)
    looked_at = admission._remembered["a"].looked_at

    def after(seconds):
        monkeypatch.setattr(admitting, "time", SimpleNamespace(monotonic=lambda: looked_at + seconds))

    after(0.1)
    assert admission.refuse_early(jobs(1, job_id="soon"))
    after(0.6)
    assert admission.refuse_early(jobs(1)) is None


def test_tokens_of_those_on_the_way_are_spoken_for(db, limit):
    limit(rate=0.01, burst=3)
    admission = Admission(policies.Copy())
    send(db, jobs(1), admission)
    stored: Future[object] = Future()
    admission.on_the_way(jobs(1) + jobs(5, job_id="perhaps-a-repeat") + jobs(3, "other"), stored)
    assert admission.refuse_early(jobs(1)) is None
    last: Future[object] = Future()
    admission.on_the_way(jobs(1), last)
    assert [error.retry_after_s for error in admission.refuse_early(jobs(1)) or []] == pytest.approx([100], abs=5)
    last.set_exception(Overloaded("it did not get there"))
    assert admission.refuse_early(jobs(1)) is None
    stored.cancel()
    assert not admission._on_the_way


def test_another_policy_is_asked_about(db, limit):
    limit(burst=1)
    admission = Admission(policies.Copy())
    send(db, jobs(2), admission)
    assert admission.refuse_early(jobs(1))
    limit(burst=9)
    admission.policies.expire()
    assert admission.refuse_early(jobs(1)) is None
    send(db, jobs(1, "other"), admission)
    assert admission.refuse_early(jobs(1)) is None


def test_what_was_rolled_back_is_not_remembered(db, limit):
    limit(burst=1)
    admission = Admission(policies.Copy())
    ruling = admission.ruling()
    with pytest.raises(ZeroDivisionError):
        db.write(lambda conn: (ruling.decide(conn, jobs(1)), 1 / 0))
    assert admission.refuse_early(jobs(1)) is None
    assert tokens(db) is None


def test_decisions_are_counted(db, limit):
    def count(decision, reason):
        labels = {"decision": decision, "reason": reason}
        return metrics.REGISTRY.get_sample_value("gpu_orchestrator_admission_decisions_total", labels) or 0.0

    kinds = [("admitted", "free"), ("rejected", "rate_limited"), ("queued", "gate"), ("cpu", "no_gpu")]
    before = [count(*kind) for kind in kinds]
    limit(burst=3)
    told = [Admitted(blocked_on="gate:lane"), Admitted(on_cpu=True), FREELY]
    admission = Admission(policies.Copy(), after=[lambda *_: told])
    send(db, jobs(5), admission)
    admission.refuse_early(jobs(1))
    assert [count(*kind) - was for kind, was in zip(kinds, before, strict=True)] == [1, 3, 1, 1]
