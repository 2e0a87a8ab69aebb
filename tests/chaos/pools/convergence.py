"""What a moment lacks to be what was asked for, as pure functions of a look. An empty list: everything converged."""

from collections import Counter
from collections.abc import Iterator

from orchestrator.pools import CLOSED, OPEN, PoolState
from orchestrator.store.schema import LIVE_WORKERS
from tests.chaos.pools.look import Look, Row
from tests.chaos.pools.stage import TIMES, WORKER_SLOTS
from tests.chaos.pools.wishes import SHORT_HOLD_S

DEFAULT = "default"
#: Seconds around the end of its hold in which a pool may be either large or small: looks, writes and clocks take time.
AROUND_HOLD_S = 4.0


def lacks(look: Look) -> list[str]:
    return [text for one in CONDITIONS for text in one(look)]


# ── nodes ───────────────────────────────────────────────────────────────────────────────────────────────────────


def open_nodes(look: Look) -> set[str]:
    """Nodes that should run pools: their supervisor lives, and nobody drains them."""
    return {node for node in look.supervisors.values() if node in look.nodes and not look.nodes[node]["drain_until"]}


def nodes_are_known(look: Look) -> Iterator[str]:
    for pid, node in look.supervisors.items():
        row = look.nodes.get(node)
        mine = row is not None and row["heard"] and f":{pid}:" in (row["supervisor_id"] or "")
        if row is None or (not row["drain_until"] and not mine):
            yield f"{node}: its supervisor {pid} does not run its pools yet"
    for node, row in look.nodes.items():
        if row["heard"] and node not in look.supervisors.values():
            yield f"{node}: nobody noticed that its supervisor is dead"


def nodes_serve_the_default_lane(look: Look) -> Iterator[str]:
    here = Counter(row["node_id"] for row in look.crew_of.get(DEFAULT, []) if row["ready"] >= WORKER_SLOTS)
    for node in open_nodes(look):
        if here[node] != 1:
            yield f"{node}: {here[node]} workers for jobs without a pool"
    for row in look.workers:
        if row["node_id"] not in open_nodes(look):
            yield f"{row['node_id']} is drained or dead, and has the worker {_named(row)}"


# ── pools ───────────────────────────────────────────────────────────────────────────────────────────────────────


def pools_are_what_they_should_be(look: Look) -> Iterator[str]:
    for pool_id, pool in look.pools.items():
        state = PoolState(pool["status"])
        findings = _of_open(look, pool) if state in OPEN else _of_closed(look, pool)
        yield from (f"{pool_id}: {text}" for text in findings)
    for row in look.workers:
        if row["pool_id"] != DEFAULT and row["pool_id"] not in look.pools:
            yield f"{row['pool_id']} is no more, and has the worker {_named(row)}"
    for pool_id in look.assigned.keys() - look.pools.keys():
        yield f"{pool_id} is no more, and nodes are to run it"


def _of_closed(look: Look, pool: Row) -> Iterator[str]:
    pool_id = pool["pool_id"]
    if pool["status"] not in CLOSED:
        yield "has not stopped yet"
    if crews := look.crew_of.get(pool_id):
        yield f"is {pool['status']}, and has the worker {_named(crews[0])}"
    if pool_id in look.assigned:
        yield f"is {pool['status']}, and nodes are to run it"
    if look.owned[pool_id]:
        yield f"is {pool['status']}, and {look.owned[pool_id]} of its jobs run"


def _of_open(look: Look, pool: Row) -> Iterator[str]:
    assigned = look.assigned.get(pool["pool_id"], {})
    nodes = open_nodes(look)
    total = sum(assigned.values())
    allowed = _wanted(look, pool) if nodes else {0}
    if total not in allowed:
        yield f"{total} workers assigned, {sorted(allowed)} wanted"
    for node, revision in assigned:
        if revision != pool["revision"]:
            yield f"revision {revision} is assigned to {node}; the newest is {pool['revision']}"
        if node not in nodes:
            yield f"assigned to {node}, which is drained or dead"
    yield from _crews_match(look, pool, assigned)
    yield from _status_matches(look, pool, total)


def _wanted(look: Look, pool: Row) -> set[int]:
    desired, least, hold = pool["desired_workers"], pool["min_workers"], pool["hold_seconds"]
    idle = not (look.waiting[pool["pool_id"]] or look.owned[pool["pool_id"]])
    if hold > SHORT_HOLD_S or (idle and pool["idle_s"] < hold - AROUND_HOLD_S):
        return {desired}
    return {least} if idle and pool["idle_s"] > hold + AROUND_HOLD_S else {desired, least}


def _crews_match(look: Look, pool: Row, assigned: dict[tuple[str, int], int]) -> Iterator[str]:
    crews = {(row["node_id"], row["revision"]): row for row in look.crew_of.get(pool["pool_id"], [])}
    if len(crews) != len(look.crew_of.get(pool["pool_id"], [])):
        yield "two workers of one revision on one node"
    for place in crews.keys() - assigned.keys():
        yield f"the worker {_named(crews[place])} should have left"
    for place in assigned.keys() - crews.keys():
        yield f"no worker of revision {place[1]} on {place[0]}"
    for place in assigned.keys() & crews.keys():
        yield from _crew_matches(look, pool, crews[place], assigned[place] * pool["slots"])


def _crew_matches(look: Look, pool: Row, crew: Row, slots: int) -> Iterator[str]:
    if crew["slots"] != slots:
        yield f"{_named(crew)} has {crew['slots']} slots instead of {slots}"
    elif crew["ready"] < slots and not crew["blocked"]:
        yield f"{_named(crew)} has {crew['ready']} of {slots} slots ready: {crew['trouble']}"
    elif crew["ready"] < slots and (room := _room(look, pool, crew)):
        yield f"{_named(crew)} waits for memory that there is: {room}"
    elif crew["ready"] < slots and not (crew["trouble"] and pool["status_reason"]):
        yield f"{_named(crew)} waits for memory, and nobody says so"


def _room(look: Look, pool: Row, crew: Row) -> str | None:
    """Where a blocked worker could load its model: free memory on any open node, or idle models that may leave here."""
    for uuid, gpu in look.gpus.items():
        if gpu["node_id"] not in open_nodes(look) or gpu["quarantined_at"]:
            continue
        free = gpu["usable_mb"] - gpu["leased_mb"] - gpu["foreign_mb"]
        if gpu["node_id"] == crew["node_id"]:
            free += sum(lease["shares"].get(uuid, 0) for lease in look.leases if _may_leave(lease))
        if free >= pool["min_memory_mb"]:
            return f"{free} MB of {uuid} for {pool['min_memory_mb']} MB"
    return None


def _may_leave(lease: Row) -> bool:
    idle = lease["resident"] and not lease["job_id"] and not lease["pinned"] and not lease["ending_as"]
    return bool(idle and lease["age_s"] > TIMES["resident_min_s"])


def _status_matches(look: Look, pool: Row, wanted: int) -> Iterator[str]:
    ready = sum(row["ready"] for row in look.crew_of.get(pool["pool_id"], [])) // pool["slots"]
    if pool["spawned_workers"] != ready:
        yield f"says {pool['spawned_workers']} workers are ready; {ready} are"
    should = PoolState.RUNNING if ready or not wanted else PoolState.STARTING
    if wanted and pool["status"] != should:
        yield f"is {pool['status']} with {ready} of {wanted} workers ready"


def _named(row: Row) -> str:
    return f"{row['worker_id']} (revision {row['revision']}, {row['status']}, busy {row['busy']})"


# ── processes and leases ────────────────────────────────────────────────────────────────────────────────────────


def no_process_is_an_orphan(look: Look) -> Iterator[str]:
    known = {row["worker_id"]: row for row in look.workers}
    for slot in look.slots:
        if slot.parent not in look.supervisors:
            yield f"process {slot.pid} ({slot.mark}) has lost its supervisor"
        elif slot.worker_id not in known:
            yield f"process {slot.pid} belongs to {slot.worker_id}, which is not registered"
    counts = Counter(slot.worker_id for slot in look.slots)
    for worker_id, row in known.items():
        if not row["slots"] <= counts[worker_id] <= row["slots"] + row["busy"]:
            yield f"{_named(row)} has {row['slots']} slots and {counts[worker_id]} processes"


def no_lease_is_an_orphan(look: Look) -> Iterator[str]:
    marks = {slot.mark for slot in look.slots}
    workers = {row["worker_id"] for row in look.workers if row["status"] in LIVE_WORKERS}
    for lease in look.leases:
        name = f"the lease {lease['token']} of {lease['memory_mb']} MB"
        if lease["ending_as"]:
            yield f"{name} is ending"
        elif lease["worker_id"] not in workers:
            yield f"{name} is {lease['worker_id']}'s, who is gone"
        elif lease["resident"] and lease["slot"] not in marks:
            yield f"{name} is that of slot {lease['slot']}, which is gone"


def no_lease_is_spare(look: Look) -> Iterator[str]:
    """A slot keeps one model, under one lease."""
    for slot, count in Counter(lease["slot"] for lease in look.leases if lease["resident"]).items():
        if count > 1:
            yield f"slot {slot} holds {count} leases"


def books_balance(look: Look) -> Iterator[str]:
    for uuid, gpu in look.gpus.items():
        leased = sum(lease["shares"].get(uuid, 0) for lease in look.leases)
        if leased != gpu["leased_mb"]:
            yield f"{uuid}: {gpu['leased_mb']} MB leased, the leases say {leased}"
        if gpu["quarantined_at"]:
            yield f"{uuid} is in quarantine: {gpu['quarantine_reason']}"


CONDITIONS = (
    nodes_are_known,
    nodes_serve_the_default_lane,
    pools_are_what_they_should_be,
    no_process_is_an_orphan,
    no_lease_is_an_orphan,
    no_lease_is_spare,
    books_balance,
)
