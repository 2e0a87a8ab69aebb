"""What a leader does: a table of duties. Each is a function of the context that returns how much it did.

A duty is idempotent, does a bounded amount per call, and writes to the database only through its term (announcing
jobs is the publisher's, which needs none). When it returns a full batch it is called again at once. Those that come
often ask first whether there is anything to do, by one statement that begins no transaction (`Term.finds`).
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from orchestrator.dead_letters import about_entry
from orchestrator.errors import RedisUnavailable, StaleEpoch, Unavailable, UnknownDuty
from orchestrator.jobs import DUE, OWNED, Queued, RetryPolicy, Status
from orchestrator.leader import retention
from orchestrator.leader.apart import Apart
from orchestrator.leader.autosize import Autosize
from orchestrator.leader.reconcile import reconcile_pools
from orchestrator.leader.recurring import INTERVAL_S as SCHEDULES_INTERVAL_S
from orchestrator.leader.recurring import fire_schedules
from orchestrator.leader.replicas import Replicas
from orchestrator.leader.retention import Places
from orchestrator.leader.term import Term
from orchestrator.leader.workflows import Walks, tend
from orchestrator.publisher import Publisher
from orchestrator.settings import Settings
from orchestrator.store import (
    caps,
    clock,
    dead_letters,
    gatekeeper,
    gates,
    lanes,
    leadership,
    lease_purge,
    nodes,
    outbox,
    ownership,
    reports,
    tallies,
    withdraw,
)
from orchestrator.store.admission import Admission
from orchestrator.store.database import RowsHeld
from orchestrator.store.job_reads import statuses
from orchestrator.store.moves import Claimant
from orchestrator.store.nodes import DeadOwner
from orchestrator.store.policies import Copy
from orchestrator.store.reports import Overrun
from orchestrator.store.settle import End, Settled, record, take_from_dead
from orchestrator.stream.hub import Hub
from orchestrator.stream.lane import Entry, Lane
from orchestrator.telemetry import life, metrics, tracing

if TYPE_CHECKING:
    from sqlalchemy import Connection

log = logging.getLogger(__name__)

#: Rows one transaction of a duty may touch.
BATCH = 500
#: Seconds for which an ended lease still answers "ended" instead of "unknown".
KEEP_ENDED_LEASES_S = 86_400.0
#: Seconds for which workers that ended are remembered: their load times, and whose processes those on a GPU were. What
#: looks at pools reads them all.
KEEP_ENDED_WORKERS_S = 3 * 86_400.0
FORGET_INTERVAL_S = 60.0
#: Seconds for which totals of jobs may be behind what happened.
TALLY_INTERVAL_S = 1.0
#: Lanes that may run into a timeout before a duty leaves the rest for later.
MAX_WAITS = 2
#: Milliseconds after which an idle consumer of a worker that is gone is removed from its group.
CONSUMER_IDLE_MS = 60_000

# What duties look for. They ask before they begin a transaction: most of the time there is nothing to do.
_DUE = leadership.question(outbox.DELAYED_AND_DUE)
_SILENT = leadership.question(nodes.SILENT)
_AHEAD = leadership.question(*clock.AHEAD)
_OF_HTTP_WORKERS = leadership.question(reports.HELD)
_CAPS = leadership.question(*caps.CONCERNED)
_LEASES = leadership.question(lease_purge.DUE, lease_purge.SPENT, lease_purge.ENDED_LONG_AGO)
_OVERDUE = leadership.question(withdraw.OVERDUE)
_GATES = leadership.question(*gatekeeper.CONCERNED)
_UNTOLD = leadership.question(dead_letters.UNTOLD)


@dataclass
class DutyContext:
    """What a duty works with. `cursors` remembers, per lane, how far the walk over idle entries has come."""

    term: Term
    hub: Hub
    publisher: Publisher
    settings: Settings
    cursors: dict[str, str] = field(default_factory=dict)
    #: The last lane that a duty looked at.
    looked_at: dict[str, str] = field(default_factory=dict)
    policies: Copy = field(default_factory=Copy)
    #: What the last look at those who wait for caps saw last.
    waited_for: str = ""
    walk: gatekeeper.Walk = field(default_factory=gatekeeper.Walk)
    unfinished: Walks = field(default_factory=dict)
    retained: Places = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.apart = Apart(self.term)
        self.replicas = Replicas(self.settings)
        self.autosize = Autosize(self.settings)
        self.admission = Admission(self.policies)

    @property
    def retry_policy(self) -> RetryPolicy:
        return RetryPolicy.of(self.settings)

    def lanes(self, duty: str, *queued: Queued) -> set[str]:
        """Of the next lanes that this duty has not looked at for longest, those in which a job waits like that."""
        after = self.looked_at.get(duty, "")
        found, self.looked_at[duty] = self.term.db.read(lambda conn: lanes.some(conn, after, *queued))
        return set(found)


def publish(context: DutyContext) -> int:
    """Make due jobs ready and fill the window of every lane that has any: the backstop of the nudges."""
    promoted = 0
    if context.term.finds(_DUE):
        promoted = context.term.write(lambda conn: outbox.promote_due(conn, BATCH, context.policies.book(conn)))
    served = context.term.db.read(lambda conn: lanes.served(conn, Queued.READY))
    return promoted + _in_lanes({*served, *context.lanes("publish", Queued.READY)}, context.publisher.publish)


def repair(context: DutyContext) -> int:
    """Announce again what the database believes published and the stream does not have."""
    return _in_lanes(_tended(context, "repair"), lambda lane: _repair_lane(context, lane))


def _tended(context: DutyContext, duty: str) -> set[str]:
    """Lanes whose streams are worth a look: somebody reads them, or a job may stand there.

    What is left in others is in nobody's way, and goes when somebody serves them, or when they are forgotten.
    """
    return {*context.term.db.read(lanes.served), *context.lanes(duty, *DUE)}


def _in_lanes(names: Collection[str], work: Callable[[str], int]) -> int:
    """Do it in all of them, then report the first that failed: a broken lane must not hold up the others.

    A server that does not answer is not asked for each of a thousand lanes, nor is a row waited for in each: other
    duties wait meanwhile. So none of them is always the last. What nobody expected is reported before what time mends.
    """
    did = waits = 0
    failures: list[Exception] = []
    for lane in random.sample(sorted(names), len(names)):
        try:
            did += work(lane)
        except StaleEpoch:
            raise
        except Exception as broken:  # noqa: BLE001 - reported below
            broken.add_note(f"lane {lane}")
            failures.append(broken)
            waits += isinstance(broken, Unavailable) and not getattr(broken, "answered", False)
            if waits >= MAX_WAITS:
                break
    if failures:
        raise min(failures, key=lambda failure: isinstance(failure, Unavailable))
    return did


def _repair_lane(context: DutyContext, lane: str) -> int:
    after_s = context.settings.republish_after_s
    announced = context.term.db.read(lambda conn: outbox.announced(conn, lane, after_s, BATCH))
    # Without rows to compare there may still be entries that nobody will get: they fill the window.
    if not announced and not context.hub.lane(lane).length():
        return 0
    # The entries are read after the rows: what was announced in between is seen, what was claimed is guarded.
    survey = context.hub.lane(lane).survey(limit=4 * context.settings.lane_window_max)
    context.hub.lane(lane).ack_as_leader(context.term.epoch, survey.skipped)
    missing = [job_id for job_id in announced if job_id not in survey.coming]
    return context.term.write(lambda conn: outbox.unpublish_unheld(conn, missing, after_s)) if missing else 0


def purge_leases(context: DutyContext) -> int:
    """End leases whose holder stopped renewing them, and forget those that ended long ago."""
    if not context.term.finds(_LEASES, ended_since_s=-KEEP_ENDED_LEASES_S):
        return 0
    ended = context.apart.write(partial(lease_purge.purge, limit=BATCH, stale_s=context.settings.gpu_stale_s))
    forgotten = context.apart.write(partial(lease_purge.forget, keep_s=KEEP_ENDED_LEASES_S, limit=BATCH))
    return max(ended, forgotten)


def forget_old(context: DutyContext) -> int:
    """Delete results, jobs, workflows and rows of the audit that were kept as long as they should be; unused lanes."""
    old = retention.forget_old(context.term, context.settings, context.retained)
    after = context.looked_at.get("retention", "")
    unused, context.looked_at["retention"] = retention.forget_lanes(context.term, context.hub, after)
    return max(old, BATCH if context.looked_at["retention"] else unused)


def forget_workers(context: DutyContext) -> int:
    """Forget workers that ended days ago: every start of a supervisor makes new ones."""
    return context.term.write(lambda conn: nodes.forget(conn, KEEP_ENDED_WORKERS_S, BATCH))


def reclaim(context: DutyContext) -> int:
    """Give the work of the dead to the living: jobs of lost workers, then entries nobody will finish."""
    rescued = _reclaim_jobs(context)
    tended = _tended(context, "reclaim")
    return rescued + _in_lanes(tended, lambda lane: _reclaim_entries(context, context.hub.lane(lane)))


def _reclaim_jobs(context: DutyContext) -> int:
    if context.term.finds(_AHEAD):
        log.warning("the clock was set back", extra={"rows": context.term.write(clock.set_right)})
    timeout = context.settings.worker_timeout_s
    # A young term may follow an outage of the database, in which nobody could send heartbeats: let them first.
    if context.term.age_s > timeout and context.term.finds(_SILENT, silent_since_s=-timeout):
        for lost in context.term.write(lambda conn: nodes.declare_lost(conn, timeout, BATCH)):
            about = {"worker_id": lost.worker_id, "pool_id": lost.pool_id, "node_id": lost.node_id}
            log.warning("worker lost", extra=about)
    rescued = waits = 0
    dead = context.term.db.read(lambda conn: nodes.dead_owners(conn, BATCH))
    for owner in random.sample(dead, len(dead)):
        try:
            rescued += _rescue(context, owner)
        except RowsHeld as held:  # of a cap, of a workflow; the jobs of the other dead do not wait for it
            log.warning("somebody holds a row", extra={"worker_id": owner.worker_id, "error": str(held)})
            waits += 1
            if waits >= MAX_WAITS:
                break
    return rescued


def _rescue(context: DutyContext, owner: DeadOwner) -> int:
    dead = Claimant(owner.worker_id or "", owner.node_id, owner.pool_id)
    settled = context.term.write(partial(take_from_dead, dead=dead, policy=context.retry_policy, limit=BATCH))
    life.settled(settled, worker_id=dead.worker_id, pool_id=dead.pool_id)
    if settled:
        metrics.recovered(owner.silent_s)
    if spans := tracing.spans():  # nobody else speaks for them; when they began, nobody knows
        spans.died([one.end for one in settled if one.arrow], owner.silent_s, dead.worker_id, dead.pool_id)
    return len(settled)


def _reclaim_entries(context: DutyContext, lane: Lane) -> int:
    """Decide about idle entries by the rows behind them, never by their age alone.

    An entry whose job is owned by a living worker stays. One whose job still waits was read by somebody who died
    before claiming it: the job is announced anew. One whose job is over goes.
    """
    cursor = context.cursors.get(lane.name, "0-0")
    idle = lane.take_idle(context.term.epoch, cursor, context.settings.claim_idle_ms, BATCH)
    if idle.cursor == "0-0":
        context.cursors.pop(lane.name, None)
    else:
        context.cursors[lane.name] = idle.cursor
    if idle.deleted:  # `repair` finds the jobs that waited behind them
        log.warning("entries vanished from the stream", extra={"pool_id": lane.name, "entries": len(idle.deleted)})
    ids = [entry.job_id for entry in idle.entries if entry.job_id]
    status = context.term.db.read(lambda conn: statuses(conn, ids)) if ids else {}
    waiting = [job_id for job_id in ids if status.get(job_id) is Status.PENDING]
    if waiting:
        context.term.write(lambda conn: outbox.unpublish_unheld(conn, waiting))
    _tell_of_strangers(context, [entry for entry in idle.entries if entry.job_id not in status])
    drop = [entry.entry_id for entry in idle.entries if status.get(entry.job_id or "") not in OWNED]
    lane.ack_as_leader(context.term.epoch, drop)
    _forget_consumers(context, lane)
    return len(drop)


def _tell_of_strangers(context: DutyContext, entries: Sequence[Entry]) -> None:
    """Before they are acknowledged: whoever read them did not live to tell. No letter is worth an entry for ever."""
    try:
        context.hub.dead_letters.tell([about_entry(entry.entry_id, entry.job_id) for entry in entries])
    except RedisUnavailable as refused:
        if not refused.answered:
            raise
        log.warning("dead letters refused", extra={"entries": len(entries), "error": str(refused)})


def _forget_consumers(context: DutyContext, lane: Lane) -> None:
    silent = lane.idle_consumers(CONSUMER_IDLE_MS)
    alive = context.term.db.read(lambda conn: nodes.alive_ids(conn, silent)) if silent else set()
    for consumer in silent:
        if consumer not in alive:
            lane.forget_consumer(consumer)


def reconcile(context: DutyContext) -> int:
    """Compare every pool with its workers and write what each node should run; nodes hear of it by the doorbell."""
    # Before the look: a pool that drains is empty without them.
    left = context.term.write(lambda conn: reports.leftovers(conn, BATCH))
    _end_for_others(context, left)
    changed = reconcile_pools(context.term, context.settings, context.replicas, context.autosize)
    if changed:
        context.hub.ring("pools")
    return max(len(changed), len(left))


def enforce_limits(context: DutyContext) -> int:
    """End attempts of HTTP workers that ran too long, or that their worker never heard of. Ours are seen to at home.

    What their processes still use on a GPU counts as foreign from its next sample on: the lease ends here.
    """
    if not context.term.finds(_OF_HTTP_WORKERS):
        return 0
    timeout = context.settings.worker_timeout_s
    # As above: signs of life, too, could not get through an outage of the database.
    unconfirmed_s = timeout if context.term.age_s > timeout else None
    late = context.term.db.read(lambda conn: reports.overruns(conn, unconfirmed_s, BATCH))
    _end_for_others(context, late)
    return len(late)


def _end_for_others(context: DutyContext, attempts: Sequence[Overrun]) -> None:
    """End attempts of HTTP workers, who find out when they next speak of them: 409."""
    for by in {attempt.by.worker_id: attempt.by for attempt in attempts}.values():
        ends = {attempt.end.job_id: attempt.end for attempt in attempts if attempt.by.worker_id == by.worker_id}
        write = partial(_end_unheld, by=by, ends=ends, policy=context.retry_policy)
        life.settled(context.term.write(write), worker_id=by.worker_id, pool_id=by.pool_id)


def _end_unheld(conn: Connection, by: Claimant, ends: Mapping[str, End], policy: RetryPolicy) -> list[Settled]:
    """Whoever holds a job's row must not hold up the leader: that one the next time, then."""
    return record(conn, by, [], [ends[job_id] for job_id in ownership.lock_unheld(conn, list(ends))], policy)


def keep_caps(context: DutyContext) -> int:
    """Make caps count what really runs, and let those go who wait for a cap that has room or is gone."""
    book = context.term.db.read(context.policies.book)
    if not context.term.finds(_CAPS) and not book.limits:
        return 0
    late = context.term.write(lambda conn: caps.seat_late(conn, book, BATCH))
    healed = context.apart.write(caps.heal)
    if healed:
        log.warning("caps corrected", extra={"keys": healed})
    gone = context.term.write(lambda conn: caps.let_go(conn, book, context.waited_for, BATCH))
    context.waited_for = gone.after
    for lane in gone.lanes:
        context.publisher.nudge(lane)
    return max(late, gone.released)


def forget_caps(context: DutyContext) -> int:
    """Forget keys at which nobody sits: there may be one for every host that was ever asked."""
    book = context.term.db.read(context.policies.book)
    return context.term.write(lambda conn: caps.forget(conn, book, BATCH))


def expire(context: DutyContext) -> int:
    """End jobs whose deadline passed while they waited."""
    if not context.term.finds(_OVERDUE):
        return 0
    expired = context.term.write(lambda conn: withdraw.expire_overdue(conn, BATCH))
    if expired:
        log.warning("jobs expired", extra={"jobs": expired})
    return expired


def tend_gates(context: DutyContext) -> int:
    """Look at the gates, write down what is seen there, and let jobs go whom nothing keeps any more."""
    book = context.term.db.read(context.policies.book)
    if not context.term.finds(_GATES) and not book.gates:
        return 0
    stale_s = context.settings.gpu_stale_s
    freed = context.term.write(lambda conn: gatekeeper.tend(conn, book, gates.measured(conn, stale_s), context.walk))
    for lane in {job.lane for job in freed}:
        context.publisher.nudge(lane)
    return len(freed)


def tell_dead_letters(context: DutyContext) -> int:
    """Tell the dead-letter stream of jobs that were given up. A crash in between tells it twice, never not at all."""
    if not context.term.finds(_UNTOLD):
        return 0
    # Read under the term: a leader that was replaced must not tell what its successor tells.
    untold = context.term.write(lambda conn: dead_letters.untold(conn, BATCH))
    entries = context.hub.dead_letters.tell_as_leader(context.term.epoch, [item.letter for item in untold])
    told = dict(zip(untold, entries, strict=True))
    gone = context.term.write(lambda conn: dead_letters.told(conn, told)) if told else []
    context.hub.dead_letters.take_back(gone)
    return len(told)


def tend_workflows(context: DutyContext) -> int:
    """End workflows whose time is over, go on with those being stopped or started over, make jobs of added tasks."""
    return tend(
        context.term,
        context.apart,
        context.settings,
        context.retry_policy,
        context.policies,
        context.publisher,
        context.hub,
        context.unfinished,
    )


def fire_due(context: DutyContext) -> int:
    """Submit what schedules want to run now, and tell their lanes."""
    created = fire_schedules(context.term, context.settings, context.retry_policy, context.admission, BATCH)
    for lane in {job.spec.pool_id for job in created}:
        context.publisher.nudge(lane)
    return len(created)


def tally(context: DutyContext) -> int:
    """Count what happened to jobs since the last look. A little that came meanwhile waits for the next turn."""
    if not context.term.db.read(tallies.waiting):
        return 0
    counted = context.term.write(tallies.fold)
    return counted if counted >= tallies.BATCH else min(counted, BATCH - 1)


@dataclass(frozen=True)
class Duty:
    name: str
    interval_s: Callable[[Settings], float]
    run: Callable[[DutyContext], int]


DUTIES = (
    Duty("publish", lambda settings: settings.publish_interval_s, publish),
    Duty("repair", lambda settings: settings.republish_after_s / 2, repair),
    Duty("reclaim", lambda settings: settings.reclaim_interval_s, reclaim),
    Duty("time_limits", lambda settings: settings.reclaim_interval_s, enforce_limits),
    Duty("caps", lambda settings: settings.publish_interval_s, keep_caps),
    Duty("purge_leases", lambda settings: settings.purge_interval_s, purge_leases),
    Duty("reconcile", lambda settings: settings.reconcile_interval_s, reconcile),
    Duty("expire", lambda settings: settings.publish_interval_s, expire),
    Duty("gates", lambda settings: 2 * settings.publish_interval_s, tend_gates),
    Duty("dead_letters", lambda settings: settings.publish_interval_s, tell_dead_letters),
    Duty("workflows", lambda settings: settings.publish_interval_s, tend_workflows),
    Duty("schedules", lambda _settings: SCHEDULES_INTERVAL_S, fire_due),
    Duty("tally", lambda _settings: TALLY_INTERVAL_S, tally),
    Duty("forget_workers", lambda _settings: FORGET_INTERVAL_S, forget_workers),
    Duty("retention", lambda settings: settings.retention_interval_s, forget_old),
    Duty("forget_caps", lambda _settings: FORGET_INTERVAL_S, forget_caps),
)


def find(name: str) -> Duty:
    for duty in DUTIES:
        if duty.name == name:
            return duty
    message = f"no duty {name!r}; there are: {', '.join(duty.name for duty in DUTIES)}"
    raise UnknownDuty(message)
