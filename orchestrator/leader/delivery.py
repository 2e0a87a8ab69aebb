"""The duties that keep rows and streams together: what is due is announced, what is lost is announced again.

Nobody else may be there to do it: nudges get lost, streams are emptied, workers die with what they read or claimed.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection, Sequence
from functools import partial

from orchestrator.dead_letters import about_entry
from orchestrator.errors import RedisUnavailable, StaleEpoch, Unavailable
from orchestrator.jobs import DUE, OWNED, Queued, Status
from orchestrator.leader.context import BATCH, DutyContext
from orchestrator.store import clock, lanes, leadership, nodes, outbox
from orchestrator.store.database import RowsHeld
from orchestrator.store.job_reads import statuses
from orchestrator.store.moves import Claimant
from orchestrator.store.nodes import DeadOwner
from orchestrator.store.settle import take_from_dead
from orchestrator.stream.lane import Entry, Lane
from orchestrator.telemetry import life, metrics, tracing

log = logging.getLogger(__name__)

#: Lanes that may run into a timeout before a duty leaves the rest for later.
MAX_WAITS = 2
#: Milliseconds after which an idle consumer of a worker that is gone is removed from its group.
CONSUMER_IDLE_MS = 60_000

_DUE = leadership.question(outbox.DELAYED_AND_DUE)
_SILENT = leadership.question(nodes.SILENT)
_AHEAD = leadership.question(*clock.AHEAD)


def publish(context: DutyContext) -> int:
    """Make due jobs ready and fill the window of every lane that has any: the backstop of the nudges."""
    promoted = 0
    if context.term.finds(_DUE):
        promoted = context.term.write(lambda conn: outbox.promote_due(conn, BATCH, context.policies.book(conn)))
    served = context.term.db.read(lambda conn: lanes.served(conn, Queued.READY))
    return promoted + in_lanes({*served, *context.lanes("publish", Queued.READY)}, context.publisher.publish)


def repair(context: DutyContext) -> int:
    """Announce again what the database believes published and the stream does not have."""
    return in_lanes(_tended(context, "repair"), lambda lane: _repair_lane(context, lane))


def _tended(context: DutyContext, duty: str) -> set[str]:
    """Lanes whose streams are worth a look: somebody reads them, or a job may stand there.

    What is left in others is in nobody's way, and goes when somebody serves them, or when they are forgotten.
    """
    return {*context.term.db.read(lanes.served), *context.lanes(duty, *DUE)}


def in_lanes(names: Collection[str], work: Callable[[str], int]) -> int:
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


def reclaim(context: DutyContext) -> int:
    """Give the work of the dead to the living: jobs of lost workers, then entries nobody will finish."""
    rescued = _reclaim_jobs(context)
    tended = _tended(context, "reclaim")
    return rescued + in_lanes(tended, lambda lane: _reclaim_entries(context, context.hub.lane(lane)))


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
