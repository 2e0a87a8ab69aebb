"""What a leader does: a table of duties. Each is a function of the context that returns how much it did.

A duty is idempotent, does a bounded amount per call, and writes to the database only through its term (announcing
jobs is the publisher's, which needs none). When it returns a full batch it is called again at once. Those that come
often ask first whether there is anything to do, by one statement that begins no transaction (`Term.finds`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from orchestrator.errors import UnknownDuty
from orchestrator.jobs import RetryPolicy
from orchestrator.leader import retention
from orchestrator.leader.context import BATCH, DutyContext
from orchestrator.leader.delivery import publish, reclaim, repair
from orchestrator.leader.reconcile import reconcile_pools
from orchestrator.leader.recurring import INTERVAL_S as SCHEDULES_INTERVAL_S
from orchestrator.leader.recurring import fire_schedules
from orchestrator.leader.workflows import tend
from orchestrator.settings import Settings
from orchestrator.store import (
    caps,
    dead_letters,
    gatekeeper,
    gates,
    leadership,
    lease_purge,
    nodes,
    ownership,
    reports,
    tallies,
    withdraw,
)
from orchestrator.store.moves import Claimant
from orchestrator.store.reports import Overrun
from orchestrator.store.settle import End, Settled, record
from orchestrator.telemetry import life

if TYPE_CHECKING:
    from sqlalchemy import Connection

log = logging.getLogger(__name__)

#: Seconds for which an ended lease still answers "ended" instead of "unknown".
KEEP_ENDED_LEASES_S = 86_400.0
#: Seconds for which workers that ended are remembered: their load times, and whose processes those on a GPU were. What
#: looks at pools reads them all.
KEEP_ENDED_WORKERS_S = 3 * 86_400.0
FORGET_INTERVAL_S = 60.0
#: Seconds for which totals of jobs may be behind what happened.
TALLY_INTERVAL_S = 1.0
# What duties look for. They ask before they begin a transaction: most of the time there is nothing to do.
_OF_HTTP_WORKERS = leadership.question(reports.HELD)
_CAPS = leadership.question(*caps.CONCERNED)
_LEASES = leadership.question(lease_purge.DUE, lease_purge.SPENT, lease_purge.ENDED_LONG_AGO)
_OVERDUE = leadership.question(withdraw.OVERDUE)
_GATES = leadership.question(*gatekeeper.CONCERNED)
_UNTOLD = leadership.question(dead_letters.UNTOLD)


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
