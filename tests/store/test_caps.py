"""Caps: how many jobs with a key run at once, whoever claims and ends them."""

import json

import pytest
from sqlalchemy import delete, insert, update

from orchestrator.errors import InvalidInput
from orchestrator.jobs import ErrorKind
from orchestrator.policies import Book, PausePolicy
from orchestrator.store import blocked, caps, outbox, registry, schema, withdraw
from orchestrator.store.claim import NO_SLOT, Claim, NotClaimed, claim_jobs
from orchestrator.store.dispatch import Claiming, Fetch, openings, why_none
from orchestrator.store.settle import finish_all
from orchestrator.store.submit import submit_jobs
from tests.factories import (
    POLICY,
    done,
    gpu,
    hire,
    new_job,
    row,
    rows,
    set_job,
    submit,
    traffic,
)
from tests.fetchers import claimant, enlist

HOST = "host:example.org"


def book(*paused, **most):
    return Book(
        1, caps={key.replace("__", ":"): n for key, n in most.items()}, pauses={k: PausePolicy() for k in paused}
    )


def capped(keys):
    return Book(1, caps=keys)


def in_use(db):
    return {key: count for key, count in rows(db, schema.concurrency_caps) if count}


def claims(answers):
    return [answer for answer in answers.values() if isinstance(answer, Claim)]


def crew(db, keys, **how):
    hand = hire(db, **how)
    hand.book = capped(keys)
    return hand


def publish(db, policies_now, lane="default", limit=100):
    def work(conn):
        glance = caps.Glance(conn, policies_now)
        return [job.job_id for job in outbox.take(conn, lane, limit, caps=glance)], glance.freed

    return db.write(work)


# --- what a job may say ---


def test_a_job_brings_keys_of_its_own(db):
    (job_id,) = submit(db, concurrency_keys=["repo:a/b", HOST])
    assert json.loads(row(db, job_id).concurrency_keys) == [HOST, "repo:a/b"]
    assert row(db, submit(db)[0]).concurrency_keys is None


def test_the_same_keys_in_another_order_are_the_same_content():
    one, other = (new_job(concurrency_keys=keys) for keys in (["a", "b"], ["b", "a"]))
    assert one.content_hash == other.content_hash != new_job(concurrency_keys=["a"]).content_hash


@pytest.mark.parametrize(
    "keys",
    [
        ["agent:x"],
        ["global"],
        ["type:a"],
        ["model:m"],
        ["pool:p"],
        ["a", "a"],
        [""],
        ["a b"],
        ["host:*"],
        ["x" * 201],
        "a",
        [f"k{n}" for n in range(17)],
    ],
)
def test_keys_that_mean_something_else_are_refused(keys):
    with pytest.raises(InvalidInput, match="concurrency_keys"):
        new_job(concurrency_keys=keys)


# --- claims ---


def test_no_more_are_claimed_than_may_run_and_the_others_wait(db):
    hand, ids = crew(db, {"agent:a": 2}), submit(db, 4, agent="a")
    answers = hand.offer(*ids)
    assert [claim.job_id for claim in claims(answers)] == ids[:2]
    assert answers[ids[2]] == NotClaimed("cap agent:a is full: 2 of 2 run")
    assert in_use(db) == {"agent:a": 2}
    assert json.loads(row(db, ids[0]).held_caps) == ["agent:a"]
    assert [row(db, job_id).blocked_on for job_id in ids] == [None, None, "cap:agent:a", "cap:agent:a"]


def test_in_order_of_rank_however_they_were_delivered(db):
    hand, ids = crew(db, {"agent:a": 2}), submit(db, 4, agent="a")
    assert {claim.job_id for claim in claims(hand.offer(*reversed(ids)))} == set(ids[:2])


def test_all_keys_or_none(db):
    hand = crew(db, {"agent:a": 2, HOST: 1, "host:*": 3})
    first, second = submit(db, 2, agent="a", concurrency_keys=[HOST])
    (third,) = submit(db, agent="a", concurrency_keys=["host:other"])
    found = claims(hand.offer(first, second, third))
    assert [claim.job_id for claim in found] == [first, third]
    assert found[0].caps == ("agent:a", HOST)
    assert in_use(db) == {"agent:a": 2, HOST: 1, "host:other": 1}
    # Of two full keys the scarcer one: it is free least often.
    assert row(db, second).blocked_on == f"cap:{HOST}"


def test_every_kind_of_key_counts(db):
    keys = ["global", "pool:default", "agent:anonymous", "type:echo", "model:m"]
    for key in keys:
        hand, ids = crew(db, {key: 1}), submit(db, 2, model_id="m")
        (claim,) = claims(hand.offer(*ids))
        assert in_use(db) == {key: 1}
        hand.finish(claim)
        withdrawn = ids[1]
        db.write(lambda conn, job_id=withdrawn: withdraw.cancel(conn, job_id))


def test_the_model_of_its_pool_is_a_job_s_model(db):
    hand, (job_id,) = crew(db, {"model:*": 1}), submit(db)
    by = hand.by.__class__(hand.worker_id, "node-1", "default", 60.0, hand.terms, model_id="m ")

    def work(conn):
        seats = caps.Seats(conn, hand.book)
        seats.expect([job_id], model_id=by.model_id)
        found = caps_claim(conn, by, [job_id], seats)
        seats.close()
        return found

    assert isinstance(db.write(work)[job_id], Claim)
    assert in_use(db) == {"model:m": 1}


def caps_claim(conn, by, ids, seats):
    return claim_jobs(conn, by, ids, lambda _type: 0, seats=seats)


def test_nobody_sits_who_gets_no_lease(db):
    """Memory for one, seats for two: the second keeps its rank and takes no seat, the third need not wait for one."""
    hand, ids = crew(db, {"agent:a": 2}), submit(db, 3, agent="a", min_memory_mb=20_000)
    hand.sees(gpu(0))
    answers = hand.offer(*ids)
    assert [claim.job_id for claim in claims(answers)] == ids[:1]
    assert in_use(db) == {"agent:a": 1}
    assert row(db, ids[1]).queued == "delayed"
    assert answers[ids[2]] == NotClaimed(NO_SLOT, put_back=True)
    assert row(db, ids[2]).blocked_on is None


def test_each_job_of_a_batch_takes_a_seat(db):
    hand, ids = crew(db, {"agent:a": 3}), submit(db, 5, agent="a")
    assert len(claims(hand.offer(*ids, batch=8))) == 3
    assert in_use(db) == {"agent:a": 3}


def test_claims_without_capped_keys_cost_nothing(db):
    hand, ids = crew(db, {"agent:a": 1}), submit(db, 16, agent="b")
    hand.offer(*submit(db, agent="b"))
    with traffic(db) as seen:
        assert len(claims(hand.offer(*ids))) == 16
    assert not [s for s in seen.statements if "concurrency_caps" in s]


def test_claiming_and_ending_16_capped_jobs_is_a_handful_of_statements(db):
    hand = crew(db, {"agent:*": 50, "host:*": 1})
    ids = [submit(db, agent="a", concurrency_keys=[f"host:{n}"])[0] for n in range(16)]
    with traffic(db) as claimed:
        found = hand.claim(*ids)
    with traffic(db) as ended:
        hand.finish(*found)
    # The keys, two looks and the rows; the jobs, the claim, their keys and the audit; two changes.
    assert len([s for s in claimed.statements if not s.startswith("BEGIN")]) <= 10, claimed.statements
    # The jobs, results, the keys' lock, two changes, a look who waits for them, audit.
    assert len([s for s in ended.statements if not s.startswith("BEGIN")]) <= 7, ended.statements
    assert in_use(db) == {}


# --- ends ---


def end_by_failure(hand, claim):
    hand.fail(claim, ErrorKind.PERMANENT)


def end_by_retry(hand, claim):
    hand.fail(claim)


def end_by_burial(hand, claim):
    hand.fail(claim, ErrorKind.WORKER_LOST)
    set_job(hand.db, claim.job_id, crashes=9)


def end_by_hand_back(hand, claim):
    hand.hand_back(claim)


def end_by_cancel(hand, claim):
    hand.db.write(lambda conn: withdraw.cancel(conn, claim.job_id))
    hand.finish(claim)


def end_by_death(hand, claim):
    others = update(schema.jobs).where(schema.jobs.c.job_id != claim.job_id, schema.jobs.c.status == "claimed")
    hand.db.write(lambda conn: conn.execute(others.values(worker_id="alive")))
    hand.lose()


def end_by_success(hand, claim):
    hand.finish(claim)


def end_twice(hand, claim):
    hand.finish(claim)
    hand.finish(claim)
    hand.fail(claim)


ENDS = [
    end_by_success,
    end_by_failure,
    end_by_retry,
    end_by_burial,
    end_by_hand_back,
    end_by_cancel,
    end_by_death,
    end_twice,
]


@pytest.mark.parametrize("end", ENDS)
def test_every_end_gives_its_seats_back_once_and_lets_the_next_go(db, end):
    hand, ids = crew(db, {"agent:a": 2, "type:echo": 9}), submit(db, 5, agent="a")
    first, second = claims(hand.offer(*ids))
    end(hand, first)
    assert in_use(db) == {"agent:a": 1, "type:echo": 1}
    assert row(db, first.job_id).held_caps is None
    assert row(db, second.job_id).held_caps is not None
    assert [row(db, job_id).queued for job_id in ids[2:]] == ["ready", "blocked", "blocked"]


def test_an_attempt_that_lost_its_job_gives_nothing_back(db):
    hand, other, ids = crew(db, {"agent:a": 1}), crew(db, {"agent:a": 1}), submit(db, 1, agent="a")
    (lost,) = claims(hand.offer(*ids))
    hand.fail(lost, retry_after_s=0.0)
    assert len(claims(other.offer(*ids))) == 1
    hand.finish(lost)
    hand.fail(lost)
    assert in_use(db) == {"agent:a": 1}


def test_a_seat_that_is_given_back_and_taken_at_once_frees_nobody(db):
    hand, ids = crew(db, {"agent:a": 1}), submit(db, 3, agent="a")
    (running,) = claims(hand.offer(*ids[:1]))
    hand.offer(ids[2])

    def turn(conn):
        seats = caps.Seats(conn, hand.book)
        seats.expect([ids[1]], held=running.caps)
        finish_all(conn, hand.by, [done(running)], seats)
        answers = caps_claim(conn, hand.by, [ids[1]], seats)
        seats.close()
        return answers, seats.freed

    answers, freed = db.write(turn)
    assert len(claims(answers)) == 1
    assert freed == set()
    assert in_use(db) == {"agent:a": 1}
    assert row(db, ids[2]).queued == "blocked"


def test_a_claim_whose_answer_was_lost_sits_once(db, lose_commits):
    hand, ids = crew(db, {"agent:a": 1}), submit(db, 2, agent="a")
    lose_commits(1)
    found = claims(hand.offer(*ids))
    assert [claim.job_id for claim in found] == ids[:1]
    assert in_use(db) == {"agent:a": 1}
    lose_commits(1)
    hand.finish(*found)
    assert in_use(db) == {}


def test_leaving_gives_the_seats_of_an_http_worker_back(db):
    remote, policies_now = enlist(db), capped({"agent:a": 1})
    ids = submit(db, 2, agent="a")

    def fetch():
        claiming = Claiming([Fetch(remote.worker_id, 5)], claimant, lambda _conn: policies_now)
        (answer,) = db.write(claiming)
        return answer, claiming.freed

    (claim,), _ = fetch()
    assert claim.job_id == ids[0]
    assert (in_use(db), row(db, ids[1]).queued) == ({"agent:a": 1}, "blocked")
    db.write(lambda conn: registry.deregister(conn, remote.worker_id, POLICY))
    assert (in_use(db), row(db, ids[1]).queued) == ({}, "ready")


def test_an_http_worker_s_report_lets_the_next_go(db):
    remote, ids = enlist(db), submit(db, 2, agent="a")
    hand = crew(db, {"agent:a": 1})
    (answer,) = db.write(Claiming([Fetch(remote.worker_id, 5)], claimant, lambda _conn: hand.book))
    remote.finish(*answer)
    assert (in_use(db), row(db, ids[1]).queued) == ({}, "ready")


# --- pauses ---


def test_a_paused_agent_s_jobs_wait_and_say_so(db):
    hand, ids = hire(db), submit(db, 2, agent="a")
    hand.book = Book(1, pauses={"agent:a": PausePolicy(reason="maintenance")})
    assert set(hand.offer(*ids).values()) == {NotClaimed("agent:a is paused: maintenance")}
    assert {row(db, job_id).blocked_on for job_id in ids} == {"cap:agent:a"}
    assert in_use(db) == {}


@pytest.mark.parametrize("scope", ["global", "pool:default"])
def test_a_lane_that_is_paused_as_a_whole_stays_in_its_order(db, scope):
    hand, ids, remote = hire(db), submit(db, 2), enlist(db)
    db.write(lambda conn: outbox.take(conn, "default", 1))
    hand.book = book(scope)
    assert set(hand.offer(*ids).values()) == {NotClaimed(f"{scope} is paused")}
    assert {row(db, job_id).queued for job_id in ids} == {"ready"}
    assert publish(db, hand.book) == ([], set())
    claiming = Claiming([Fetch(remote.worker_id, 5)], claimant, lambda _conn: hand.book)
    assert db.write(claiming) == [[]]
    assert db.read(lambda conn: openings(conn, [remote.worker_id], hand.book)) == set()
    assert db.read(lambda conn: why_none(conn, remote.worker_id, hand.book)) == f"{scope} is paused"
    assert db.write(lambda conn: caps.admit(conn, hand.book, [new_job()]))[0].blocked_on is None
    assert publish(db, book("pool:other"))[0] == ids


# --- who goes next ---


def end_with(hand, claim):
    """As a worker ends it: with the policies at hand."""

    def work(conn):
        seats = caps.Seats(conn, hand.book)
        seats.expect(held=claim.caps)
        finish_all(conn, hand.by, [done(claim)], seats)
        seats.close()

    hand.db.write(work)


def shared_host(db, *agents):
    """Jobs of these agents, all for one host that is in use, under two at a time for each agent."""
    hand = crew(db, {"agent:*": 2, HOST: 1})
    (running,) = hand.claim(*submit(db, agent="z", concurrency_keys=[HOST]))
    ids = [submit(db, agent=agent, concurrency_keys=[HOST])[0] for agent in agents]
    hand.offer(*ids)
    assert {row(db, job_id).blocked_on for job_id in ids} == {f"cap:{HOST}"}
    return hand, running, ids


def test_the_first_who_can_use_a_seat_gets_it(db):
    hand, running, ids = shared_host(db, "a", "a", "b", "a")
    hand.claim(*submit(db, 2, agent="a"))
    end_with(hand, running)
    assert [row(db, job_id).queued for job_id in ids] == ["blocked", "blocked", "ready", "blocked"]
    assert {row(db, job_id).blocked_on for job_id in ids} == {f"cap:{HOST}", None}


def test_where_nobody_can_use_a_seat_one_waits_for_what_keeps_them_all(db):
    """Without it nobody would look at them when their agent may run more; all of them need not move for that."""
    hand, running, ids = shared_host(db, "a", "a", "a")
    first, _ = hand.claim(*submit(db, 2, agent="a"))
    end_with(hand, running)
    assert [row(db, job_id).blocked_on for job_id in ids] == ["cap:agent:a", *[f"cap:{HOST}"] * 2]
    end_with(hand, first)
    assert [row(db, job_id).queued for job_id in ids] == ["ready", "blocked", "blocked"]


def test_no_look_for_the_next_goes_through_a_whole_backlog(db, monkeypatch):
    monkeypatch.setattr(caps.waiting, "LOOK_AHEAD", 2)
    hand, running, ids = shared_host(db, "a", "a", "a", "b")
    set_job(db, ids[-1], rank=10**9)
    hand.claim(*submit(db, 2, agent="a"))
    end_with(hand, running)
    assert {row(db, job_id).queued for job_id in ids} == {"blocked"}
    assert let_go(db, hand.book).released == 0
    assert let_go(db, hand.book).released == 1  # the leader goes on, two at a time


# --- the publisher ---


def test_the_publisher_announces_what_may_run_and_parks_the_rest(db):
    hand = crew(db, {"agent:a": 2})
    hand.claim(*submit(db, agent="a"))
    ids, others = submit(db, 4, agent="a"), submit(db, 3, agent="b")
    announced, _ = publish(db, hand.book)
    assert sorted(announced) == sorted([ids[0], *others])
    assert row(db, ids[1]).wait_reason == "cap agent:a is full: 2 of 2 run"
    assert {row(db, job_id).blocked_on for job_id in ids[1:]} == {"cap:agent:a"}
    assert in_use(db) == {"agent:a": 1}


def test_a_seat_that_its_next_cannot_use_goes_to_the_one_after(db):
    """Let go for its agent's sake, it finds its host full: without somebody in its place the seat would stay empty."""
    hand = crew(db, {"agent:a": 2, HOST: 1})
    ids = submit(db, 3, agent="a", concurrency_keys=[HOST])
    (other,) = submit(db, agent="a")
    running, second = claims(hand.offer(ids[0], *submit(db, agent="a")))
    assert {running.caps, second.caps} == {("agent:a", HOST), ("agent:a",)}
    park = {"on": "cap:agent:a", "reason": "full"}
    db.write(lambda conn: blocked.park(conn, [*ids[1:], other], **park))
    hand.finish(second)
    assert row(db, ids[1]).queued == "ready"
    assert publish(db, hand.book)[0] == [other]
    assert [row(db, job_id).blocked_on for job_id in ids[1:]] == [f"cap:{HOST}"] * 2


def test_a_claim_that_parks_a_job_wakes_another_for_the_seat(db):
    hand = crew(db, {"agent:a": 2, HOST: 1})
    first, second = submit(db, 2, agent="a", concurrency_keys=[HOST])
    (third,) = submit(db, agent="a")
    db.write(lambda conn: blocked.park(conn, [third], "cap:agent:a", "full"))
    hand.claim(first)
    hand.offer(second)
    assert row(db, second).blocked_on == f"cap:{HOST}"
    assert row(db, third).queued == "ready"
    assert hand.freed == {"default"}


def test_publishing_past_a_cap_is_bounded_and_goes_on(db, monkeypatch):
    monkeypatch.setattr(outbox, "MAX_LOOKS", 2)
    hand = crew(db, {"agent:a": 0})
    submit(db, 10, agent="a")
    (last,) = submit(db, agent="b")
    set_job(db, last, rank=10**9)
    assert publish(db, hand.book, limit=4) == ([], {"default"})
    assert publish(db, hand.book, limit=4) == ([last], set())


def test_a_seat_given_back_meanwhile_is_not_missed(maria_db):
    """The publisher read that a key is full; before it parks a job there, the seat is given back."""
    db = maria_db
    hand = crew(db, {"agent:a": 1})
    (running,) = hand.claim(*submit(db, agent="a"))
    (waiting,) = submit(db, agent="a")
    with db.engine.begin() as conn:
        glance = caps.Glance(conn, hand.book)
        glance._look({"agent:a"})
        hand.finish(running)
        assert [job.job_id for job in outbox.take(conn, "default", 10, caps=glance)] == [waiting]


# --- submits ---


def admit(db, policies_now, *new):
    submit_jobs(db, new, POLICY, admit=lambda conn, fresh: caps.admit(conn, policies_now, fresh))
    return [row(db, job.job_id).blocked_on for job in new]


def test_a_new_job_of_a_full_key_waits_at_once(db):
    policies_now = capped({"agent:a": 2})
    fresh = [new_job(agent=agent) for agent in "aababa"]
    assert admit(db, policies_now, *fresh) == [None, None, None, "cap:agent:a", None, "cap:agent:a"]
    # Nobody has claimed yet, but there are others who wait.
    hand = crew(db, {"agent:a": 2})
    hand.claim(fresh[0].job_id)
    (job,) = late = [new_job(agent="a")]
    assert admit(db, policies_now, *late) == ["cap:agent:a"]
    assert row(db, job.job_id).wait_reason == "others wait for cap agent:a already"


def test_submits_without_capped_keys_cost_nothing(db):
    submit(db)
    with traffic(db) as seen:
        assert admit(db, capped({"agent:a": 1}), new_job(agent="b")) == [None]
    assert not [s for s in seen.statements if "concurrency_caps" in s]


# --- the leader ---


def heal(db):
    return db.write(caps.heal)


def let_go(db, policies_now, after="", limit=100):
    return db.write(lambda conn: caps.let_go(conn, policies_now, after, limit))


@pytest.mark.parametrize("wrong", [0, 1, 7, None])
def test_a_count_that_differs_from_what_runs_is_corrected(db, wrong):
    hand, ids = crew(db, {"agent:a": 5}), submit(db, 2, agent="a")
    hand.claim(*ids)
    assert heal(db) == 0
    change = update(schema.concurrency_caps).values(in_use=wrong)
    db.write(lambda conn: conn.execute(change if wrong is not None else delete(schema.concurrency_caps)))
    assert heal(db) == 1
    assert in_use(db) == {"agent:a": 2}


def test_seats_that_nobody_remembers_are_given_back(db):
    db.write(lambda conn: conn.execute(insert(schema.concurrency_caps), [{"cap_key": "agent:x", "in_use": 3}]))
    assert heal(db) == 1
    assert in_use(db) == {}


def test_a_job_that_ran_before_its_key_had_a_cap_counts(db):
    hand, policies_now = hire(db), capped({"agent:a": 1})
    (running,) = hand.claim(*submit(db, agent="a"))
    assert db.write(lambda conn: caps.seat_late(conn, policies_now, 10)) == 1
    assert (heal(db), in_use(db)) == (1, {"agent:a": 1})
    assert db.write(lambda conn: caps.seat_late(conn, policies_now, 10)) == 0
    hand.finish(running)
    assert (heal(db), in_use(db)) == (1, {})


@pytest.mark.parametrize(
    ("after", "released"),
    [(capped({"agent:a": 1}), 0), (capped({"agent:a": 3}), 2), (Book(2), 4), (book("agent:a"), 0)],
)
def test_a_policy_that_changes_lets_as_many_go_as_may_run(db, after, released):
    hand, ids = crew(db, {"agent:a": 1}), submit(db, 5, agent="a")
    hand.offer(*ids)
    round = let_go(db, after)
    assert (round.released, round.after) == (released, "")
    assert [row(db, job_id).queued for job_id in ids[1:]] == ["ready"] * released + ["blocked"] * (4 - released)
    assert round.lanes == ({"default"} if released else set())


def test_what_waits_for_other_things_is_not_the_caps_business(db):
    (job_id,) = submit(db)
    db.write(lambda conn: blocked.park(conn, [job_id], "gate:memory", "closed"))
    assert let_go(db, Book(2)).released == 0
    assert row(db, job_id).queued == "blocked"


def test_a_round_goes_on_where_the_last_one_ended(db, monkeypatch):
    monkeypatch.setattr(caps.care, "MANY_KEYS", 2)
    for name in "abcde":
        ids = submit(db, 2)
        db.write(lambda conn, ids=ids, name=name: blocked.park(conn, ids, f"cap:agent:{name}", "full"))
    after, released = "", []
    for _ in range(4):
        round = let_go(db, Book(2), after, limit=3)
        after = round.after
        released.append(round.released)
    assert released == [3, 3, 2, 2]
    assert let_go(db, Book(2)).released == 0


def test_keys_where_nobody_sits_are_forgotten_unless_a_policy_names_them(db):
    hand = crew(db, {"host:*": 1, "agent:a": 1})
    ids = [submit(db, agent="a" if n == 1 else "b", concurrency_keys=[f"host:{n}"])[0] for n in range(3)]
    running, *over = hand.claim(*ids)
    hand.finish(*over)
    assert db.write(lambda conn: caps.forget(conn, hand.book, 10)) == 2
    assert {key for key, _ in rows(db, schema.concurrency_caps)} == {"agent:a", "host:0"}
    hand.finish(running)


@pytest.mark.parametrize("paused", ["global", "pool:default"])
def test_a_claim_whose_answer_was_lost_is_handed_back_also_while_its_lane_is_paused(db, paused):
    hand = hire(db)
    (job_id,) = submit(db)
    hand.claim(job_id)
    hand.book = book(paused)
    assert isinstance(hand.offer(job_id)[job_id], NotClaimed)  # it does not hold it
    assert (row(db, job_id).status, row(db, job_id).queued, row(db, job_id).worker_id) == ("pending", "ready", None)
    hand.book = book()
    hand.claim(job_id)
