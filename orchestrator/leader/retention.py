"""The duty `retention`: one short, fenced transaction after the other deletes what is old or unused."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from orchestrator.leader.term import Term
from orchestrator.settings import Settings
from orchestrator.store import lanes, retention
from orchestrator.store.retention import FORGOTTEN, OVER, ROWS, Place, Step
from orchestrator.stream.hub import Hub
from orchestrator.workflows import FlowStatus

if TYPE_CHECKING:
    from sqlalchemy import Connection

log = logging.getLogger(__name__)

#: Seconds after which a run leaves further workflows for the next: the other duties wait meanwhile.
BUDGET_S = 0.2

#: How far each walk has come in this term.
Places = dict[tuple[str, str], Place | None]


def forget_old(term: Term, settings: Settings, places: Places) -> int:
    """One look of each kind; as much as a full batch when there is more to look at right now."""
    kept_s, results_s, events_s = settings.retention_jobs_s, settings.retention_results_s, settings.retention_audit_s
    deleted: Counter[str] = Counter()
    more = False
    if kept_s:
        for status in FORGOTTEN:
            look = partial(retention.forget_jobs, status=status, keep_s=kept_s)
            more |= _walk(term, places, ("jobs", status), look, deleted)
        for ended in OVER:
            more |= _give_up(term, places, ended, kept_s)
        more |= _forget_flows(term, deleted)
    if results_s and results_s != kept_s:  # else they go with their jobs
        look = partial(retention.forget_results, keep_s=results_s)
        more |= _walk(term, places, ("results", ""), look, deleted)
    if events_s:
        deleted["events"] = term.write(partial(retention.forget_events, keep_s=events_s))
        more |= deleted["events"] == ROWS
    if deleted.total():
        log.info("forgotten", extra={kind: count for kind, count in deleted.items() if count})
    return max(deleted.total(), ROWS if more else 0)


def forget_lanes(term: Term, hub: Hub, after: str) -> tuple[int, str]:
    """Forget those of the next lanes that nobody uses; how many went, and where the next look begins."""
    found, behind = term.db.read(lambda conn: lanes.unused(conn, after))
    gone = term.write(partial(_forget_lanes, term=term, hub=hub, names=found)) if found else 0
    if gone:
        log.info("forgotten", extra={"lanes": gone})
    return gone, behind


def _forget_lanes(conn: Connection, term: Term, hub: Hub, names: Sequence[str]) -> int:
    """Their streams go while their rows are locked: nobody announces anything there, and no successor has begun."""
    names = lanes.lock_unused(conn, names)
    for name in names:
        hub.lane(name).drop(term.epoch)
    return lanes.forget(conn, names)


def _walk(term: Term, places: Places, name: tuple[str, str], look: Callable[..., Step], deleted: Counter[str]) -> bool:
    """One step of a walk; whether the next should follow at once."""
    step: Step = term.write(partial(look, after=places.get(name)))
    places[name] = step.after
    deleted[name[0]] += step.deleted
    return step.more


def _give_up(term: Term, places: Places, status: FlowStatus, kept_s: float) -> bool:
    """Workflows that are old enough are forgotten from now on; whether there are more to look at."""
    name = "workflows", str(status)
    after = places.get(name)
    found, places[name] = term.db.read(lambda conn: retention.find_flows(conn, status, kept_s, after))
    enough = time.monotonic() + BUDGET_S
    for number, workflow_id in enumerate(found, 1):
        term.write(partial(retention.give_up, workflow_id=workflow_id, keep_s=kept_s))
        if number < len(found) and time.monotonic() >= enough:
            places[name] = after  # the next look passes over those that were given up
            return True
    return places[name] is not None


def _forget_flows(term: Term, deleted: Counter[str]) -> bool:
    """Go on deleting workflows that were given up; whether something of them is left that can go now."""
    more, enough = False, time.monotonic() + BUDGET_S
    for workflow_id in term.db.read(retention.given_up):
        rows, gone = term.write(partial(retention.forget_flow, workflow_id=workflow_id))
        deleted["tasks"] += rows
        deleted["workflows"] += gone
        more |= bool(rows) and not gone
        if time.monotonic() >= enough:
            return more or deleted["tasks"] > 0
    return more
