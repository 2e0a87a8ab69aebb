"""Answering requests for GPU memory: propose on a snapshot, take by guarded UPDATE, insert the lease with it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import cast

from sqlalchemy import Connection, select

from orchestrator.leases import (
    RETRY_AFTER_S,
    Denied,
    GpuShare,
    Granted,
    LeaseRequest,
    Terms,
    lease_name,
    model_lease_key,
    new_token,
)
from orchestrator.placement import Ask, Cluster, Look, Mix, Placed, Reason, Refused, too_large_for_all, where_gpus_are
from orchestrator.store import audit, gpus, leases, residency
from orchestrator.store.database import Database, Waiting
from orchestrator.store.dialect import utc_now
from orchestrator.store.hot import Hot

#: Times a batch is placed anew when another process took the memory between the look and the UPDATE.
MAX_ROUNDS = 4
#: Seconds until those for whom warm models leave should ask again.
ROOM_IS_MADE_S = 0.25

_NOW = Hot(lambda _: select(utc_now()))


def grant(
    conn: Connection, requests: Sequence[LeaseRequest], terms: Terms, node_id: str | None = None
) -> list[Granted | Denied]:
    """Answer each request, in order. `node_id` limits all of them to the GPUs of one node."""
    placed, now = _place_all(conn, requests, terms, node_id)
    answers: list[Granted | Denied] = []
    for request, answer in zip(requests, placed, strict=True):
        expires = now + timedelta(seconds=request.ttl_s)
        if isinstance(answer, Placed):
            shares = tuple(GpuShare(gpu.gpu_uuid, gpu.gpu_index) for gpu in answer.gpus)
            answers.append(Granted(request, "gpu", answer.gpus[0].node_id, shares, expires))
        elif request.cpu_fallback:
            answers.append(Granted(request, "cpu", node_id, (), expires))
        else:
            answers.append(answer)
    leases.insert(conn, [answer for answer in answers if isinstance(answer, Granted)])
    return answers


def grant_cpu(conn: Connection, requests: Sequence[LeaseRequest], node_id: str) -> list[Granted]:
    """Leases without a GPU, for those who allow it."""
    if not requests:
        return []
    now = _now(conn)
    granted = [Granted(one, "cpu", node_id, (), now + timedelta(seconds=one.ttl_s)) for one in requests]
    leases.insert(conn, granted)
    return granted


def grant_to_clients(
    db: Database, requests: Sequence[LeaseRequest], terms: Terms, waiting: Waiting = Waiting.ONCE
) -> list[Granted | Denied]:
    """Answer requests from outside in one transaction of their own, with their audit rows.

    Raises RowsHeld.
    """
    tried: list[str] = []

    def work(conn: Connection) -> list[Granted | Denied]:
        # Run again: what was granted before may have been committed, its answer lost. It must not stand in the way of
        # its own repetition, nor stay, since nobody knows it.
        wanted = [replace(request, token=new_token()) for request in requests] if tried else requests
        leases.free(conn, tried)
        tried.extend(request.key for request in wanted)
        return _grant_and_tell(conn, wanted, terms)

    return db.write_batch(work, waiting)


def grant_model(db: Database, request: LeaseRequest, terms: Terms) -> Granted | Denied:
    """A lease for a model that a slot loads before any job asks for it, on the slot's node."""

    def work(conn: Connection) -> Granted | Denied:
        # A slot that waits for its model holds nothing. What stands in its name was granted and the answer lost, now
        # or by a try before: its worker does not know it, and yet renews it with all others.
        leases.free(conn, leases.of_slot(conn, str(request.worker_id), str(request.slot)))
        fresh = replace(request, model_key=model_lease_key(str(request.slot)))
        return _grant_and_tell(conn, [fresh], terms, request.node_id)[0]

    return db.write(work)


def _grant_and_tell(
    conn: Connection, requests: Sequence[LeaseRequest], terms: Terms, node_id: str | None = None
) -> list[Granted | Denied]:
    answers = grant(conn, requests, terms, node_id)
    audit.record(conn, [_granted_event(answer) for answer in answers if isinstance(answer, Granted)])
    return answers


def _granted_event(lease: Granted) -> audit.Event:
    details = {
        "lease": lease_name(lease.key),
        "mode": lease.mode,
        "memory_mb": lease.request.memory_mb,
        "gpus": [gpu.gpu_uuid for gpu in lease.gpus],
    }
    return audit.Event("lease.granted", actor=lease.request.agent, details=details)


def _place_all(
    conn: Connection, requests: Sequence[LeaseRequest], terms: Terms, node_id: str | None
) -> tuple[list[Placed | Denied], datetime]:
    """Propose on the last look, take by guarded UPDATE, and propose again for those whose GPU was taken meanwhile.

    Each request's answer, and the time from which leases count: after they were asked for, since holders count from
    there.
    """
    asks = _asks(conn, requests, terms)
    idle = residency.IdleModels(conn, terms.resident_min_s, node_id)
    answers: dict[int, Placed | Denied] = {}
    waiting = list(range(len(asks)))
    hosts = any(ask.cpu_milli or ask.host_memory_mb for ask in asks)
    mix = terms.recent.mix()
    look = old = None if hosts else terms.last_look.borrow(node_id)
    for _ in range(MAX_ROUNDS):
        look = old or _look(conn, terms, node_id, hosts=hosts)
        choices = {i: _choose(look.cluster, asks[i], terms, mix) for i in waiting}
        refused = {i: choice for i, choice in choices.items() if isinstance(choice, Refused)}
        if old and refused:  # not on an old look; nothing was taken yet
            old = None
            continue
        for i, choice in refused.items():  # final for this batch
            # Nobody leaves for a request that then runs on the CPU.
            answers[i] = _denied(look, asks[i], choice, None if requests[i].cpu_fallback else idle)
        proposals = {i: choice for i, choice in choices.items() if isinstance(choice, Placed)}
        waiting = _take(conn, asks, proposals, terms.stale_s)
        answers |= {i: placed for i, placed in proposals.items() if i not in waiting}
        if not waiting:
            if not hosts:
                terms.last_look.give_back(look)
            break
        old = None
    contended = Denied("other requests took the memory first", Reason.CONTENDED, RETRY_AFTER_S[Reason.CONTENDED])
    now = look.time_by_now() if look else None
    return [answers.get(i, contended) for i in range(len(asks))], now or _now(conn)


def _now(conn: Connection) -> datetime:
    ((now,),) = _NOW.rows(conn)
    return cast(datetime, now)


def _look(conn: Connection, terms: Terms, node_id: str | None, *, hosts: bool) -> Look:
    began = time.monotonic()
    views, now = gpus.views_and_time(conn, terms.stale_s, node_id)
    return Look(Cluster(views, gpus.hosts(conn) if hosts else ()), now, node_id, began)


def _choose(cluster: Cluster, ask: Ask, terms: Terms, mix: Mix) -> Placed | Refused:
    """Place it, and let those after it see that."""
    choice = cluster.place(ask, terms.policy, mix)
    if isinstance(choice, Placed):
        cluster.take(ask, choice)
    return choice


def snapshot(conn: Connection, terms: Terms, node_id: str | None = None) -> Cluster:
    return Cluster(gpus.views(conn, terms.stale_s, node_id))


def _asks(conn: Connection, requests: Sequence[LeaseRequest], terms: Terms) -> list[Ask]:
    models = {request.model_id for request in requests if request.model_id and request.node_id is None}
    warm = residency.warm_nodes(conn, models) if models else {}
    asks = [request.ask(warm.get(request.model_id or "", frozenset())) for request in requests]
    terms.recent.add(*asks)
    return asks


def _denied(look: Look, ask: Ask, refused: Refused, idle: residency.IdleModels | None) -> Denied:
    """The answer to a request without room; idle warm models that stand in its way are asked to leave."""
    # Whoever looks at one node alone knows nothing of others, which may be larger.
    if look.node_id is None and (never := too_large_for_all(ask, look.cluster.gpus(ask.node_id))):
        return Denied(never, Reason.TOO_LARGE, RETRY_AFTER_S[Reason.TOO_LARGE], refused.gpus)
    if look.node_id is None and refused.code is Reason.NO_GPU and not refused.evidence:
        help_ = where_gpus_are(ask, look.cluster.gpus())
        return Denied(f"{refused.reason}: {help_}", refused.code)
    # Whatever is wrong with most GPUs: one may lack nothing but room.
    leaving = idle.make_room(look.cluster, ask) if idle else 0
    if leaving:
        reason = f"{refused.reason}; {leaving} idle warm models make room"
        return Denied(reason, refused.code, ROOM_IS_MADE_S, refused.gpus, evicting=True)
    return Denied(refused.reason, refused.code, RETRY_AFTER_S.get(refused.code, 1.0), refused.gpus)


def _take(conn: Connection, asks: Sequence[Ask], proposals: Mapping[int, Placed], stale_s: float) -> list[int]:
    """One guarded UPDATE per host and GPU for all its proposals; returns those that did not get all they need."""
    lost = _take_hosts(conn, asks, proposals)
    need: Counter[str] = Counter()
    keys: dict[str, str] = {}
    for i, placed in proposals.items():
        for gpu in placed.gpus if i not in lost else ():
            need[gpu.gpu_uuid] += asks[i].memory_mb
            keys[gpu.gpu_uuid] = gpu.reserved_for or ""  # placement gives a reserved GPU to nobody else
    # Sorted: two batches take the rows in the same order and cannot deadlock.
    refused = {uuid for uuid in sorted(need) if not gpus.take(conn, uuid, need[uuid], stale_s, keys[uuid])}
    short = [i for i, placed in proposals.items() if any(gpu.gpu_uuid in refused for gpu in placed.gpus)]
    undo: Counter[str] = Counter()
    for i in short:
        for gpu in proposals[i].gpus:
            if gpu.gpu_uuid not in refused and i not in lost:
                undo[gpu.gpu_uuid] += asks[i].memory_mb
    gpus.give(conn, undo)
    for i in set(short) - lost:
        if asks[i].cpu_milli or asks[i].host_memory_mb:
            gpus.give_host(conn, proposals[i].gpus[0].node_id, asks[i].cpu_milli, asks[i].host_memory_mb)
    return sorted(lost.union(short))


def _take_hosts(conn: Connection, asks: Sequence[Ask], proposals: Mapping[int, Placed]) -> set[int]:
    """Host memory and processors before GPUs, as heartbeats lock them; the proposals that did not get theirs."""
    wanting = [i for i in proposals if asks[i].cpu_milli or asks[i].host_memory_mb]
    by_node = sorted(wanting, key=lambda i: proposals[i].gpus[0].node_id)
    return {
        i
        for i in by_node
        if not gpus.take_host(conn, proposals[i].gpus[0].node_id, asks[i].cpu_milli, asks[i].host_memory_mb)
    }
