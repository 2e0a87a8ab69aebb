"""What could use GPU memory twice, or keep it from those who wait, when things happen in an unusual order."""

import time
from dataclasses import replace

import pytest
from sqlalchemy import event, select, update

from orchestrator.gpu import GpuProcess, Health
from orchestrator.leases import Denied, GpuShare, Granted, LeaseRequest, Remains, ResidentSlot, Terms
from orchestrator.placement import Policy
from orchestrator.store import grants, inventory, lease_purge, leases, patience, residency, schema
from orchestrator.store.claim import Claim, NotClaimed
from orchestrator.store.dialect import utc_shift
from orchestrator.store.gpus import Gate
from orchestrator.store.settle import Left, never_started
from tests.factories import GATE_PCT, STALE_S, active_leases, done, gpu, hire, rows, set_job, submit


def at_once() -> Terms:
    return Terms(STALE_S, Policy.BEST_FIT, resident_min_s=0.0)


def ask(db, memory_mb, **fields):
    wanted = LeaseRequest(**({"agent": "outside", "memory_mb": memory_mb, "ttl_s": 60.0} | fields))
    return db.write(lambda conn: grants.grant(conn, [wanted], at_once()))[0]


def release(db, granted):
    db.write(lambda conn: leases.release(conn, granted.request.token))


def gpu_row(db, uuid="GPU-0"):
    return next(row for row in rows(db, schema.gpus) if row.gpu_uuid == uuid)


def process(mark=None, memory_mb=3000, pid=100, lineage=()):
    return GpuProcess(pid, memory_mb, mark, lineage or (pid,))


def ended(claim, **left):
    return done(claim)._replace(left=Left(**left))


def warm_up(hand, memory_mb=4000, uuid="GPU-0", number=1, **fields):
    """Run a job that leaves its model in memory; the slot that keeps it."""
    (claim,) = hand.claim(*submit(hand.db, min_memory_mb=memory_mb, **fields))
    slot, key = f"{hand.worker_id}#{number}", f"model:{hand.worker_id}#{number}:1"
    hand.record(ends=[ended(claim, remains=Remains.MODEL, slot=slot, key=key, type="echo")])
    return ResidentSlot(key, "echo", None, memory_mb, (GpuShare(uuid, 0),))


def age(db, seconds):
    """As if everything about leases had happened so long ago."""
    past = {"ending_since": utc_shift(-seconds), "idle_since": utc_shift(-seconds), "created_at": utc_shift(-seconds)}
    for column, value in past.items():
        some = update(schema.leases).where(schema.leases.c[column].is_not(None)).values({column: value})
        db.write(lambda conn, some=some: conn.execute(some))


# --- warm models ---


def test_a_model_keeps_its_lease_when_the_answer_to_a_claim_under_it_was_lost(db, lose_commits):
    """Its memory is in use all the time: a freed lease would give it to others."""
    hand = hire(db, gpu())
    model = warm_up(hand)
    (job,) = submit(db, min_memory_mb=4000)
    lose_commits(1)
    claim = hand.offer(job, warm=[model], blank=0)[job]
    assert isinstance(claim, Claim) and claim.lease is not None and claim.lease.resident == model.key
    assert claim.attempt == 2
    assert gpu_row(db).leased_mb == 4000
    (lease,) = active_leases(db)
    assert (lease.token, lease.job_id) == (model.key, job)


def test_a_job_that_never_started_leaves_the_lease_of_the_model_to_those_who_see_it_go(db):
    """Its slot was evicted between claim and dispatch, and dies: until somebody has looked, its memory is taken."""
    hand = hire(db, gpu())
    model = warm_up(hand)
    (job,) = submit(db, min_memory_mb=4000)
    claim = hand.offer(job, warm=[model], blank=0)[job]
    assert isinstance(claim, Claim)
    hand.record(ends=[never_started(claim.job_id, claim.attempt, "no slot", model.key)])
    assert gpu_row(db).leased_mb == 4000
    (lease,) = active_leases(db)
    assert (lease.job_id, lease.idle_since is not None) == (None, True)


def test_a_job_that_never_started_frees_a_lease_of_its_own(db):
    hand = hire(db, gpu())
    (claim,) = hand.claim(*submit(db, min_memory_mb=4000))
    hand.record(ends=[never_started(claim.job_id, claim.attempt, "no room", claim.lease.key)])
    assert gpu_row(db).leased_mb == 0


def test_a_worker_hears_of_models_whose_lease_is_over(db):
    """Whatever ended it: nobody else would ever ask that model to leave, and its memory would be foreign for ever."""
    hand = hire(db, gpu())
    model, other = warm_up(hand), warm_up(hand, number=2)
    db.write(lambda conn: leases.free(conn, [model.key]))
    assert hand.beat(resident=(model.key, other.key)).forgotten == (model.key,)


# --- room ---


@pytest.mark.parametrize("other", [{"health": Health.UNHEALTHY}, {"used_mb": 24_000, "processes": None}])
def test_idle_models_make_room_whatever_is_wrong_with_the_other_gpus(db, other):
    hand = hire(db, gpu(0))
    warm_up(hand, 20_000)
    hand.sees(gpu(0), gpu(1, **other))
    denied = ask(db, 10_000)
    assert isinstance(denied, Denied) and denied.evicting, denied


def test_idle_models_that_close_the_gate_make_room(db):
    """They use more than they leased: the gate closes, and would never open again if they stayed."""
    hand = hire(db, gpu(total_mb=10_000))
    models = [warm_up(hand, 4000, number=number) for number in (1, 2)]
    used = tuple(process(f"{hand.worker_id}#{number}", 4600, pid=number) for number in (1, 2))
    hand.sees(gpu(total_mb=10_000, used_mb=9200, processes=used))
    assert gpu_row(db).gate_closed_at is not None
    denied = ask(db, 2000)
    assert isinstance(denied, Denied) and denied.evicting, denied
    assert len(models) == 2


# --- endings ---


def test_a_neighbour_that_cannot_see_processes_does_not_end_the_leases_of_a_living_worker(db):
    """In containers nobody can tell processes apart; then a worker knows of its own slots, and of no other's."""
    hand, neighbour = hire(db, gpu()), hire(db, gpu())
    (claim,) = hand.claim(*submit(db, min_memory_mb=4000))
    slot = f"{hand.worker_id}#1"
    hand.record(ends=[ended(claim, remains=Remains.PROCESSES, slot=slot)])
    unseen = gpu(used_mb=3000, processes=None)
    neighbour.sees(unseen)
    assert gpu_row(db).leased_mb == 4000
    hand.sees(unseen, running=[slot])
    assert gpu_row(db).leased_mb == 4000
    hand.sees(unseen, running=[])
    assert gpu_row(db).leased_mb == 0


def test_where_processes_cannot_be_seen_the_leases_of_a_dead_worker_end(db):
    hand, neighbour = hire(db, gpu()), hire(db, gpu())
    (claim,) = hand.claim(*submit(db, min_memory_mb=4000))
    hand.record(ends=[ended(claim, remains=Remains.PROCESSES, slot=f"{hand.worker_id}#1")])
    lost = update(schema.workers).where(schema.workers.c.worker_id == hand.worker_id).values(status="lost")
    db.write(lambda conn: conn.execute(lost))
    neighbour.sees(gpu(processes=None))
    assert gpu_row(db).leased_mb == 0


def test_a_process_under_a_newer_lease_is_no_reason_for_quarantine(db):
    """A program that takes one lease after the other, as the decorator of the client does."""
    hand = hire(db, gpu())
    first = ask(db, 4000, node_id="node-1", pid=77)
    release(db, first)
    second = ask(db, 4000, node_id="node-1", pid=77)
    assert isinstance(first, Granted) and isinstance(second, Granted)
    age(db, 60.0)
    hand.sees(gpu(used_mb=3000, processes=(process(pid=77),)))
    assert gpu_row(db).quarantined_at is None
    assert (gpu_row(db).leased_mb, gpu_row(db).foreign_mb) == (4000, 0)


def test_a_process_that_uses_more_than_the_newer_lease_is_held(db):
    hand = hire(db, gpu())
    release(db, ask(db, 4000, node_id="node-1", pid=77))
    ask(db, 4000, node_id="node-1", pid=77)
    age(db, 60.0)
    hand.sees(gpu(used_mb=6000, processes=(process(pid=77, memory_mb=6000),)))
    assert gpu_row(db).quarantined_at is not None


def test_a_process_under_a_lease_that_ended_after_the_sample_is_no_reason_for_quarantine(db):
    """The sample shows what it used then: while the transaction waited, the second lease ended too."""
    hand = hire(db, gpu())
    first = ask(db, 4000, node_id="node-1", pid=77)
    release(db, first)
    second = ask(db, 4000, node_id="node-1", pid=77)
    age(db, 60.0)
    taken_at, sample = time.monotonic(), [gpu(used_mb=3000, processes=(process(pid=77),))]
    release(db, second)
    node, gate = ("node-1", [hand.worker_id]), Gate(GATE_PCT)
    db.write(lambda conn: inventory.take_stock(conn, *node, sample, gate, (), 10.0, taken_at=taken_at))
    assert gpu_row(db).quarantined_at is None
    assert gpu_row(db).leased_mb == 4000  # nobody has looked since it ended


def test_a_process_under_a_lease_that_still_may_take_its_time_is_no_reason_for_quarantine(db):
    """Two leases of one program; the first one's end was not seen for long, as the driver did not answer."""
    hand = hire(db, gpu())
    first, second = (ask(db, 4000, node_id="node-1", pid=77) for _ in range(2))
    release(db, first)
    age(db, 60.0)
    release(db, second)
    held = gpu(used_mb=3000, processes=(process(pid=77),))
    hand.sees(held)
    assert gpu_row(db).quarantined_at is None
    assert gpu_row(db).leased_mb == 4000
    age(db, 60.0)
    hand.sees(held)
    assert gpu_row(db).quarantined_at is not None


def test_a_lease_that_ran_out_does_not_wait_for_other_jobs_of_its_worker(db):
    """The database was away for longer than a lease lives; the worker lives, and goes on with other jobs."""
    hand = hire(db, gpu())
    gone, running = hand.claim(*submit(db, 2, min_memory_mb=4000))
    over = update(schema.leases).where(schema.leases.c.token == gone.lease.key).values(expires_at=utc_shift(-1.0))
    db.write(lambda conn: conn.execute(over))
    db.write(lambda conn: lease_purge.purge(conn, stale_s=STALE_S))
    hand.record(ends=[ended(gone, remains=Remains.PROCESSES, slot=f"{hand.worker_id}#1")])
    age(db, 60.0)
    hand.sees(gpu(used_mb=3000, processes=(process(f"{hand.worker_id}#2"),)), busy=1)
    assert gpu_row(db).quarantined_at is None
    assert [lease.token for lease in active_leases(db)] == [running.lease.key]


def test_a_sample_older_than_the_end_of_a_lease_does_not_prove_its_processes_gone(db):
    hand = hire(db, gpu())
    (claim,) = hand.claim(*submit(db, min_memory_mb=4000))
    hand.record(ends=[ended(claim, remains=Remains.PROCESSES, slot=f"{hand.worker_id}#1")])

    def look(age_s):
        gate, taken_at = Gate(GATE_PCT), time.monotonic() - age_s
        db.write(
            lambda conn: inventory.take_stock(
                conn, "node-1", [hand.worker_id], hand.gpus, gate, (), 10.0, taken_at=taken_at
            )
        )

    age(db, 20.0)
    look(age_s=30.0)  # taken before the process had any memory
    assert gpu_row(db).leased_mb == 4000
    look(age_s=0.0)
    assert gpu_row(db).leased_mb == 0


def test_a_sample_that_took_long_does_not_prove_that_processes_stayed_so_long(db):
    """The driver listed them, then hung; they went meanwhile."""
    hand = hire(db, gpu())
    (claim,) = hand.claim(*submit(db, min_memory_mb=4000))
    hand.record(ends=[ended(claim, remains=Remains.PROCESSES, slot=f"{hand.worker_id}#1")])
    age(db, 120.0)
    sample = [gpu(used_mb=3000, processes=(process(f"{hand.worker_id}#1"),))]

    def look(age_s):
        gate, taken_at = Gate(GATE_PCT), time.monotonic() - age_s
        db.write(
            lambda conn: inventory.take_stock(
                conn, "node-1", [hand.worker_id], sample, gate, (), 100.0, taken_at=taken_at
            )
        )

    look(age_s=50.0)
    assert gpu_row(db).quarantined_at is None
    look(age_s=0.0)
    assert gpu_row(db).quarantined_at is not None


# --- GPUs that moved ---


def test_a_gpu_that_moved_is_lost_to_its_former_node_only(db):
    """A card given to another virtual machine: the former owner reports it lost for ever."""
    former = hire(db, gpu(), node="node-1")
    hire(db, gpu(), node="node-2")
    granted = ask(db, 4000)
    assert isinstance(granted, Granted) and granted.node_id == "node-2"
    former.sees(gpu(health=Health.LOST, processes=None))
    row = gpu_row(db)
    assert (row.node_id, row.health, row.leased_mb) == ("node-2", "ok", 4000)


def test_a_gpu_that_moved_is_lost_there_too_when_the_new_node_is_silent(db):
    former = hire(db, gpu(), node="node-1")
    hire(db, gpu(), node="node-2")
    db.write(lambda conn: conn.execute(update(schema.gpus).values(sampled_at=utc_shift(-60.0))))
    former.sees(gpu(health=Health.LOST, processes=None))
    assert gpu_row(db).health == "lost"


# --- reservations ---


def starving(db, memory_mb, **fields):
    (job,) = submit(db, min_memory_mb=memory_mb, **fields)
    set_job(db, job, created_at=utc_shift(-3600.0))
    return job


def again(db, hand, job):
    """Offer a job that finds no room once more."""
    set_job(db, job, queued="ready", not_before=None)
    assert isinstance(hand.offer(job)[job], NotClaimed)


def reserved(db):
    return {row.gpu_uuid for row in rows(db, schema.gpus) if row.reserved_for}


def test_a_reservation_leaves_a_gpu_that_can_no_longer_hold_the_job(db):
    hand = hire(db, gpu(0), gpu(1))
    hand.claim(*submit(db, 2, min_memory_mb=15_000))
    job = starving(db, 20_000)
    again(db, hand, job)
    (first,) = reserved(db)
    ill = [replace(one, health=Health.UNHEALTHY) if one.uuid == first else one for one in hand.gpus]
    hand.sees(*ill)
    again(db, hand, job)
    assert reserved(db) == {"GPU-0", "GPU-1"} - {first}


def test_half_a_reservation_is_none(db):
    hand = hire(db, gpu(0), gpu(1))
    hand.claim(*submit(db, 2, min_memory_mb=15_000))
    job = starving(db, 20_000, gpu_count=2)
    half = update(schema.gpus).where(schema.gpus.c.gpu_uuid == "GPU-0")
    db.write(lambda conn: conn.execute(half.values(reserved_for=job, reserved_until=utc_shift(10.0))))
    again(db, hand, job)
    assert reserved(db) == {"GPU-0", "GPU-1"}


def test_nothing_is_reserved_behind_a_pinned_model(db):
    """It leaves for nobody: the rest of its GPU would be kept for a job that never gets it."""
    hand = hire(db, gpu(0))
    (claim,) = hand.claim(*submit(db, min_memory_mb=15_000))
    slot, key = f"{hand.worker_id}#1", "model:1"
    hand.record(ends=[ended(claim, remains=Remains.MODEL, slot=slot, key=key, type="echo", pinned=True)])
    again(db, hand, starving(db, 20_000))
    assert reserved(db) == set()


def test_a_job_with_a_reservation_elsewhere_is_soon_offered_again(db):
    """Whichever node it is offered to: a long pause would outlast the reservation."""
    here, there = hire(db, gpu(0), node="node-1"), hire(db, gpu(1), node="node-2")
    for hand in (here, there):
        hand.claim(*submit(db, min_memory_mb=15_000))
    job = starving(db, 20_000)
    again(db, here, job)
    assert reserved(db) == {"GPU-0"}
    again(db, there, job)
    soon = schema.jobs.c.not_before < utc_shift(patience.RESERVED_S / 3)
    assert db.read(lambda conn: conn.execute(select(schema.jobs.c.job_id).where(soon)).scalars().all()) == [job]
    assert reserved(db) == {"GPU-0"}


def test_a_warm_model_serves_nobody_while_its_gpu_is_kept_for_a_starving_job(db):
    """A stream of jobs for it would otherwise never let it become idle, and the job would wait for ever."""
    hand = hire(db, gpu())
    hand.terms = at_once()
    model = warm_up(hand, 15_000)
    (busy, following) = submit(db, 2, min_memory_mb=15_000)
    claim = hand.offer(busy, warm=[model], blank=0)[busy]
    assert isinstance(claim, Claim)
    job = starving(db, 20_000)
    again(db, hand, job)
    assert reserved(db) == {"GPU-0"}
    kept = ended(claim, remains=Remains.MODEL, slot=f"{hand.worker_id}#1", key=model.key, type="echo")
    hand.record(ends=[kept._replace(lease_key=model.key)])
    assert isinstance(hand.offer(following, warm=[model], blank=0)[following], NotClaimed)
    set_job(db, job, queued="ready", not_before=None)
    denied = hand.offer(job)[job]
    assert isinstance(denied, NotClaimed) and denied.evicting


# --- the rest ---


def test_a_job_that_may_do_without_a_gpu_does_not_wait_for_a_slot(db):
    """All free slots keep models, perhaps pinned ones: it would wait for ever."""
    hand = hire(db, gpu())
    model = warm_up(hand)
    waits, runs = *submit(db, min_memory_mb=9000), *submit(db, min_memory_mb=9000, cpu_fallback=True)
    answers = hand.offer(waits, runs, warm=[model], blank=0)
    assert isinstance(answers[waits], NotClaimed)
    claim = answers[runs]
    assert isinstance(claim, Claim) and claim.lease is not None and claim.lease.mode == "cpu"


def test_the_account_of_a_host_that_tells_nothing_has_an_end(db):
    hire(db, gpu())
    assert isinstance(ask(db, 100, host_memory_mb=2**31 - 1), Granted)
    assert isinstance(ask(db, 100, host_memory_mb=2**31 - 1), Denied)


def test_a_heartbeat_passes_over_a_turn_of_the_ledger_and_never_deadlocks_with_it(maria_db):
    """The turn ends one lease and then occupies another, with GPUs locked in between."""
    db, failures = maria_db, list[object]()
    hand = hire(db, gpu())
    model, leaving = warm_up(hand), warm_up(hand, number=2)
    (job,) = submit(db, min_memory_mb=4000)

    def turn(conn):
        leases.lock(conn, [leaving.key, model.key])
        hand.beat(busy=1)
        leases.free(conn, [leaving.key])
        assert residency.occupy(conn, model, job, hand.worker_id)
        conn.commit()

    def on_error(context):
        failures.append(context.original_exception.args[0])

    event.listen(db.engine, "handle_error", on_error)
    try:
        with db.engine.connect() as conn:
            turn(conn)
    finally:
        event.remove(db.engine, "handle_error", on_error)
    assert failures == []
