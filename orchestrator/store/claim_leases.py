"""The leases that jobs are claimed under: those of warm models first, then new ones, else none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from sqlalchemy import Connection

from orchestrator.batching import Batch
from orchestrator.leases import Denied, Granted, LeaseRequest, ResidentSlot
from orchestrator.placement import Reason
from orchestrator.store import gpus, grants, patience, residency
from orchestrator.store.moves import Claimant
from orchestrator.store.offers import Offered

#: Why a job is not claimed whose lease needs a process of its own, while all free ones keep a model warm.
NO_BLANK_SLOT = "every free slot keeps another model warm"


def requests_of(by: Claimant, together: Sequence[Batch[Offered]]) -> dict[str, LeaseRequest]:
    """The leases that batches need, by the jobs in whose names they are; none for what needs no GPU memory."""
    return {batch.bearer.job_id: request for batch in together if (request := _request(by, batch))}


def grant(
    conn: Connection,
    by: Claimant,
    together: Sequence[Batch[Offered]],
    requests: Mapping[str, LeaseRequest],
    warm: Sequence[ResidentSlot],
    blank: int | None,
) -> dict[str, Granted | Denied]:
    """An answer to each request. `warm` are free slots that keep a model, `blank` how many others are free."""
    granted: dict[str, Granted | Denied] = dict(_under_warm_models(conn, by, together, requests, warm))
    return granted | _lease_all(conn, by, [request for key, request in requests.items() if key not in granted], blank)


def _request(by: Claimant, batch: Batch[Offered]) -> LeaseRequest | None:
    """The lease that a batch needs, in the name of one of its jobs; None for one that needs no GPU memory."""
    job = batch.bearer
    if not batch.memory_mb:
        return None
    return LeaseRequest(
        agent=job.agent,
        memory_mb=batch.memory_mb,
        ttl_s=by.lease_ttl_s,
        gpu_count=job.gpu_count,
        cpu_fallback=bool(job.cpu_fallback),
        node_id=by.node_id,
        job_id=job.job_id,
        attempt=job.attempt + 1,
        worker_id=by.worker_id,
        pid=by.pid,
        model_id=job.model_id,
    )


def _under_warm_models(
    conn: Connection,
    by: Claimant,
    together: Sequence[Batch[Offered]],
    requests: Mapping[str, LeaseRequest],
    warm: Sequence[ResidentSlot],
) -> dict[str, Granted]:
    """Jobs whose model is in memory already run under its lease, one batch at a time."""
    reserved = gpus.reservations(conn) if warm else {}
    idle = list(warm)
    taken: dict[str, Granted] = {}
    for job in (batch.bearer for batch in together) if idle else ():
        request = requests.get(job.job_id)
        fitting = [slot for slot in idle if request and _serves(slot, job, request, reserved)]
        slot = next((slot for slot in fitting if residency.occupy(conn, slot, job.job_id, by.worker_id)), None)
        if request and slot:
            idle.remove(slot)
            expires = datetime.max  # noqa: DTZ901 - its worker renews it, whatever stands in the row now
            taken[job.job_id] = Granted(request, "gpu", by.node_id, slot.gpus, expires, resident=slot.key)
    return taken


def _serves(slot: ResidentSlot, job: Offered, request: LeaseRequest, reserved: Mapping[str, str]) -> bool:
    """Not while its GPU is kept for another job: a stream of jobs for this model would never let it become idle."""
    same_model = (slot.type, slot.model_id) == (job.type, job.model_id)
    large_enough = slot.memory_mb >= request.memory_mb and len(slot.gpus) == request.gpu_count
    return same_model and large_enough and all(reserved.get(gpu.gpu_uuid) in (None, job.job_id) for gpu in slot.gpus)


def _lease_all(
    conn: Connection, by: Claimant, requests: Sequence[LeaseRequest], blank: int | None
) -> dict[str, Granted | Denied]:
    """New leases, for as many jobs as there are slots without a model in memory. The others may do without a GPU."""
    room = len(requests) if blank is None else min(blank, len(requests))
    answers = grants.grant(conn, requests[:room], by.terms, by.node_id) if room else []
    answers += grants.grant_cpu(conn, [one for one in requests[room:] if one.cpu_fallback], by.node_id)
    granted: dict[str, Granted | Denied] = dict.fromkeys(
        (str(request.job_id) for request in requests),
        Denied(NO_BLANK_SLOT, Reason.NO_MEMORY, patience.ELSEWHERE_S, evicting=True),
    )
    asked = [*requests[:room], *[one for one in requests[room:] if one.cpu_fallback]]
    return granted | {str(request.job_id): answer for request, answer in zip(asked, answers, strict=True)}
