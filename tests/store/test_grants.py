"""Answers to requests: what a host must have too, which GPUs will do, and refusals with evidence."""

from dataclasses import replace
from datetime import timedelta

import pytest
from sqlalchemy import select, update

from orchestrator.errors import DatabaseUnavailable
from orchestrator.gpu import Health
from orchestrator.leases import RETRY_AFTER_S, Denied, Granted, LeaseRequest, LeaseState, Terms, model_lease_key
from orchestrator.placement import Policy, Reason, look
from orchestrator.store import gpus, grants, leases, schema
from orchestrator.store.dialect import utc_now, utc_shift
from tests.factories import STALE_S, active_leases, gpu, hire, rows
from tests.waiting import wait_until


def terms() -> Terms:
    return Terms(STALE_S, Policy.BEST_FIT)


def request(memory_mb=1000, **fields):
    return LeaseRequest(**({"agent": "a", "memory_mb": memory_mb, "ttl_s": 60.0} | fields))


def grant(db, *requests):
    return db.write(lambda conn: grants.grant(conn, requests, terms()))


def ask(db, memory_mb=1000, **fields):
    (answer,) = grant(db, request(memory_mb, **fields))
    return answer


def set_host(db, node_id="node-1", **has):
    mine = update(schema.nodes).where(schema.nodes.c.node_id == node_id).values(**has)
    db.write(lambda conn: conn.execute(mine))


def set_gpus(db, **values):
    db.write(lambda conn: conn.execute(update(schema.gpus).values(**values)))


def on_hosts(db):
    return {node.node_id: (node.leased_cpu_milli, node.leased_memory_mb) for node in rows(db, schema.nodes)}


def leased(db):
    return {row.gpu_uuid: row.leased_mb for row in rows(db, schema.gpus)}


# --- hosts ---


def test_a_lease_takes_of_its_host_and_gives_it_back(db):
    hire(db, gpu())
    set_host(db, cpu_milli=4000, memory_mb=1000)
    answer = ask(db, host_cpu_milli=3000, host_memory_mb=600)
    assert isinstance(answer, Granted)
    assert on_hosts(db) == {"node-1": (3000, 600)}
    (lease,) = rows(db, schema.leases)
    assert (lease.host_cpu_milli, lease.host_memory_mb) == (3000, 600)
    db.write(lambda conn: leases.release(conn, answer.request.token))
    assert (on_hosts(db), leased(db)) == ({"node-1": (0, 0)}, {"GPU-0": 0})


@pytest.mark.parametrize(
    ("wish", "code", "words"),
    [
        ({"host_cpu_milli": 4001}, Reason.HOST_CPU, "4000 of 4001 needed CPU milli"),
        ({"host_memory_mb": 1001}, Reason.HOST_MEMORY, "1000 of 1001 needed MB"),
    ],
)
def test_a_host_that_has_too_little_refuses_with_numbers(db, wish, code, words):
    hire(db, gpu())
    set_host(db, cpu_milli=4000, memory_mb=1000)
    answer = ask(db, **wish)
    assert isinstance(answer, Denied)
    assert answer.code is code
    assert words in answer.reason
    assert (on_hosts(db), leased(db)) == ({"node-1": (0, 0)}, {"GPU-0": 0})


def test_a_batch_sees_what_its_own_members_took_of_a_host(db):
    hire(db, gpu())
    set_host(db, cpu_milli=4000)
    answers = grant(db, *[request(100, host_cpu_milli=1500) for _ in range(3)])
    assert [isinstance(answer, Granted) for answer in answers] == [True, True, False]
    assert on_hosts(db) == {"node-1": (3000, 0)}


def test_what_a_host_does_not_tell_does_not_limit(db):
    hire(db, gpu())
    assert isinstance(ask(db, host_cpu_milli=10**6, host_memory_mb=10**6), Granted)
    assert on_hosts(db) == {"node-1": (10**6, 10**6)}


def test_the_host_with_room_is_chosen(db):
    hire(db, gpu(0), node="small")
    hire(db, gpu(1, total_mb=90_000), node="large")
    set_host(db, "small", memory_mb=100)
    assert ask(db, host_memory_mb=200).node_id == "large"


def test_a_lease_without_gpu_takes_nothing_of_a_host_and_returns_nothing(db):
    hire(db, gpu(total_mb=10_000))
    set_host(db, cpu_milli=4000)
    wishes = [request(9000, cpu_fallback=True, host_cpu_milli=1000) for _ in range(2)]
    first, second = db.write(lambda conn: grants.grant(conn, wishes, terms(), "node-1"))
    assert (first.mode, second.mode, second.node_id) == ("gpu", "cpu", "node-1")
    assert on_hosts(db) == {"node-1": (1000, 0)}
    db.write(lambda conn: leases.release(conn, second.request.token))
    assert on_hosts(db) == {"node-1": (1000, 0)}


def test_a_host_taken_meanwhile_takes_no_gpu(db, monkeypatch):
    """The look says there is room, the UPDATE knows better."""
    hire(db, gpu())
    set_host(db, cpu_milli=4000)
    hosts = db.read(gpus.hosts)
    monkeypatch.setattr(gpus, "hosts", lambda _conn: hosts)
    set_host(db, leased_cpu_milli=2000)
    starved, modest = grant(db, request(500, host_cpu_milli=3000), request(700, host_cpu_milli=1000))
    assert starved.code is Reason.CONTENDED
    assert isinstance(modest, Granted)
    assert (on_hosts(db), leased(db)) == ({"node-1": (3000, 0)}, {"GPU-0": 700})


def test_a_gpu_taken_meanwhile_gives_the_host_back(db, monkeypatch):
    hire(db, gpu())
    set_host(db, cpu_milli=4000, memory_mb=4000)
    seen = db.read(lambda conn: gpus.views_and_time(conn, STALE_S, None))
    monkeypatch.setattr(gpus, "views_and_time", lambda *_args: seen)
    set_gpus(db, quarantined_at=utc_shift(0.0))
    answer = ask(db, host_cpu_milli=3000, host_memory_mb=50)
    assert answer.code is Reason.CONTENDED
    assert (on_hosts(db), leased(db)) == ({"node-1": (0, 0)}, {"GPU-0": 0})


def test_what_was_never_taken_is_not_given_back(db, monkeypatch):
    """One request got no host, and another no room on a GPU that both were to have."""
    hire(db, gpu(0), gpu(1, total_mb=10_000, name="T4"))
    set_host(db, cpu_milli=4000)
    assert [share.gpu_uuid for share in ask(db, 12_000).gpus] == ["GPU-0"]
    seen, hosts = db.read(lambda conn: gpus.views_and_time(conn, STALE_S, None)), db.read(gpus.hosts)
    monkeypatch.setattr(gpus, "views_and_time", lambda *_args: seen)
    monkeypatch.setattr(gpus, "hosts", lambda _conn: hosts)
    set_host(db, leased_cpu_milli=2000)
    mine = update(schema.gpus).where(schema.gpus.c.gpu_uuid == "GPU-1")
    db.write(lambda conn: conn.execute(mine.values(quarantined_at=utc_shift(0.0))))
    wishes = request(500, gpu_count=2, host_cpu_milli=3000), request(100, gpu_models=frozenset({"T4"}))
    both, single = grant(db, *wishes)
    assert (both.code, single.code) == (Reason.CONTENDED, Reason.CONTENDED)
    assert (on_hosts(db), leased(db)) == ({"node-1": (2000, 0)}, {"GPU-0": 12_000, "GPU-1": 0})


# --- which GPUs ---


def test_only_a_gpu_of_a_wanted_model_will_do(db):
    hire(db, gpu(0, name="T4"), gpu(1, name="A100"))
    assert [share.gpu_uuid for share in ask(db, gpu_models=frozenset({"A100", "H100"})).gpus] == ["GPU-1"]
    refused = ask(db, gpu_models=frozenset({"H100"}))
    assert (refused.code, "of H100" in refused.reason) == (Reason.WRONG_MODEL, True)
    assert "it is of the model T4" in refused.reason


# --- refusals ---


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"foreign_mb": 24_000}, Reason.NO_MEMORY),
        ({"sampled_at": utc_shift(-STALE_S - 1)}, Reason.STALE),
        ({"health": "unhealthy"}, Reason.UNHEALTHY),
        ({"quarantined_at": utc_shift(0.0)}, Reason.QUARANTINED),
        ({"gate_closed_at": utc_shift(0.0)}, Reason.GATE_CLOSED),
        ({"reserved_for": "job", "reserved_until": utc_shift(60.0)}, Reason.RESERVED),
    ],
    ids=lambda value: str(value) if isinstance(value, Reason) else "",
)
def test_a_refusal_has_a_code_evidence_and_a_time_to_ask_again(db, values, code):
    """INV-15: unknown is not free, and says so."""
    hire(db, gpu(0), gpu(1))
    set_gpus(db, **values)
    answer = ask(db)
    assert isinstance(answer, Denied)
    assert (answer.code, answer.retry_after_s) == (code, RETRY_AFTER_S.get(code, 1.0))
    assert [view.gpu_uuid for view in answer.gpus] == ["GPU-0", "GPU-1"]
    assert answer.reason.startswith("needs 1000 MB; node-1/0: ")
    assert rows(db, schema.leases) == []


def test_a_cluster_without_gpus_says_so(db):
    answer = ask(db)
    assert (answer.code, answer.gpus) == (Reason.NO_GPU, ())
    assert answer.reason == (
        "needs 1000 MB; no GPU is known on the cluster: a worker must run where GPUs are, and tell of them"
    )


def test_a_node_without_gpus_is_told_with_a_few_that_have_some(db):
    for n in range(6):
        hire(db, gpu(n), node=f"node-{n}")
    told = "; nodes that have some: node-0, node-1, node-2, node-3 and 2 more"
    assert ask(db, node_id="other").reason.endswith(told)


def test_nodes_with_too_few_gpus_do_not_make_one_that_has_them_a_matter_for_people(db):
    hire(db, gpu(0, 10_000), node="small")
    hire(db, gpu(1, 10_000), node="smaller")
    hire(db, gpu(2, 10_000), gpu(3, 10_000), node="large")
    assert isinstance(ask(db, gpu_count=2, node_id="large"), Granted)
    answer = ask(db, 8500, gpu_count=2)
    assert (answer.code, answer.lasts, "a worker must run" in answer.reason) == (Reason.NO_GPU, False, False)


def test_a_reservation_that_ran_out_refuses_nobody(db):
    hire(db, gpu())
    set_gpus(db, reserved_for="job", reserved_until=utc_shift(-1.0))
    assert isinstance(ask(db), Granted)


def test_the_answer_that_was_lost_is_undone_with_its_host(db, lose_commits):
    hire(db, gpu())
    set_host(db, cpu_milli=4000)
    first = request(host_cpu_milli=3000)
    lose_commits(1)
    (answer,) = grants.grant_to_clients(db, [first], terms())
    assert isinstance(answer, Granted)
    assert answer.request == replace(first, token=answer.request.token)
    assert answer.request.token != first.token
    assert (on_hosts(db), leased(db)) == ({"node-1": (3000, 0)}, {"GPU-0": 1000})


def test_answers_that_were_lost_again_and_again_do_not_stand_in_the_way_of_the_last(db, lose_commits):
    hire(db, gpu(total_mb=10_000))
    lose_commits(3)
    (answer,) = grants.grant_to_clients(db, [request(6000)], terms())  # there is no room for two of it
    assert isinstance(answer, Granted)
    assert leased(db) == {"GPU-0": 6000}
    (active,) = [lease for lease in rows(db, schema.leases) if lease.state == "active"]
    assert active.token == answer.key


def for_model(hand, slot):
    mine = {"worker_id": hand.worker_id, "node_id": "node-1", "slot": slot, "model_key": model_lease_key(slot)}
    return request(6000, model_id="m", job_type="echo", **mine)


@pytest.mark.parametrize("lost", [1, 3, 50])  # within one try, and so often that the try is given up
def test_a_models_lease_whose_answer_was_lost_does_not_stay_for_ever(db, lose_commits, lost):
    """Its worker does not know it, and renews it with all others: only who asks again for that slot can end it."""
    hand = hire(db, gpu(total_mb=20_000))
    first = grants.grant_model(db, for_model(hand, "w#1"), terms())
    assert isinstance(first, Granted)
    lose_commits(lost)
    try:
        grants.grant_model(db, for_model(hand, "w#2"), terms())
    except DatabaseUnavailable:
        assert lost == 50
    lose_commits(0)
    assert leased(db) == {"GPU-0": 12_000}
    again = grants.grant_model(db, for_model(hand, "w#2"), terms())
    assert isinstance(again, Granted)
    assert {lease.token for lease in active_leases(db)} == {first.key, again.key}
    assert leased(db) == {"GPU-0": 12_000}


def test_a_lease_that_is_ending_is_not_ended_by_who_asks_for_its_slot(db):
    """Its processes may hold the memory still."""
    hand = hire(db, gpu(total_mb=20_000))
    first = grants.grant_model(db, for_model(hand, "w#1"), terms())
    assert isinstance(first, Granted)
    db.write(lambda conn: leases.let_go(conn, [first.key], LeaseState.SPENT))
    grants.grant_model(db, for_model(hand, "w#1"), terms())
    assert first.key in {lease.token for lease in active_leases(db)}
    assert leased(db) == {"GPU-0": 12_000}


def test_nothing_is_granted_on_a_gpu_that_was_never_well(db):
    hire(db, gpu(health=Health.UNKNOWN, total_mb=0))
    assert ask(db).code is Reason.UNHEALTHY


def test_who_looks_at_one_node_alone_calls_nothing_too_large_for_all(db):
    hire(db, gpu(0, total_mb=10_000), node="small")
    hire(db, gpu(1, total_mb=90_000), node="large")
    (here,) = db.write(lambda conn: grants.grant(conn, [request(20_000)], terms(), "small"))
    assert here.code is Reason.NO_MEMORY
    assert ask(db, 20_000, node_id="small").code is Reason.TOO_LARGE


# --- the last look ---


@pytest.fixture
def looks(monkeypatch):
    """How often the GPUs were read."""
    seen, read = [], gpus.views_and_time

    def counted(*arguments):
        seen.append(arguments)
        return read(*arguments)

    monkeypatch.setattr(gpus, "views_and_time", counted)
    return seen


def test_one_look_serves_the_requests_of_a_moment_and_sees_what_they_took(db, looks, monkeypatch):
    monkeypatch.setattr(look, "YOUNG_S", 60.0)
    hire(db, gpu(0, total_mb=10_000), gpu(1, total_mb=10_000))
    same = terms()
    answers = [db.write(lambda conn: grants.grant(conn, [request(6000)], same))[0] for _ in range(3)]
    assert [isinstance(answer, Granted) for answer in answers] == [True, True, False]
    assert leased(db) == {"GPU-0": 6000, "GPU-1": 6000}
    assert len(looks) == 2  # the first, and the one before the refusal


def test_a_lease_lives_from_when_it_was_asked_for_not_from_a_look_before_that(db, looks, monkeypatch):
    monkeypatch.setattr(look, "YOUNG_S", 60.0)
    hire(db, gpu())
    same = terms()
    db.write(lambda conn: grants.grant(conn, [request()], same))
    now = lambda: db.read(lambda conn: conn.execute(select(utc_now())).scalar_one())
    looked = now()
    asked = wait_until(lambda: (later := now()) > looked + timedelta(seconds=0.05) and later, what="the look is old")
    (lease,) = db.write(lambda conn: grants.grant(conn, [request(ttl_s=0.001)], same))
    assert len(looks) == 1
    assert lease.expires_at >= asked  # the time to live is as much as a clock of milliseconds may be off


def test_an_old_look_refuses_nobody(db, looks, monkeypatch):
    monkeypatch.setattr(look, "YOUNG_S", 60.0)
    hire(db, gpu(total_mb=10_000))
    same = terms()
    (first,) = db.write(lambda conn: grants.grant(conn, [request(6000)], same))
    db.write(lambda conn: leases.free(conn, [first.key]))
    (second,) = db.write(lambda conn: grants.grant(conn, [request(6000)], same))
    assert isinstance(second, Granted)
    assert leased(db) == {"GPU-0": 6000}


def test_what_changed_since_the_last_look_is_not_given_out(db, looks, monkeypatch):
    monkeypatch.setattr(look, "YOUNG_S", 60.0)
    hire(db, gpu(total_mb=10_000))
    same = terms()
    db.write(lambda conn: grants.grant(conn, [request(1000)], same))
    set_gpus(db, health=Health.LOST)
    (answer,) = db.write(lambda conn: grants.grant(conn, [request(1000)], same))
    assert isinstance(answer, Denied)
    assert (answer.code, len(looks)) == (Reason.UNHEALTHY, 2)


def test_a_look_is_for_those_who_ask_about_the_same_nodes_and_not_for_long(db, looks, monkeypatch):
    hire(db, gpu())
    same = terms()
    db.write(lambda conn: grants.grant(conn, [request()], same))
    db.write(lambda conn: grants.grant(conn, [request()], same, "node-1"))
    db.write(lambda conn: grants.grant(conn, [request(host_cpu_milli=1)], same, "node-1"))
    assert len(looks) == 3
    monkeypatch.setattr(look, "YOUNG_S", 0.0)
    db.write(lambda conn: grants.grant(conn, [request()], same, "node-1"))
    assert len(looks) == 4
