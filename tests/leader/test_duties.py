"""Duties: the work of the dead goes to the living, and a second run changes nothing."""

import dataclasses
import time
from collections import Counter

import pytest
from sqlalchemy import update

from orchestrator.errors import DatabaseUnavailable, RedisUnavailable, StaleEpoch, UnknownDuty, WorkerLost
from orchestrator.jobs import ErrorKind
from orchestrator.leader import delivery, duties
from orchestrator.leader.context import DutyContext
from orchestrator.leader.term import borrow
from orchestrator.leases import LeaseRequest, Terms
from orchestrator.store import dead_letters, grants, leadership, nodes, registry, schema, tallies, withdraw
from orchestrator.store.clock import AHEAD_S
from orchestrator.store.database import RowsHeld
from orchestrator.store.dialect import utc_shift
from tests.factories import STALE_S, Hand, gpu, hire, history, now, row, rows, set_job, status, submit, traffic

KEY = "stream:orchestrator:inference_jobs"
DLQ = "stream:orchestrator:dlq"


def announced(raw):
    return [fields["job_id"] for _id, fields in raw.xrange(KEY)]


def deliver(hub, raw, hand, count=10, idle_s=3600):
    """Let a worker read, and age what it got: as if nobody had touched it since."""
    lane = hub.lane("default")
    entries = hub.reader(lane, hand.worker_id).read(count, 20)
    if entries:
        ids = [entry.entry_id for entry in entries]
        raw.xclaim(KEY, lane.group, hand.worker_id, 0, ids, idle=idle_s * 1000, justid=True)
    return [entry.job_id for entry in entries]


def snapshot(db, raw):
    return (
        [rows(db, table) for table in schema.metadata.sorted_tables],
        raw.xrange(KEY),
        raw.xrange(DLQ),
    )


@pytest.fixture
def scene(db, hub, raw, context, publisher):
    """Jobs announced, read and claimed by one worker."""

    def play(count=1, **fields):
        hand = hire(db, gpu())
        ids = submit(db, count, **fields)
        publisher.publish("default")
        assert deliver(hub, raw, hand) == ids
        return hand, hand.claim(*ids)

    return play


def test_entries_that_nobody_will_get_do_not_fill_the_window(db, hub, raw, context, publisher):
    """Their jobs are over, so no row asks for them; but the publisher would count them as unread for ever."""
    ids = submit(db, 40)
    publisher.publish("default")
    for job_id in ids:
        db.write(lambda conn, job_id=job_id: withdraw.cancel(conn, job_id))
    hub.lane("default").ensure_group()
    raw.xgroup_setid(KEY, "cg:inference", "$")
    delivery.repair(context)
    assert raw.xlen(KEY) == 0


def test_a_lane_that_somebody_trimmed_is_announced_again(db, hub, raw, context, publisher):
    """XTRIM takes unread entries and those that somebody has: what waits comes again, what runs ends, nothing twice."""
    hand, ids = hire(db), submit(db, 6)
    publisher.publish("default")
    running, read, unread = ids[:2], ids[2:4], ids[4:]
    assert deliver(hub, raw, hand, 4) == running + read
    claims = hand.claim(*running)
    raw.xtrim(KEY, maxlen=0, approximate=False)
    hand.finish(claims[0])
    delivery.reclaim(context)
    assert raw.xpending(KEY, "cg:inference")["pending"] == 0, "entries that are gone are nobody's"
    for job_id in read + unread:
        set_job(db, job_id, published_at=utc_shift(-60.0))
    assert delivery.repair(context) == 4
    delivery.publish(context)
    assert announced(raw) == deliver(hub, raw, hand) == read + unread
    hand.finish(claims[1], *hand.claim(*read, *unread))
    assert Counter(status(db, job_id) for job_id in ids) == {"done": 6}
    assert [history(db, job_id).count("job.claimed") for job_id in ids] == [1] * 6


# --- reclaim: jobs ---


def test_the_jobs_of_a_dead_worker_are_announced_again(db, raw, context, publisher, scene):
    hand, claims = scene(2, min_memory_mb=1000)
    hand.start(claims[0])
    hand.go_silent()
    assert delivery.reclaim(context) >= 2
    for claim in claims:
        job = row(db, claim.job_id)
        assert (job.status, job.queued, job.crashes, job.error_kind) == ("pending", "ready", 1, "worker_lost")
        assert history(db, claim.job_id)[-1] == "job.retry"
    assert [g.leased_mb for g in rows(db, schema.gpus)] == [2000]  # until they expire: nobody saw the processes end
    assert announced(raw) == []  # the old entries are gone …
    publisher.publish("default")
    assert sorted(announced(raw)) == sorted(claim.job_id for claim in claims)  # … and new ones there
    assert [worker.status for worker in rows(db, schema.workers)] == ["lost"]


def test_a_job_that_kills_its_workers_becomes_a_dead_letter_once(db, raw, context, publisher, hub):
    """INV-6."""
    (job_id,) = submit(db, max_attempts=50)
    hands = [hire(db), hire(db)]
    for hand in hands:
        publisher.publish("default")
        deliver(hub, raw, hand)
        hand.claim(job_id)
        hand.go_silent()
        delivery.reclaim(context)
    job = row(db, job_id)
    assert (job.status, job.crashes) == ("dead_letter", 2)
    for _ in range(2):
        delivery.reclaim(context)
        duties.tell_dead_letters(context)
    ((_id, letter),) = raw.xrange(DLQ)
    assert (letter["job_id"], letter["reason"], letter["attempts"]) == (job_id, "worker_lost", "2")
    assert hands[1].worker_id in letter["last_error"]
    assert announced(raw) == []


def test_a_live_workers_long_job_is_never_robbed(db, raw, context, scene):
    """celery#5935: three hours of work are not idleness; the owner's heartbeat decides."""
    hand, (claim,) = scene()
    hand.start(claim)
    hand.beat(busy=1)
    for _ in range(3):
        delivery.reclaim(context)
    assert (status(db, claim.job_id), row(db, claim.job_id).attempt) == ("running", 1)
    assert announced(raw) == [claim.job_id]
    hand.finish(claim)
    assert status(db, claim.job_id) == "done"


def test_a_worker_that_said_goodbye_but_owns_a_job_is_reclaimed_too(db, context, scene):
    hand, (claim,) = scene()
    db.write(lambda conn: nodes.deregister(conn, hand.worker))
    delivery.reclaim(context)
    assert status(db, claim.job_id) == "pending"


def test_a_leader_that_died_half_way_is_finished_by_the_next(db, context, scene):
    """F-2: declared lost, its jobs not yet taken."""
    hand, (claim,) = scene()
    hand.go_silent()
    db.write(lambda conn: nodes.declare_lost(conn, 1.0, 10))
    assert status(db, claim.job_id) == "claimed"
    delivery.reclaim(context)
    assert status(db, claim.job_id) == "pending"


def test_who_registered_anew_since_the_leader_looked_keeps_its_jobs(db, context, monkeypatch):
    worker = nodes.Worker("http-1", nodes.NO_NODE, "default", "host", 0, 4, ("echo",))
    db.write(lambda conn: registry.register(conn, worker))
    hand, (old, new) = Hand(db, worker), submit(db, 2)
    (claim,) = hand.claim(old)
    hand.go_silent()
    db.write(lambda conn: nodes.declare_lost(conn, 30.0, 10))
    looked = db.read(lambda conn: nodes.dead_owners(conn, 10))
    assert [owner.worker_id for owner in looked] == ["http-1"]
    hand.finish(claim)
    db.write(lambda conn: registry.register(conn, worker))
    hand.claim(new)
    monkeypatch.setattr(nodes, "dead_owners", lambda _conn, _limit: looked)
    delivery.reclaim(context)
    assert (status(db, new), row(db, new).crashes) == ("claimed", 0)


def test_a_duty_by_hand_under_a_young_leader_lets_workers_speak_first(db, hub, config, publisher, context, scene):
    hand, (claim,) = scene()
    hand.go_silent()
    by_hand = DutyContext(borrow(db, config, "operator"), hub, publisher, config)
    delivery.reclaim(by_hand)
    assert status(db, claim.job_id) == "claimed"
    began = update(schema.leadership).values(acquired_at=utc_shift(-config.worker_timeout_s - 1.0))
    db.write(lambda conn: conn.execute(began))
    by_hand = DutyContext(borrow(db, config, "operator"), hub, publisher, config)
    delivery.reclaim(by_hand)
    assert status(db, claim.job_id) == "pending"


def test_a_young_leader_lets_workers_speak_first(db, context, scene):
    """After an outage of the database nobody could send heartbeats: silence proves nothing yet."""
    hand, (claim,) = scene()
    hand.go_silent()
    young = dataclasses.replace(context.term, began=time.monotonic())
    delivery.reclaim(dataclasses.replace(context, term=young))
    assert status(db, claim.job_id) == "claimed"
    hand.beat()


def test_a_cancelled_job_of_a_dead_worker_is_cancelled(db, context, scene):
    hand, claims = scene(2)
    db.write(lambda conn: withdraw.cancel(conn, claims[0].job_id))
    hand.go_silent()
    delivery.reclaim(context)
    assert [status(db, claim.job_id) for claim in claims] == ["cancelled", "pending"]


def test_what_became_of_them_is_counted(db, context, scene):
    hand, claims = scene(3)
    set_job(db, claims[1].job_id, crashes=1)
    db.write(lambda conn: withdraw.cancel(conn, claims[2].job_id))
    hand.go_silent()
    for _ in range(2):
        delivery.reclaim(context)
        duties.tally(context)
    totals = db.read(tallies.totals)
    for outcome in ("retried", "buried", "cancelled"):
        assert totals["reclaims_total", "", outcome] == 1
    assert totals["retries_total", "", "worker_lost"] == 1


HOUR = 3600.0
#: Stamps that decide something, and by how much each is ahead when it is written.
STAMPS = {
    schema.workers.c.last_heartbeat: 0.0,
    schema.nodes.c.last_heartbeat: 0.0,
    schema.nodes.c.supervisor_seen_at: 0.0,
    schema.gpus.c.sampled_at: 0.0,
    schema.gpus.c.gate_closed_at: 0.0,
    schema.leases.c.expires_at: schema.leases.c.ttl_seconds,
    schema.jobs.c.published_at: 0.0,
}


def stamp(db, ahead_s):
    """As if all had been written just now, and then the clock set back by so much."""
    for column, lead_s in STAMPS.items():
        moved = update(column.table).values({column: utc_shift(lead_s + ahead_s)})
        db.write(lambda conn, moved=moved: conn.execute(moved))


def hours_ahead(db):
    here = now(db)
    found = {str(column): getattr(one, column.name) for column in STAMPS for one in rows(db, column.table)}
    return {name: round((moment - here).total_seconds() / HOUR) for name, moment in found.items()}


def test_stamps_of_a_clock_that_was_set_back_count_as_of_now(db, context, scene):
    """F-31: else a dead worker would count as alive, its GPU as measured and its lease as renewed for an hour."""
    hand, (claim,) = scene(min_memory_mb=1000)
    stamp(db, HOUR)
    assert set(hours_ahead(db).values()) == {1}
    delivery.reclaim(context)
    assert hours_ahead(db) == {str(column): int(column is schema.jobs.c.published_at) for column in STAMPS}
    assert status(db, claim.job_id) == "claimed"  # it may live: it has as long to say so as ever
    hand.go_silent()
    delivery.reclaim(context)
    assert status(db, claim.job_id) == "pending"


def test_a_stamp_that_is_a_little_ahead_is_left_alone(context, scene, db):
    scene(min_memory_mb=1000)
    for ahead_s, wrong in ((AHEAD_S - 30.0, False), (AHEAD_S + 30.0, True)):
        stamp(db, ahead_s)
        assert context.term.finds(delivery._AHEAD) is wrong


def test_what_is_lost_is_announced_again_although_the_clock_was_set_back(db, hub, raw, context, publisher):
    """F-31."""
    hand, ids = hire(db), submit(db, 3)
    publisher.publish("default")
    deliver(hub, raw, hand, 1)  # who read it dies
    raw.xdel(KEY, raw.xrange(KEY)[-1][0])
    stamp(db, HOUR)
    assert [delivery.reclaim(context), delivery.repair(context), delivery.publish(context)] == [1, 1, 2]
    assert sorted(announced(raw)) == sorted(ids)


# --- reclaim: entries ---


def test_an_entry_read_but_never_claimed_is_announced_again(db, hub, raw, context, publisher):
    hand, ids = hire(db), submit(db, 2)
    publisher.publish("default")
    old = [entry_id for entry_id, _ in raw.xrange(KEY)]
    deliver(hub, raw, hand)
    assert delivery.reclaim(context) == 2
    assert [row(db, job_id).queued for job_id in ids] == ["ready", "ready"]
    publisher.publish("default")
    assert announced(raw) == ids
    assert not {entry_id for entry_id, _ in raw.xrange(KEY)} & set(old)
    assert hand.claim(*ids)[0].attempt == 1


def acked_behind_the_leader(hub, monkeypatch):
    """Whoever read the entries acknowledges them when the leader has just taken them over: XACK asks for no owner."""
    lane = hub.lane("default")
    take_idle = lane.take_idle

    def taken_and_acked(*given):
        idle = take_idle(*given)
        assert idle.entries
        lane.ack([entry.entry_id for entry in idle.entries])
        return idle

    monkeypatch.setattr(lane, "take_idle", taken_and_acked)


@pytest.mark.parametrize("claimed", [True, False])
def test_a_late_acknowledgement_of_what_the_leader_took_over_loses_no_job(
    db, hub, raw, context, publisher, monkeypatch, claimed
):
    """Its worker was thought dead, before its claim or after: the job runs once more, and only that counts."""
    slow, (job_id,) = hire(db), submit(db)
    publisher.publish("default")
    deliver(hub, raw, slow)
    claims = slow.claim(job_id) if claimed else []
    slow.go_silent()
    with monkeypatch.context() as patched:
        acked_behind_the_leader(hub, patched)
        delivery.reclaim(context)
    assert (raw.xlen(KEY), raw.xpending(KEY, "cg:inference")["pending"]) == (0, 0)
    publisher.publish("default")
    other = hire(db)
    assert deliver(hub, raw, other) == [job_id]
    (claim,) = other.claim(job_id)
    for late in claims:
        slow.finish(late)
    assert status(db, job_id) == "claimed"
    other.finish(claim)
    assert history(db, job_id).count("job.done") == 1
    assert (status(db, job_id), claim.attempt) == ("done", 1 + claimed)


def test_a_late_acknowledgement_behind_a_leader_that_died_loses_no_job(db, hub, raw, context, publisher):
    """It took the entry over and did nothing more: now neither the stream nor anybody has the job."""
    slow, (job_id,) = hire(db), submit(db)
    publisher.publish("default")
    deliver(hub, raw, slow)
    lane = hub.lane("default")
    (entry,) = lane.take_idle(1, "0-0", 1000, 10).entries
    lane.ack([entry.entry_id])
    assert raw.xlen(KEY) == 0
    set_job(db, job_id, published_at=utc_shift(-60.0))
    assert [delivery.reclaim(context), delivery.repair(context), delivery.publish(context)] == [0, 1, 1]
    assert announced(raw) == [job_id]


def test_an_entry_just_read_is_left_alone(db, hub, raw, context, publisher):
    hand, ids = hire(db), submit(db, 2)
    publisher.publish("default")
    deliver(hub, raw, hand, idle_s=0)
    assert delivery.reclaim(context) == 0
    assert announced(raw) == ids


def test_the_entry_of_a_job_that_is_over_is_removed(db, raw, context, scene):
    """F-1: killed after the commit, before the acknowledgement."""
    hand, (claim,) = scene()
    hand.finish(claim)
    assert delivery.reclaim(context) == 1
    assert announced(raw) == []
    assert status(db, claim.job_id) == "done"


def test_garbage_and_unknown_jobs_are_removed(db, hub, raw, context):
    submit(db)  # the lane is known
    raw.xadd(KEY, {"hello": "world"})
    raw.xadd(KEY, {"job_id": "nobody"})
    deliver(hub, raw, hire(db))
    assert delivery.reclaim(context) == 2
    assert announced(raw) == []
    # Whoever read them did not live to tell.
    letters = [(letter["job_id"], letter["reason"]) for _id, letter in raw.xrange(DLQ)]
    assert letters == [("", "malformed"), ("nobody", "unknown_job")]


def test_an_unknown_job_is_told_before_its_entry_goes_unless_nobody_takes_letters(db, hub, raw, context, monkeypatch):
    submit(db)
    raw.xadd(KEY, {"job_id": "nobody"})
    deliver(hub, raw, hire(db))
    with monkeypatch.context() as patched:
        away = RedisUnavailable("no answer")
        patched.setattr(hub.dead_letters, "tell", lambda _letters: (_ for _ in ()).throw(away))
        with pytest.raises(RedisUnavailable):
            delivery.reclaim(context)
    ((entry_id, _fields),) = raw.xrange(KEY)
    raw.xclaim(KEY, "cg:inference", "leader", 0, [entry_id], idle=3_600_000, justid=True)
    raw.set(DLQ, "somebody's")
    assert delivery.reclaim(context) == 1
    assert announced(raw) == []


def test_entries_of_known_jobs_make_no_letters(db, raw, context, scene):
    hand, claims = scene(2)
    hand.finish(claims[0])
    assert delivery.reclaim(context) == 1
    assert raw.xlen(DLQ) == 0


def test_the_walk_goes_on_where_it_stopped(db, hub, raw, context, monkeypatch):
    """A step looks at ten times BATCH entries: beginning anew each time, it would never get past busy ones."""
    monkeypatch.setattr(delivery, "BATCH", 1)
    hand, ids, lane = hire(db), submit(db, 18), hub.lane("default")
    context.publisher.publish("default")
    entries = hub.reader(lane, hand.worker_id).read(100, 20)
    hand.claim(*ids[:12])
    forgotten = [entry.entry_id for entry in entries[12:]]
    raw.xclaim(KEY, lane.group, hand.worker_id, 0, forgotten, idle=3_600_000, justid=True)
    for _ in range(20):
        delivery._reclaim_entries(context, lane)
    assert announced(raw) == ids[:12]
    assert {row(db, job_id).queued for job_id in ids[12:]} == {"ready"}


# --- consumers ---


def test_consumers_of_workers_that_are_gone_are_forgotten(db, hub, raw, context, monkeypatch):
    monkeypatch.setattr(delivery, "CONSUMER_IDLE_MS", 0)
    lane = hub.lane("default")
    alive, gone, owing = hire(db), hire(db), hire(db)
    submit(db)
    lane.ensure_group()
    for hand in (alive, gone):
        hub.reader(lane, hand.worker_id).read(1, 20)
    raw.xadd(KEY, {"job_id": "x"})
    hub.reader(lane, owing.worker_id).read(1, 20)
    for hand in (gone, owing):
        db.write(lambda conn, hand=hand: nodes.deregister(conn, hand.worker))
    delivery.reclaim(context)
    names = {consumer["name"] for consumer in raw.xinfo_consumers(KEY, lane.group)}
    assert names - {"leader"} == {alive.worker_id, owing.worker_id}
    assert raw.xpending(KEY, lane.group)["pending"] == 1


def test_names_that_are_not_ours_hold_nothing_up(db, hub, raw, context, publisher, monkeypatch):
    """A consumer and a group that somebody made, of bytes that are no text."""
    monkeypatch.setattr(delivery, "CONSUMER_IDLE_MS", 0)
    lane, (job_id,) = hub.lane("default"), submit(db)
    lane.ensure_group()
    for name in (b"\xff\xfe", b"a name\x00", b"x" * 1000):
        raw.execute_command("XGROUP", "CREATECONSUMER", KEY, lane.group, name)
    raw.execute_command("XGROUP", "CREATE", KEY, b"\xff", "0")
    gone = hire(db)
    hub.reader(lane, gone.worker_id).read(1, 20)
    db.write(lambda conn: nodes.deregister(conn, gone.worker))
    publisher.publish("default")
    delivery.reclaim(context)
    assert lane.idle_consumers(0) in ([], ["leader"])
    raw.xtrim(KEY, maxlen=0, approximate=False)
    set_job(db, job_id, published_at=utc_shift(-60.0))
    assert delivery.repair(context) == 1


# --- publish, purge ---


def test_publish_promotes_what_is_due_in_every_lane(db, raw, context):
    due, later = submit(db, 2)
    (other,) = submit(db, pool_id="other")
    set_job(db, due, queued="delayed", not_before=utc_shift(-1.0))
    set_job(db, later, queued="delayed", not_before=utc_shift(60.0))
    assert delivery.publish(context) >= 2
    assert announced(raw) == [due]
    assert [f["job_id"] for _, f in raw.xrange(f"{KEY}:other")] == [other]


def test_a_retry_runs_again_after_its_wait(db, raw, context, scene):
    hand, (claim,) = scene()
    hand.fail(claim, ErrorKind.TRANSIENT, retry_after_s=3600.0)
    delivery.reclaim(context)
    delivery.publish(context)
    assert announced(raw) == []
    set_job(db, claim.job_id, not_before=utc_shift(-0.1))
    delivery.publish(context)
    assert announced(raw) == [claim.job_id]
    assert hand.claim(claim.job_id)[0].attempt == 2


def test_expired_leases_are_purged(db, context):
    hire(db, gpu())
    wish = LeaseRequest("agent", 1000, 60.0)
    db.write(lambda conn: grants.grant(conn, [wish], Terms(STALE_S)))
    assert duties.purge_leases(context) == 0
    db.write(lambda conn: conn.execute(update(schema.leases).values(expires_at=utc_shift(-1.0))))
    assert [duties.purge_leases(context), duties.purge_leases(context)] == [1, 0]
    assert [g.leased_mb for g in rows(db, schema.gpus)] == [0]
    # A client's token answers for a day.
    for ended_s, kept in ((3600.0, 1), (duties.KEEP_ENDED_LEASES_S + 1, 0)):
        db.write(lambda conn, ago=ended_s: conn.execute(update(schema.leases).values(expires_at=utc_shift(-ago))))
        duties.purge_leases(context)
        assert len(rows(db, schema.leases)) == kept


def test_workers_are_forgotten_days_after_their_end(db, context, monkeypatch):
    monkeypatch.setattr(duties, "BATCH", 2)
    long_ago = duties.KEEP_ENDED_WORKERS_S + 60.0
    lost = [hire(db) for _ in range(3)]
    late = hire(db)  # nobody has declared it lost yet
    for hand in [*lost, late]:
        hand.go_silent(long_ago)
    db.write(lambda conn: conn.execute(update(schema.workers).values(status="lost")))
    db.write(lambda conn: conn.execute(update(schema.workers).where(_is(late)).values(status="active")))
    alive, left, holder = hire(db), hire(db), hire(db, gpu())
    holder.claim(*submit(db, min_memory_mb=100))
    for hand, silent_s in ((left, long_ago - 120.0), (holder, long_ago)):
        hand.go_silent(silent_s)
        db.write(lambda conn, hand=hand: conn.execute(update(schema.workers).where(_is(hand)).values(status="stopped")))
    assert [duties.forget_workers(context) for _ in range(3)] == [2, 1, 0]
    assert {row.worker_id for row in rows(db, schema.workers)} == {h.worker_id for h in (late, alive, left, holder)}
    with pytest.raises(WorkerLost):
        lost[0].beat()


def _is(hand):
    return schema.workers.c.worker_id == hand.worker_id


# --- deadlines ---


def test_jobs_whose_deadline_passed_are_ended(db, raw, context, publisher):
    late, fresh = submit(db, 2)
    set_job(db, late, expires_at=utc_shift(-1.0))
    publisher.publish("default")
    assert [duties.expire(context), duties.expire(context)] == [1, 0]
    assert (status(db, late), row(db, late).error_kind) == ("failed", "deadline_exceeded")
    assert status(db, fresh) == "pending"


# --- dead letters ---


def buried(db, count=1):
    hand = hire(db)
    claims = hand.claim(*submit(db, count, max_attempts=1))
    for claim in claims:
        hand.fail(claim, origin_id="9-1", error="x" * 3000)
    return [claim.job_id for claim in claims]


def told(raw):
    return [fields["job_id"] for _id, fields in raw.xrange(DLQ)]


def test_the_stream_is_told_of_every_dead_letter_once(db, raw, context):
    ids = buried(db, 3)
    assert [duties.tell_dead_letters(context) for _ in range(2)] == [3, 0]
    assert sorted(told(raw)) == sorted(ids)
    entries = {fields["job_id"]: entry_id for entry_id, fields in raw.xrange(DLQ)}
    assert {letter.job_id: letter.entry_id for letter in rows(db, schema.dead_letters)} == entries
    _, fields = raw.xrange(DLQ)[0]
    said = {"origin_id": "9-1", "attempts": "1", "reason": "transient", "last_error": "x" * 1000}
    assert fields.items() >= said.items()


def test_a_crash_after_telling_tells_twice_and_never_not_at_all(db, raw, context, monkeypatch):
    """F-2: between the stream and the database."""
    (job_id,) = buried(db)

    def crash(*_args):
        raise RuntimeError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(dead_letters, "told", crash)
        with pytest.raises(RuntimeError):
            duties.tell_dead_letters(context)
    assert told(raw) == [job_id]
    assert [duties.tell_dead_letters(context) for _ in range(2)] == [1, 0]
    assert told(raw) == [job_id, job_id]


def test_without_redis_the_letter_waits(db, hub, raw, context, monkeypatch):
    (job_id,) = buried(db)

    def away(_epoch, _letters):
        raise RedisUnavailable("away")

    with monkeypatch.context() as patched:
        patched.setattr(hub.dead_letters, "tell_as_leader", away)
        with pytest.raises(RedisUnavailable):
            duties.tell_dead_letters(context)
    assert duties.tell_dead_letters(context) == 1
    assert told(raw) == [job_id]


def test_a_letter_that_left_is_taken_out_of_the_stream(db, hub, raw, context):
    ids = buried(db, 2)
    duties.tell_dead_letters(context)
    removed = db.write(lambda conn: dead_letters.redrive(conn, ids[:1], 3, lambda _n: 0.0))
    hub.dead_letters.take_back(removed.entry_ids)
    hub.dead_letters.take_back([])
    assert told(raw) == ids[1:]


# --- lanes ---


@pytest.mark.parametrize("broken", ["alpha", "middle", "omega"])
def test_a_broken_lane_does_not_hold_up_the_others(db, hub, raw, context, monkeypatch, broken):
    jobs = {lane: submit(db, pool_id=lane) for lane in ("alpha", "middle", "omega")}

    def away(_ready):
        raise RedisUnavailable("its node of the cluster is away")

    with monkeypatch.context() as patched:
        patched.setattr(hub.lane(broken), "announce", away)
        with pytest.raises(RedisUnavailable):
            delivery.publish(context)
    for lane, ids in jobs.items():
        assert [fields["job_id"] for _id, fields in raw.xrange(f"{KEY}:{lane}")] == ([] if lane == broken else ids)
    set_job(db, *jobs[broken], published_at=utc_shift(-60.0))
    assert delivery.repair(context) == 1
    assert delivery.publish(context) == 1
    assert [fields["job_id"] for _id, fields in raw.xrange(f"{KEY}:{broken}")] == jobs[broken]


LANES = ("a", "b", "c", "d")


def test_every_lane_is_tried_and_the_first_failure_reported():
    tried = []

    def work(lane):
        tried.append(lane)
        if lane in {"b", "c"}:
            raise RedisUnavailable(f"lane {lane}", answered=True)
        return 2

    with pytest.raises(RedisUnavailable, match=r"lane [bc]") as reported:
        delivery.in_lanes(LANES, work)
    assert sorted(tried) == ["a", "b", "c", "d"]
    assert str(reported.value) == f"lane {next(lane for lane in tried if lane in {'b', 'c'})}"
    assert delivery.in_lanes(LANES, lambda _lane: 2) == 8


@pytest.mark.parametrize("error", [RedisUnavailable("timed out"), RowsHeld("somebody holds a row")])
def test_what_is_waited_for_in_vain_is_not_asked_for_each_lane_and_none_is_always_the_last(error):
    seen: set[str] = set()

    def work(lane):
        tried.append(lane)
        raise error

    while seen != {"a", "b", "c", "d"}:
        tried: list[str] = []
        with pytest.raises(type(error)):
            delivery.in_lanes(LANES, work)
        assert len(tried) == 2
        seen |= set(tried)


@pytest.mark.parametrize("error", [ValueError, DatabaseUnavailable, WorkerLost])
def test_a_lane_that_fails_as_nobody_expected_does_not_hold_up_the_others(error):
    tried = []

    def work(lane):
        tried.append(lane)
        if lane == "b":
            raise error("of one lane")
        return 2

    with pytest.raises(error) as reported:
        delivery.in_lanes(["a", "b", "c", "d"], work)
    assert sorted(tried) == ["a", "b", "c", "d"]
    assert reported.value.__notes__ == ["lane b"]


def test_what_time_does_not_mend_is_reported_first():
    failures = iter([RedisUnavailable("refused", answered=True), ValueError("a bug")])

    def work(_lane):
        raise next(failures)

    with pytest.raises(ValueError, match="a bug"):
        delivery.in_lanes(["a", "b"], work)


def test_a_lane_whose_key_became_another_is_mended_by_whoever_looks(db, hub, raw, context, publisher):
    """All its jobs are announced or run: no publisher looks there."""
    hand, ids = hire(db), submit(db, 3)
    publisher.publish("default")
    deliver(hub, raw, hand, 1)
    hand.claim(ids[0])
    raw.set(KEY, "somebody's")
    assert delivery.reclaim(context) == 0
    assert raw.type(KEY) == "none"
    raw.set(KEY, "somebody's")
    for job_id in ids[1:]:
        set_job(db, job_id, published_at=utc_shift(-60.0))
    assert [delivery.repair(context), delivery.publish(context)] == [2, 2]
    assert announced(raw) == ids[1:]
    assert [raw.get(kept) for kept in raw.keys("*:aside:*")] == ["somebody's"] * 2


def test_a_stale_leader_stops_at_the_first_lane_that_says_so():
    """Another error than Redis being away concerns every lane."""
    tried = []

    def work(lane):
        tried.append(lane)
        raise StaleEpoch(1)

    with pytest.raises(StaleEpoch):
        delivery.in_lanes(LANES, work)
    assert len(tried) == 1


# --- what idling costs ---


IDLE = ("publish", "reclaim", "time_limits", "caps", "purge_leases", "expire", "gates", "dead_letters", "workflows")


@pytest.mark.parametrize("name", IDLE)
def test_with_nothing_to_do_no_transaction_begins(db, context, name):
    (later,) = submit(db)
    set_job(db, later, queued="delayed", not_before=utc_shift(60.0), expires_at=utc_shift(60.0))
    with traffic(db) as seen:
        assert duties.find(name).run(context) == 0
    assert seen.statements == []


@pytest.mark.parametrize("name", ["publish", "reclaim", "repair"])
def test_idle_lanes_cost_no_transaction_each(db, hub, context, name):
    for number in range(20):
        submit(db, pool_id=f"pool-{number}")
    db.write(lambda conn: conn.execute(update(schema.jobs).values(status="done", queued=None)))
    with traffic(db) as seen:
        duties.find(name).run(context)
    assert seen.commits <= 3, seen.statements


# --- all of them ---


def mess(db, hub, raw, publisher):
    """One of everything that a duty looks for."""
    dead, reader = hire(db, gpu()), hire(db, gpu())
    ids = submit(db, 6, min_memory_mb=100)
    publisher.publish("default")
    deliver(hub, raw, dead, 2)
    dead.claim(*ids[:2])
    dead.go_silent()
    deliver(hub, raw, reader, 2)
    raw.xdel(KEY, raw.xrange(KEY)[-1][0])
    for job_id in ids[4:]:
        set_job(db, job_id, published_at=utc_shift(-60.0))
    (due,) = submit(db)
    set_job(db, due, queued="delayed", not_before=utc_shift(-1.0))
    db.write(lambda conn: grants.grant(conn, [LeaseRequest("agent", 10, 60.0)], Terms(STALE_S)))
    over = update(schema.leases).where(schema.leases.c.agent_name == "agent").values(expires_at=utc_shift(-1.0))
    db.write(lambda conn: conn.execute(over))
    (late,) = submit(db, pool_id="late")
    set_job(db, late, expires_at=utc_shift(-1.0))
    buried(db)


def test_a_second_run_of_every_duty_changes_nothing(db, hub, raw, context, publisher):
    """INV-23."""
    mess(db, hub, raw, publisher)
    for duty in duties.DUTIES * 2:
        duty.run(context)
    before = snapshot(db, raw)
    assert [duty.run(context) for duty in duties.DUTIES] == [0] * len(duties.DUTIES)
    assert snapshot(db, raw) == before
    assert Counter(job.status for job in rows(db, schema.jobs)) == {"pending": 7, "failed": 1, "dead_letter": 1}
    assert len(announced(raw)) == len(set(announced(raw))) == 7
    assert len(told(raw)) == 1


@pytest.mark.parametrize("name", [duty.name for duty in duties.DUTIES])
def test_a_leader_that_was_replaced_writes_nothing_more(db, hub, raw, context, name):
    mess(db, hub, raw, context.publisher)
    lock = context.settings.leader_lock
    db.write(lambda conn: leadership.take(conn, lock, "successor", 60.0, lock_held=True))
    before = snapshot(db, raw)
    with pytest.raises(StaleEpoch):
        duties.find(name).run(context)
    assert snapshot(db, raw) == before


def test_an_unknown_duty_is_refused_with_those_there_are():
    with pytest.raises(UnknownDuty, match=", ".join(duty.name for duty in duties.DUTIES)):
        duties.find("world_peace")
