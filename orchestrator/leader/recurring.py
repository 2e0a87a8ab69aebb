"""Firing schedules: many in one fenced transaction; one that breaks it is found, passed over, and holds up nobody."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from orchestrator.errors import StaleEpoch, Unavailable
from orchestrator.jobs import NewJob, RetryPolicy
from orchestrator.leader.term import Term
from orchestrator.schedules import recurring_job
from orchestrator.settings import Settings
from orchestrator.store import schedules
from orchestrator.store.admission import Admission
from orchestrator.store.policies import read_book
from orchestrator.store.submit import Rules, meeting_nobody
from orchestrator.telemetry import tracing

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
#: Schedules that share a transaction; each may catch up on a hundred times.
TOGETHER = 20


def fire_schedules(
    term: Term, settings: Settings, policy: RetryPolicy, admission: Admission, limit: int
) -> list[NewJob]:
    """Fire what is due; the jobs that are new. They come in as every submit does."""
    make = partial(_job, max_bytes=settings.payload_max_bytes, max_depth=settings.payload_max_depth)
    # Looked up under the term: one that was replaced must hear of it also when nothing is due.
    due = term.write(lambda conn: schedules.due(conn, limit))
    parts = [due[first : first + TOGETHER] for first in range(0, len(due), TOGETHER)]
    return [job for part in parts for job in _fire(term, part, make, policy, admission)]


def _job(template: dict[str, Any], job_id: str, max_bytes: int, max_depth: int) -> NewJob:
    """Each begins a trace of its own: nobody called."""
    with tracing.submitting(None, **{"job.id": job_id, "orchestrator.origin": "schedule"}) as traced:
        return recurring_job(template, job_id, max_bytes, max_depth, traced.context)


def _fire(
    term: Term, schedule_ids: Sequence[str], make: schedules.Make, policy: RetryPolicy, admission: Admission
) -> list[NewJob]:
    ruling = admission.ruling()
    rules = Rules(policy, ruling.decide, read_book)
    try:
        fired = meeting_nobody(
            lambda: term.write(lambda conn: schedules.fire(conn, term.db, schedule_ids, make, rules))
        )
    except (StaleEpoch, Unavailable):
        raise
    except Exception as error:
        if len(schedule_ids) > 1:
            return [job for one in schedule_ids for job in _fire(term, [one], make, policy, admission)]
        log.exception("a schedule broke", extra={"schedule_id": schedule_ids[0]})
        why = f"{type(error).__name__}: {error}"
        term.write(lambda conn: schedules.pass_over(conn, schedule_ids[0], why))
        return []
    ruling.committed()
    return fired
