"""Leases that are over while processes may still hold their memory: it returns when they are seen to be gone."""

from dataclasses import replace

import pytest
from sqlalchemy import update

from orchestrator.errors import LeaseEnded
from orchestrator.gpu import GpuProcess, Health
from orchestrator.leases import Granted, LeaseRequest, LeaseState, Remains, Terms, token_hash
from orchestrator.store import gpus, grants, lease_purge, leases, nodes, schema
from orchestrator.store.dialect import utc_shift
from orchestrator.store.settle import Left, Outcome, end_leases
from tests.factories import STALE_S, Hand, active_leases, done, gpu, heartbeat, hire, row, rows, submit


def leased(db):
    return {row.gpu_uuid: row.leased_mb for row in rows(db, schema.gpus)}


def client_lease(db, memory_mb=1000, **fields):
    wish = {"agent": "alice", "memory_mb": memory_mb, "ttl_s": 60.0, "node_id": "node-1"}
    (answer,) = db.write(lambda conn: grants.grant(conn, [LeaseRequest(**(wish | fields))], Terms(STALE_S)))
    assert isinstance(answer, Granted), answer
    return answer.request.token


def release(db, token):
    return db.write(lambda conn: leases.release(conn, token))


def purge(db, limit=200, stale_s=STALE_S):
    return db.write(lambda conn: lease_purge.purge(conn, limit, stale_s))


def change_leases(db, **values):
    """Write columns of all leases that are active behind the back of all guards."""
    every = update(schema.leases).where(schema.leases.c.state == "active").values(**values)
    db.write(lambda conn: conn.execute(every))


def fall_silent(db):
    db.write(lambda conn: conn.execute(update(schema.gpus).values(sampled_at=utc_shift(-STALE_S - 1))))


def process(mb=1000, pid=51, mark=None, lineage=(51, 50, 1)):
    return GpuProcess(pid, mb, mark, lineage)


def shows(*processes, index=0, **fields):
    return gpu(index, used_mb=sum(p.memory_mb or 0 for p in processes), processes=processes, **fields)


def events(db):
    return [entry.event_type for entry in rows(db, schema.audit)]


def only_lease(db):
    (lease,) = rows(db, schema.leases)
    return lease


# --- released by its client ---


def test_a_release_waits_for_the_process(db):
    """INV-16: freed only when its processes are gone."""
    hand = hire(db, gpu())
    token = client_lease(db, pid=50)
    hand.sees(shows(process()))
    assert release(db, token) == "active"
    assert release(db, token) == "released"
    hand.sees(shows(process()))
    assert leased(db) == {"GPU-0": 1000}
    assert only_lease(db).state == "active"
    with pytest.raises(LeaseEnded, match="released"):
        heartbeat(db, token)
    hand.sees(shows())
    assert leased(db) == {"GPU-0": 0}
    assert only_lease(db).state == "released"
    assert release(db, token) == "released"
    assert events(db).count("lease.released") == 1


def test_a_release_without_a_process_to_look_for_is_over_at_once(db):
    hire(db, gpu())
    token = client_lease(db)
    assert release(db, token) == "active"
    assert leased(db) == {"GPU-0": 0}
    assert only_lease(db).state == "released"


def test_a_cpu_lease_is_over_at_once_though_its_process_lives(db):
    hire(db)
    token = client_lease(db, pid=50, cpu_fallback=True)
    release(db, token)
    assert only_lease(db).state == "released"


def test_an_ending_lease_covers_the_memory_that_its_process_holds_still(db):
    hand = hire(db, gpu())
    token = client_lease(db, pid=50)
    release(db, token)
    hand.sees(shows(process(700)))
    (view,) = rows(db, schema.gpus)
    assert (view.leased_mb, view.foreign_mb) == (1000, 0)


def test_an_ending_lease_is_extended_by_nobody(db):
    hand = hire(db, gpu())
    (claim,) = hand.claim(*submit(db, min_memory_mb=1000))
    db.write(lambda conn: leases.let_go(conn, [claim.lease.key], LeaseState.SPENT))
    change_leases(db, expires_at=utc_shift(-5.0))
    before = only_lease(db).expires_at
    hand.sees(shows(process(mark=f"{hand.worker_id}#1")), busy=1)
    assert only_lease(db).expires_at == before


def test_a_release_whose_answer_was_lost_waits_all_the_same(db, lose_commits):
    hand = hire(db, gpu())
    token = client_lease(db, pid=50)
    hand.sees(shows(process()))
    lose_commits(1)
    assert release(db, token) == "released"
    assert leased(db) == {"GPU-0": 1000}
    hand.sees(shows())
    assert leased(db) == {"GPU-0": 0}


def test_memory_on_the_host_returns_with_the_lease(db):
    hand = hire(db, gpu())
    db.write(lambda conn: conn.execute(update(schema.nodes).values(cpu_milli=4000, memory_mb=1000)))
    token = client_lease(db, pid=50, host_cpu_milli=3000, host_memory_mb=600)
    release(db, token)
    hand.sees(shows(process()))
    assert [(n.leased_cpu_milli, n.leased_memory_mb) for n in rows(db, schema.nodes)] == [(3000, 600)]
    hand.sees(shows())
    assert [(n.leased_cpu_milli, n.leased_memory_mb) for n in rows(db, schema.nodes)] == [(0, 0)]


# --- letting go ---


def let_go(db, *keys, **fields):
    db.write(lambda conn: leases.let_go(conn, list(keys), **({"state": "released"} | fields)))


def test_letting_go_again_changes_nothing(db):
    hire(db, gpu())
    key = token_hash(client_lease(db, pid=50))
    let_go(db, key, reason="first", slot="w#1")
    before = only_lease(db)
    let_go(db, key, state="spent", reason="second", slot="w#2")
    assert only_lease(db) == before
    assert (before.ending_as, before.end_reason, before.slot) == ("released", "first", "w#1")


def test_letting_go_of_what_is_over_or_unknown_changes_nothing(db):
    hand = hire(db, gpu())
    key = token_hash(client_lease(db, pid=50))
    let_go(db, key)
    hand.sees(shows())
    before = only_lease(db)
    assert before.state == "released"
    let_go(db, key, "nobody", state="expired")
    let_go(db)
    assert only_lease(db) == before
    assert leased(db) == {"GPU-0": 0}


def test_letting_go_of_what_ended_at_once_changes_nothing(db):
    hire(db, gpu())
    key = token_hash(client_lease(db, pid=50))
    db.write(lambda conn: leases.free(conn, [key], LeaseState.EXPIRED))
    before = only_lease(db)
    let_go(db, key)
    assert only_lease(db) == before
    assert (before.state, before.ending_as) == ("expired", None)


def test_letting_go_of_several_each_by_what_can_be_seen(db):
    hire(db, gpu())
    seen, unseen = token_hash(client_lease(db, 100, pid=50)), token_hash(client_lease(db, 200))
    let_go(db, seen, unseen)
    assert leased(db) == {"GPU-0": 100}


# --- patience ---


def stuck(db, hand, processes, seconds=61.0, **fields):
    change_leases(db, ending_since=utc_shift(-seconds))
    return hand.sees(shows(*processes, **fields), patience_s=60.0)


def test_memory_that_does_not_come_back_closes_the_gpu(db):
    """INV-16."""
    hand = hire(db, gpu(), gpu(1))
    token = client_lease(db, pid=50)
    (share,) = rows(db, schema.lease_gpus)
    index = int(share.gpu_uuid[-1])
    release(db, token)
    patient = stuck(db, hand, [process()], seconds=30.0, index=index)
    assert patient.quarantined == ()
    findings = stuck(db, hand, [process(), process(5, pid=52, lineage=(52, 50))], index=index)
    assert findings.quarantined == (share.gpu_uuid,)
    (closed,) = [row for row in rows(db, schema.gpus) if row.quarantined_at]
    assert closed.gpu_uuid == share.gpu_uuid
    assert closed.quarantine_reason.endswith("did not come back: held by process 51, 52")
    assert token_hash(token)[:12] in closed.quarantine_reason and token_hash(token) not in closed.quarantine_reason
    assert leased(db) == {"GPU-0": 0, "GPU-1": 0}  # no longer a lease's, but foreign
    assert closed.foreign_mb == 1005
    assert only_lease(db).state == "released"
    assert not db.write(lambda conn: gpus.take(conn, share.gpu_uuid, 1, STALE_S))
    assert stuck(db, hand, [process()], index=index).quarantined == ()  # once


def test_a_gpu_that_gives_no_answer_is_not_taken_for_free(db):
    """INV-15."""
    hand = hire(db, gpu())
    release(db, client_lease(db, pid=50))
    findings = hand.sees(gpu(health=Health.UNKNOWN, processes=()))
    assert (leased(db), findings.quarantined) == ({"GPU-0": 1000}, ())
    change_leases(db, ending_since=utc_shift(-11.0))
    assert hand.sees(gpu(health=Health.UNKNOWN, processes=())).quarantined == ("GPU-0",)
    assert rows(db, schema.gpus)[0].quarantine_reason.endswith("nobody can tell")


def test_an_unhealthy_gpu_answers_and_frees(db):
    hand = hire(db, gpu())
    release(db, client_lease(db, pid=50))
    hand.sees(gpu(health=Health.UNHEALTHY))
    assert leased(db) == {"GPU-0": 0}


def test_a_lease_of_two_gpus_ends_when_both_are_seen_to_be_free(db):
    hand = hire(db, gpu(0), gpu(1))
    release(db, client_lease(db, pid=50, gpu_count=2))
    hand.sees(shows(index=0))
    assert leased(db) == {"GPU-0": 1000, "GPU-1": 1000}
    hand.sees(shows(index=0), shows(process(), index=1))
    assert leased(db) == {"GPU-0": 1000, "GPU-1": 1000}
    change_leases(db, ending_since=utc_shift(-11.0))
    assert hand.sees(shows(index=0), shows(process(), index=1)).quarantined == ("GPU-1",)
    assert leased(db) == {"GPU-0": 0, "GPU-1": 0}


def test_the_sample_of_another_node_ends_nothing(db):
    hire(db, gpu(0))
    far = hire(db, gpu(1), node="node-2")
    release(db, client_lease(db, pid=50))
    far.sees(gpu(0), gpu(1))
    assert leased(db) == {"GPU-0": 1000, "GPU-1": 0}


# --- of slots ---


def leaves_processes(hand, slot=1, **fields):
    (claim,) = hand.claim(*submit(hand.db, min_memory_mb=1000))
    mark = f"{hand.worker_id}#{slot}"
    hand.record(ends=[done(claim)._replace(left=Left(Remains.PROCESSES, mark))])
    assert row(hand.db, claim.job_id).status == "done"
    return mark


def test_the_lease_of_a_job_that_left_processes_waits_for_its_slot_alone(db):
    hand = hire(db, gpu())
    mark = leaves_processes(hand)
    other = process(500, pid=9, mark=f"{hand.worker_id}#2")
    hand.sees(shows(process(mark=mark), other))
    assert leased(db) == {"GPU-0": 1000}
    hand.sees(shows(other))
    assert leased(db) == {"GPU-0": 0}
    assert only_lease(db).state == "spent"


def test_where_nobody_can_look_a_slot_that_lives_keeps_its_lease(db):
    hand = hire(db, gpu())
    mark = leaves_processes(hand)
    dark = replace(gpu(used_mb=1000), processes=None)
    hand.sees(dark, running=[mark])
    assert leased(db) == {"GPU-0": 1000}
    hand.sees(dark, running=[f"{hand.worker_id}#2"])
    assert leased(db) == {"GPU-0": 0}


def test_a_neighbour_does_not_end_what_it_cannot_see(db):
    """It knows its own slots only, and the driver does not tell processes apart."""
    hand, neighbour = hire(db, gpu()), hire(db)
    mark = leaves_processes(hand)
    dark = replace(gpu(used_mb=1000), processes=None)
    neighbour.sees(dark, running=[f"{neighbour.worker_id}#1"])
    assert leased(db) == {"GPU-0": 1000}
    hand.sees(dark, running=[mark])
    assert leased(db) == {"GPU-0": 1000}
    hand.sees(dark)
    assert leased(db) == {"GPU-0": 0}


def test_a_neighbour_ends_what_a_dead_worker_left_where_nobody_can_look(db):
    hand, neighbour = hire(db, gpu()), hire(db)
    leaves_processes(hand)
    kill(hand)
    assert neighbour.sees(replace(gpu(used_mb=1000), processes=None)).quarantined == ()
    assert leased(db) == {"GPU-0": 0}


def test_a_neighbour_ends_what_it_sees_to_be_gone(db):
    hand, neighbour = hire(db, gpu()), hire(db)
    mark = leaves_processes(hand)
    neighbour.sees(shows(process(mark=mark)))
    assert leased(db) == {"GPU-0": 1000}
    neighbour.sees(shows())
    assert leased(db) == {"GPU-0": 0}


def test_what_a_worker_saw_left_decides(db):
    hand = hire(db, gpu())
    claims = hand.claim(*submit(db, 3, min_memory_mb=1000))
    mark = f"{hand.worker_id}#1"
    ways = [Left(), Left(Remains.PROCESSES, mark), Left(Remains.MODEL, mark, "model:x", "echo", "m", True)]
    keys = [(claim.lease.key, left) for claim, left in zip(claims, ways, strict=True)]
    db.write(lambda conn: end_leases(conn, keys))
    found = {lease.token: lease for lease in rows(db, schema.leases)}
    gone, ending, model = found[keys[0][0]], found[keys[1][0]], found["model:x"]
    assert (gone.state, gone.ending_as) == ("spent", None)
    assert (ending.state, ending.ending_as, ending.slot) == ("active", "spent", mark)
    assert (model.state, model.resident, model.job_id, model.slot) == ("active", True, None, mark)
    assert leased(db) == {"GPU-0": 2000}


def test_an_attempt_that_lost_its_job_ends_its_lease_by_what_it_left(db):
    hand, other = hire(db, gpu()), hire(db)
    (claim,) = hand.claim(*submit(db, min_memory_mb=1000))
    taken = update(schema.jobs).values(worker_id=other.worker_id, attempt=2, lease_token=None)
    db.write(lambda conn: conn.execute(taken))
    (settled,) = hand.record(ends=[done(claim)._replace(left=Left(Remains.PROCESSES, f"{hand.worker_id}#1"))])
    assert settled.arrow is None
    assert only_lease(db).ending_as == "spent"
    assert leased(db) == {"GPU-0": 1000}


# --- a GPU that is lost ---


def test_leases_on_a_lost_gpu_are_over_at_once_with_the_reason(db):
    hand = hire(db, gpu(0), gpu(1))
    (claim,) = hand.claim(*submit(db, min_memory_mb=1000, gpu_count=2))
    token = client_lease(db, 500, pid=50)
    other = client_lease(db, 21_000)  # fits on the other GPU only
    lost = next(share.gpu_uuid for share in rows(db, schema.lease_gpus) if share.token == token_hash(token))
    kept = next(share.gpu_uuid for share in rows(db, schema.lease_gpus) if share.token == token_hash(other))
    assert lost != kept
    index = int(lost[-1])
    hand.sees(gpu(1 - index), gpu(index, health=Health.LOST, health_reason="fell off the bus"), busy=1)
    assert leased(db) == {lost: 0, kept: 21_000}
    with pytest.raises(LeaseEnded, match=f"expired.*GPU {lost} was lost: fell off the bus"):
        heartbeat(db, token)
    heartbeat(db, other)
    found = {lease.token: lease for lease in rows(db, schema.leases)}
    assert found[claim.lease.key].state == "spent"
    assert "fell off the bus" in found[claim.lease.key].end_reason
    assert events(db).count("lease.revoked") == 2
    hand.sees(gpu(1 - index), gpu(index, health=Health.LOST))
    assert events(db).count("lease.revoked") == 2


def test_an_ending_lease_on_a_lost_gpu_is_over_and_nothing_is_quarantined(db):
    hand = hire(db, gpu())
    release(db, client_lease(db, pid=50))
    change_leases(db, ending_since=utc_shift(-100.0))
    assert hand.sees(gpu(health=Health.LOST)).quarantined == ()
    assert leased(db) == {"GPU-0": 0}


@pytest.mark.parametrize("health", [Health.UNKNOWN, Health.UNHEALTHY])
def test_leases_on_a_gpu_that_is_unwell_go_on(db, health):
    hand = hire(db, gpu())
    token = client_lease(db, pid=50)
    hand.sees(gpu(health=health))
    heartbeat(db, token)
    assert leased(db) == {"GPU-0": 1000}


def test_a_long_reason_is_cut(db):
    hand = hire(db, gpu())
    client_lease(db)
    hand.sees(gpu(health=Health.LOST, health_reason="x" * 250))
    assert len(only_lease(db).end_reason) == 255


# --- expiry ---


def test_an_expired_lease_on_a_watched_node_waits_for_its_process(db):
    hand = hire(db, gpu())
    token = client_lease(db, pid=50)
    hand.sees(shows(process()))
    change_leases(db, expires_at=utc_shift(-1.0))
    assert purge(db) == 1
    assert leased(db) == {"GPU-0": 1000}
    with pytest.raises(LeaseEnded, match="expired"):
        heartbeat(db, token)
    assert purge(db) == 0  # it is watched
    hand.sees(shows())
    assert leased(db) == {"GPU-0": 0}
    assert only_lease(db).state == "expired"
    assert events(db).count("lease.expired") == 1


def test_an_expired_lease_on_a_silent_node_is_over_at_once(db):
    hire(db, gpu())
    client_lease(db, pid=50)
    change_leases(db, expires_at=utc_shift(-1.0))
    fall_silent(db)
    assert purge(db) == 1
    assert leased(db) == {"GPU-0": 0}
    assert only_lease(db).state == "expired"


def test_an_expired_cpu_lease_of_no_node_is_over_at_once(db):
    client_lease(db, pid=50, cpu_fallback=True)
    change_leases(db, expires_at=utc_shift(-1.0))
    assert purge(db) == 1
    assert only_lease(db).state == "expired"


def test_ending_leases_of_a_node_that_fell_silent_are_over_when_their_time_is(db):
    hand = hire(db, gpu())
    release(db, client_lease(db, pid=50))
    hand.sees(shows(process()))
    fall_silent(db)
    assert purge(db) == 0  # its holder may live until then
    change_leases(db, expires_at=utc_shift(-1.0))
    assert purge(db) == 1
    assert leased(db) == {"GPU-0": 0}
    assert only_lease(db).state == "released"  # as it would have been
    assert "lease.expired" not in events(db)


def test_ending_leases_of_a_watched_node_outlive_their_time(db):
    hand = hire(db, gpu())
    release(db, client_lease(db, pid=50))
    hand.sees(shows(process()))
    change_leases(db, expires_at=utc_shift(-1.0))
    assert purge(db) == 0
    assert leased(db) == {"GPU-0": 1000}


@pytest.mark.parametrize(("limit", "steps"), [(3, [3, 1, 0]), (200, [4, 0, 0])])
def test_silent_nodes_are_purged_in_bounded_steps_and_as_each_would_have_ended(db, limit, steps):
    hand = hire(db, gpu())
    for _ in range(3):
        release(db, client_lease(db, 100, pid=50))
    (claim,) = hand.claim(*submit(db, min_memory_mb=100))
    db.write(lambda conn: leases.let_go(conn, [claim.lease.key], LeaseState.SPENT))
    change_leases(db, expires_at=utc_shift(-1.0))
    fall_silent(db)
    assert [purge(db, limit=limit) for _ in range(3)] == steps
    assert leased(db) == {"GPU-0": 0}
    assert sorted(lease.state for lease in rows(db, schema.leases)) == ["released"] * 3 + ["spent"]


def test_a_live_lease_is_neither_purged_nor_forgotten(db):
    """INV-17."""
    hire(db, gpu())
    token = client_lease(db, pid=50)
    fall_silent(db)
    assert purge(db) == 0
    assert db.write(lambda conn: lease_purge.forget(conn, 0.0)) == 0
    heartbeat(db, token)


# --- orphans ---


def kill(hand: Hand):
    hand.go_silent()
    assert [w.worker_id for w in hand.db.write(lambda conn: nodes.declare_lost(conn, 60.0, 10))] == [hand.worker_id]


def test_processes_of_dead_workers_are_orphans_and_nobody_elses(db):
    dead, stopped, alive = hire(db, gpu()), hire(db), hire(db)
    db.write(lambda conn: nodes.deregister(conn, stopped.worker))
    kill(dead)
    own, theirs = process(1, 1, f"{alive.worker_id}#1"), process(1, 2, f"{hire(db).worker_id}#1")
    orphans = process(1, 4, f"{dead.worker_id}#3"), process(1, 5, f"{stopped.worker_id}#1")
    elsewhere = process(1, 6, "another-cluster:1:ff#1")  # nobody here has heard of it
    unmarked = process(1, 7)
    findings = alive.sees(shows(own, theirs, *reversed(orphans), elsewhere, unmarked))
    assert findings.orphans == orphans


def test_an_orphan_on_two_gpus_is_named_once_for_each_look_of_it(db):
    dead, alive = hire(db), hire(db)
    kill(dead)
    orphan = process(1, 4, f"{dead.worker_id}#3")
    assert alive.sees(shows(orphan), shows(orphan, index=1)).orphans == (orphan,)


def test_where_nobody_can_look_there_are_no_orphans(db):
    dead, alive = hire(db), hire(db)
    kill(dead)
    assert alive.sees(replace(gpu(), processes=None)).orphans == ()


def test_the_lease_of_a_dead_worker_lasts_until_its_processes_are_gone(db):
    """INV-17, and the memory is not given to another before that."""
    dead, alive = hire(db, gpu()), hire(db)
    (claim,) = dead.claim(*submit(db, min_memory_mb=20_000))
    kill(dead)
    left = process(20_000, 4, f"{dead.worker_id}#3")
    change_leases(db, expires_at=utc_shift(-1.0))
    alive.sees(shows(left))
    assert purge(db) == 1
    alive.sees(shows(left))
    assert leased(db) == {"GPU-0": 20_000}
    alive.sees(shows())
    assert leased(db) == {"GPU-0": 0}
    assert active_leases(db) == []
    assert claim.lease.key == only_lease(db).token


def test_hand_back_ends_are_no_exception(db):
    hand = hire(db, gpu())
    (claim,) = hand.claim(*submit(db, min_memory_mb=1000))
    mark = f"{hand.worker_id}#1"
    end = done(claim)._replace(outcome=Outcome.HANDED_BACK, result=None, left=Left(Remains.PROCESSES, mark))
    hand.record(ends=[end])
    assert row(db, claim.job_id).status == "pending"
    assert leased(db) == {"GPU-0": 1000}
    hand.sees(shows())
    assert leased(db) == {"GPU-0": 0}
