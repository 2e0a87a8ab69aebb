"""GPUs as rows: samples in one statement, a gate that does not flap, accounts, reservations and quarantine."""

from dataclasses import replace

import pytest
from sqlalchemy import insert, update

from orchestrator.errors import GpuNotFound
from orchestrator.gpu import GpuProcess, Health
from orchestrator.leases import LeaseRequest, Terms
from orchestrator.store import gpus, grants, schema
from orchestrator.store.dialect import utc_shift
from orchestrator.store.gpus import Gate
from tests.factories import STALE_S, gpu, hire, now, rows, submit, traffic, write_as

TOTAL = 10_000


def one(db, uuid="GPU-0"):
    (found,) = [row for row in rows(db, schema.gpus) if row.gpu_uuid == uuid]
    return found


def record(db, *sample, gate=None, node="node-1"):
    db.write(lambda conn: gpus.record(conn, node, sample, gate or Gate(90)))


def used(mb, **fields):
    return gpu(total_mb=TOTAL, used_mb=mb, **fields)


def take(db, need_mb, key="", uuid="GPU-0"):
    return db.write(lambda conn: gpus.take(conn, uuid, need_mb, STALE_S, key))


def give(db, **amounts):
    db.write(lambda conn: gpus.give(conn, {uuid.replace("_", "-"): mb for uuid, mb in amounts.items()}))


def lease(db, memory_mb=1000, **fields):
    request = LeaseRequest(**({"agent": "a", "memory_mb": memory_mb, "ttl_s": 60.0} | fields))
    (answer,) = db.write(lambda conn: grants.grant(conn, [request], Terms(STALE_S)))
    return answer


def age(db, column, seconds):
    """As if this had been written that long ago."""
    db.write(lambda conn: conn.execute(update(schema.gpus).values({column: utc_shift(-seconds)})))


# --- samples ---


@pytest.mark.parametrize(
    ("said", "stored"),
    [
        ({"used_mb": 2**40}, {"used_mb": 2**31 - 1}),
        ({"used_mb": -1}, {"used_mb": 0}),
        ({"total_mb": 2**40}, {"total_mb": 2**31 - 1}),
        ({"index": 10**11}, {"gpu_index": 2**31 - 1}),
        ({"temperature_c": 10**12}, {"temperature_c": 2**31 - 1}),
        ({"temperature_c": -(10**12)}, {"temperature_c": -(2**31) + 1}),
        ({"utilization": float("nan")}, {"utilization": None}),
        ({"utilization": float("inf")}, {"utilization": None}),
        ({"name": "A100 \udcff"}, {"name": "A100 ?"}),
        ({"name": "x" * 300}, {"name": "x" * 255}),
        ({"health": Health.LOST, "health_reason": "\ud800" * 300}, {"health_reason": "?" * 255}),
    ],
)
def test_what_no_row_can_hold_does_not_fail_the_heartbeat(db, said, stored):
    hire(db).sees(gpu(1), replace(gpu(), **said))
    assert len(rows(db, schema.gpus)) == 2
    assert {name: getattr(one(db), name) for name in stored} == stored


@pytest.mark.parametrize("uuid", ["U" * 65, "GPU-\ud800"])
def test_a_gpu_that_no_row_can_name_is_left_out(db, uuid):
    hire(db).sees(gpu(1), gpu(uuid=uuid))
    assert [row.gpu_uuid for row in rows(db, schema.gpus)] == ["GPU-1"]


def test_a_sample_of_many_gpus_is_one_write_and_news_of_each(db):
    record(db, *[gpu(n, used_mb=n) for n in range(8)])
    with traffic(db) as seen:
        record(db, *[gpu(n, used_mb=100 + n, temperature_c=40 + n) for n in reversed(range(8))])
    writes = [s for s in seen.statements if not s.startswith(("SELECT", "BEGIN"))]
    assert len(writes) == 1 and len(seen.statements) <= 4, seen.statements
    found = sorted(rows(db, schema.gpus), key=lambda row: row.gpu_index)
    assert [row.used_mb for row in found] == [100 + n for n in range(8)]
    assert [row.temperature_c for row in found] == [40 + n for n in range(8)]


def test_no_gpus_are_no_write(db):
    with traffic(db) as seen:
        record(db)
    assert [s for s in seen.statements if not s.startswith("BEGIN")] == []


def test_a_sample_touches_neither_account_nor_quarantine_nor_reservation(db):
    record(db, used(0))
    assert take(db, 700)
    db.write(lambda conn: gpus.quarantine(conn, ["GPU-0"], "stuck"))
    db.write(lambda conn: gpus.reserve(conn, ["GPU-0"], "job", 60.0))
    before = one(db)
    record(db, used(50, health=Health.UNHEALTHY, health_reason="hot"))
    after = one(db)
    for column in ("leased_mb", "quarantined_at", "quarantine_reason", "reserved_for", "reserved_until"):
        assert getattr(after, column) == getattr(before, column) is not None, column
    assert (after.used_mb, after.health, after.health_reason) == (50, "unhealthy", "hot")
    assert after.sampled_at >= before.sampled_at


def test_a_sample_makes_a_gpu_fresh_again(db):
    record(db, used(0))
    age(db, "sampled_at", STALE_S + 1)
    assert not take(db, 1)
    (shown,) = db.read(lambda conn: gpus.list_gpus(conn, STALE_S))
    assert shown["fresh"] is False
    record(db, used(0))
    assert take(db, 1)


def test_a_gpu_that_moved_is_its_new_nodes(db):
    record(db, used(0))
    record(db, used(0), node="node-2")
    assert one(db).node_id == "node-2"
    assert db.read(lambda conn: gpus.views(conn, STALE_S, "node-1")) == []


def test_views_of_one_node_and_of_all(db):
    record(db, gpu(1), gpu(0))
    record(db, gpu(2), node="node-2")
    assert [view.gpu_uuid for view in db.read(lambda conn: gpus.views(conn, STALE_S))] == ["GPU-0", "GPU-1", "GPU-2"]
    assert [view.gpu_uuid for view in db.read(lambda conn: gpus.views(conn, STALE_S, "node-2"))] == ["GPU-2"]


# --- the gate ---


def gated(db):
    (view,) = db.read(lambda conn: gpus.views(conn, STALE_S))
    return view.gated


def test_the_gate_closes_above_its_limit_from_the_first_sample_on(db):
    record(db, used(9001))
    assert gated(db)
    record(db, gpu(1, total_mb=TOTAL, used_mb=9000))
    assert one(db, "GPU-1").gate_closed_at is None


def test_a_closed_gate_gives_nothing(db):
    record(db, used(0))
    record(db, used(9001, processes=None), gate=Gate(90, hold_s=0.0))
    db.write(lambda conn: conn.execute(update(schema.gpus).values(foreign_mb=0)))
    assert not take(db, 1)
    record(db, used(0), gate=Gate(90, hold_s=0.0))
    assert take(db, 1)


def test_the_gate_opens_only_well_below_the_limit(db):
    """Hysteresis: memory that swings around the limit must not open it with every swing."""
    at_once = Gate(90, hysteresis_pct=5, hold_s=0.0)
    seen = []
    for mb in (9001, 9000, 8501, 8500, 8501, 9000, 9001):
        record(db, used(mb), gate=at_once)
        seen.append(gated(db))
    assert seen == [True, True, True, False, False, False, True]


def test_the_gate_stays_closed_for_a_while(db):
    gate = Gate(90, hold_s=60.0)
    record(db, used(9001), gate=gate)
    record(db, used(0), gate=gate)
    assert gated(db)
    age(db, "gate_closed_at", 30.0)
    record(db, used(0), gate=gate)
    assert gated(db)
    age(db, "gate_closed_at", 61.0)
    record(db, used(0), gate=gate)
    assert not gated(db)


def test_the_hold_begins_anew_whenever_it_is_too_full_again(db):
    gate = Gate(90, hold_s=30.0)
    record(db, used(9001), gate=gate)
    age(db, "gate_closed_at", 31.0)
    record(db, used(9001), gate=gate)
    record(db, used(0), gate=gate)
    assert gated(db)


# --- accounts ---


def test_memory_is_taken_to_the_last_megabyte_and_given_back(db):
    record(db, used(1000, processes=(GpuProcess(1, 1000),)))
    assert not take(db, 8001)
    assert take(db, 8000)
    assert not take(db, 1)
    give(db, GPU_0=3000)
    assert take(db, 3000)
    assert one(db).leased_mb == 8000


@pytest.mark.parametrize(
    "values",
    [
        {"health": "unhealthy"},
        {"health": "unknown"},
        {"sampled_at": utc_shift(-STALE_S - 1)},
        {"quarantined_at": utc_shift(-1)},
        {"gate_closed_at": utc_shift(-1)},
        {"foreign_mb": 8001},
        {"leased_mb": 8001},
    ],
    ids=lambda values: next(iter(values)),
)
def test_nothing_is_taken_of_a_gpu_that(db, values):
    record(db, used(0))
    assert take(db, 500)
    db.write(lambda conn: conn.execute(update(schema.gpus).values(values)))
    assert not take(db, 1000)


def test_nothing_is_taken_of_a_gpu_that_nobody_knows(db):
    assert not take(db, 1)


def test_an_account_that_somebody_edited_never_goes_below_zero(db):
    record(db, used(0), gpu(1))
    assert take(db, 100)
    give(db, GPU_0=101, GPU_1=5, GPU_9=7)
    assert [row.leased_mb for row in rows(db, schema.gpus)] == [0, 0]


def test_the_largest_gpu_of_the_cluster(db):
    assert db.read(gpus.largest_usable_mb) == 0
    record(db, gpu(0, total_mb=10_000), gpu(1, total_mb=20_000))
    assert db.read(gpus.largest_usable_mb) == 18_000


# --- reservations ---


def reserve(db, key, *uuids, seconds=60.0):
    return db.write(lambda conn: gpus.reserve(conn, uuids or ("GPU-0",), key, seconds))


def test_a_reserved_gpu_is_open_to_its_job_alone_which_uses_the_reservation_up(db):
    record(db, used(0))
    assert reserve(db, "mine")
    assert not take(db, 10)
    assert not take(db, 10, "other")
    assert take(db, 10, "mine")
    assert (one(db).reserved_for, one(db).reserved_until) == (None, None)
    assert take(db, 10, "other")


def test_a_reservation_of_another_is_not_overwritten_and_ends_by_itself(db):
    record(db, used(0))
    assert reserve(db, "first")
    assert not reserve(db, "second")
    assert one(db).reserved_for == "first"
    age(db, "reserved_until", 0.5)
    assert db.read(gpus.reservations) == {}
    assert take(db, 10)
    assert reserve(db, "second")
    assert db.read(gpus.reservations) == {"GPU-0": "second"}


def test_a_reservation_goes_on_while_its_job_asks(db):
    record(db, used(0))
    reserve(db, "mine", seconds=5.0)
    first = one(db).reserved_until
    assert reserve(db, "mine", seconds=60.0)
    assert one(db).reserved_until > first


def test_several_gpus_of_which_another_has_one_are_no_reservation(db):
    record(db, gpu(0), gpu(1))
    reserve(db, "other", "GPU-1")
    assert not reserve(db, "mine", "GPU-0", "GPU-1")
    assert one(db, "GPU-1").reserved_for == "other"


# --- hosts ---


def host(db, node_id="node-1", **has):
    said = {"node_id": node_id, "hostname": node_id, "gpu_backend": "sim"}
    db.write(lambda conn: conn.execute(insert(schema.nodes), said | has))


def take_host(db, cpu_milli, memory_mb):
    return db.write(lambda conn: gpus.take_host(conn, "node-1", cpu_milli, memory_mb))


def give_host(db, cpu_milli, memory_mb):
    db.write(lambda conn: gpus.give_host(conn, "node-1", cpu_milli, memory_mb))


def free_host(db):
    (view,) = db.read(gpus.hosts)
    return view.cpu_milli_free, view.memory_mb_free


def test_a_host_gives_what_it_has_and_not_more(db):
    host(db, cpu_milli=4000, memory_mb=1000)
    assert not take_host(db, 4001, 0)
    assert not take_host(db, 0, 1001)
    assert take_host(db, 3000, 1000)
    assert free_host(db) == (1000, 0)
    assert not take_host(db, 1000, 1)
    assert not take_host(db, 1001, 0)
    give_host(db, 3000, 999)
    assert free_host(db) == (4000, 999)
    give_host(db, 1, 1_000_000)
    assert free_host(db) == (4000, 1000)


def test_what_a_host_does_not_tell_does_not_limit(db):
    host(db, cpu_milli=1000)
    assert free_host(db) == (1000, None)
    assert take_host(db, 1000, 10**6)
    assert not take_host(db, 1, 1)


def test_an_unknown_host_gives_nothing(db):
    assert not take_host(db, 1, 1)


# --- foreign memory ---


def foreign(db, uuid="GPU-0"):
    return one(db, uuid).foreign_mb


def test_the_processes_of_a_worker_use_its_leases_up_to_their_size(db):
    hand = hire(db, gpu())
    hand.claim(*submit(db, min_memory_mb=1000))
    for mb, expected in ((0, 0), (400, 0), (1000, 0), (1300, 300), (900, 0)):
        hand.sees(gpu(used_mb=mb, processes=(GpuProcess(7, mb, mark=f"{hand.worker_id}#1"),)))
        assert foreign(db) == expected


def test_the_processes_of_another_worker_are_foreign_to_a_lease(db):
    hand = hire(db, gpu())
    hand.claim(*submit(db, min_memory_mb=1000))
    hand.sees(gpu(used_mb=700, processes=(GpuProcess(7, 700, mark=f"{hand.worker_id}0#1"),)))
    assert foreign(db) == 700


def test_a_neighbours_sample_counts_our_leases_too(db):
    one_hand, other = hire(db, gpu()), hire(db)
    one_hand.claim(*submit(db, min_memory_mb=1000))
    other.sees(gpu(used_mb=700, processes=(GpuProcess(7, 700, mark=f"{one_hand.worker_id}#1"),)))
    assert foreign(db) == 0


def test_a_clients_process_is_known_by_its_lineage(db):
    hand = hire(db, gpu())
    lease(db, 1000, node_id="node-1", pid=50)
    child, stranger = GpuProcess(51, 900, lineage=(51, 50, 1)), GpuProcess(60, 200, lineage=(60, 1))
    hand.sees(gpu(used_mb=1100, processes=(child, stranger)))
    assert foreign(db) == 200


def test_the_lease_of_one_node_covers_nothing_on_another(db):
    hire(db, gpu(0), node="node-1")
    far = hire(db, gpu(1), node="node-2")
    lease(db, 1000, node_id="node-1", pid=50)
    far.sees(gpu(1, used_mb=900, processes=(GpuProcess(51, 900, lineage=(51, 50, 1)),)))
    assert foreign(db, "GPU-1") == 900


def test_an_ended_lease_covers_nothing(db):
    hand = hire(db, gpu())
    (claim,) = hand.claim(*submit(db, min_memory_mb=1000))
    hand.finish(claim)
    hand.sees(gpu(used_mb=700, processes=(GpuProcess(7, 700, mark=f"{hand.worker_id}#1"),)))
    assert foreign(db) == 700


def test_what_was_foreign_stays_so_when_a_client_comes_that_nobody_can_see(db):
    hand = hire(db, gpu(foreign_mb=500))
    lease(db, 1000)
    for mb, expected in ((500, 500), (1400, 500), (1700, 700), (300, 300), (900, 300)):
        hand.sees(gpu(used_mb=mb, processes=(GpuProcess(60, mb),)))
        assert foreign(db) == expected, mb


def test_where_processes_cannot_be_told_apart_growth_is_the_leases_first(db):
    hand = hire(db, gpu(processes=None, used_mb=500))
    hand.claim(*submit(db, min_memory_mb=1000))
    for mb, expected in ((500, 500), (1500, 500), (1600, 600)):
        hand.sees(replace(gpu(used_mb=mb), processes=None))
        assert foreign(db) == expected, mb


def test_foreign_memory_leaves_no_room_for_leases(db):
    """INV-12: other people's work is never squeezed out."""
    record(db, used(4000, processes=(GpuProcess(1, 4000),)))
    assert not take(db, 5001)
    assert take(db, 5000)


# --- quarantine ---


def events(db, kind):
    return [entry for entry in rows(db, schema.audit) if entry.event_type == kind]


def test_a_quarantined_gpu_gives_nothing_until_it_is_cleared(db):
    """INV-16."""
    record(db, used(0), gpu(1))
    db.write(lambda conn: gpus.quarantine(conn, ["GPU-0"], "memory did not come back"))
    assert one(db).quarantine_reason == "memory did not come back"
    assert not take(db, 1)
    assert take(db, 1, uuid="GPU-1")
    record(db, used(0))
    assert not take(db, 1)  # however well it looks
    assert write_as("olga", db, lambda conn: gpus.clear(conn, "GPU-0")) is True
    assert (one(db).quarantined_at, one(db).quarantine_reason) == (None, None)
    assert take(db, 1)
    (cleared,) = events(db, "gpu.cleared")
    assert (cleared.actor, '"GPU-0"' in cleared.details) == ("olga", True)


def test_a_second_quarantine_keeps_the_first_reason_and_is_no_event(db):
    record(db, used(0))
    for reason in ("first", "second"):
        db.write(lambda conn, reason=reason: gpus.quarantine(conn, ["GPU-0"], reason))
    assert one(db).quarantine_reason == "first"
    assert len(events(db, "gpu.quarantined")) == 1


def test_a_long_reason_is_cut(db):
    record(db, used(0))
    db.write(lambda conn: gpus.quarantine(conn, ["GPU-0"], "x" * 300))
    assert one(db).quarantine_reason == "x" * 255


def test_clearing_what_is_not_quarantined_changes_nothing(db):
    record(db, used(0))
    assert db.write(lambda conn: gpus.clear(conn, "GPU-0")) is False
    assert events(db, "gpu.cleared") == []


def test_clearing_an_unknown_gpu_is_not_found(db):
    with pytest.raises(GpuNotFound):
        db.write(lambda conn: gpus.clear(conn, "GPU-404"))


def test_a_gpus_list_shows_what_closes_it(db):
    record(db, used(9500, health=Health.UNHEALTHY, health_reason="XID 63"))
    db.write(lambda conn: gpus.quarantine(conn, ["GPU-0"], "stuck"))
    (shown,) = db.read(lambda conn: gpus.list_gpus(conn, STALE_S))
    assert shown["gate_closed_at"] <= now(db) and shown["quarantined_at"] <= now(db)
    assert (shown["health_reason"], shown["quarantine_reason"], shown["fresh"]) == ("XID 63", "stuck", True)


def test_a_sample_that_waited_does_not_undo_what_a_neighbour_measured_later(db):
    record(db, used(3000))
    db.write(lambda conn: gpus.record(conn, "node-1", [used(0)], Gate(90), age_s=60.0))
    assert one(db).used_mb == 3000
    record(db, used(1000))
    assert one(db).used_mb == 1000
