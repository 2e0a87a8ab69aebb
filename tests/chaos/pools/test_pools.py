"""The short run of `make test`, broken builds that it must catch, and the checker itself on moments and histories."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.chaos import broken
from tests.chaos.pools.actions import ACTIONS
from tests.chaos.pools.checker import Hurt, check
from tests.chaos.pools.convergence import lacks
from tests.chaos.pools.look import Look
from tests.chaos.pools.run import Plan, run
from tests.chaos.pools.stage import Slot
from tests.chaos.test_checker import event, plus_events, with_row
from tests.chaos.test_checker import sound as sound_history

SHORT = Plan(seed=1, minutes=0.4, pools=4, nodes=2, gpus="sim:1x16384", storm_s=8.0)
#: Less of everything: what a broken build does wrong, it does as soon as it is asked to.
BRIEF = replace(SHORT, pools=2, orchestrators=1, storm_s=4.0, settle_s=5.0, hasty=True)


@pytest.mark.timeout(300)
def test_pools_become_what_they_should_be_and_no_job_process_or_lease_is_lost(tmp_path):
    report = run(SHORT, folder=tmp_path)
    assert not report.violations, "\n".join(map(str, report.violations[:20]))
    assert report.figures["actions"] > 10
    assert report.figures["jobs_accepted"] > 10


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("build", "actions", "found"),
    [
        ("vanished-orders", {"scale", "create"}, "should have left"),
        ("parent-death", {"kill_node"}, "has lost its supervisor"),
        ("model-lease-leak", {"kill_slot"}, "which is gone"),
    ],
)
def test_a_broken_build_is_caught(build, actions, found, tmp_path):
    only = tuple(action for action in ACTIONS if action.name in actions)
    copy = broken.build(build, tmp_path / "build")
    report = run(replace(BRIEF, only=only, build=copy), folder=tmp_path)
    assert any(found in violation.text for violation in report.violations), report.violations


# ── moments ─────────────────────────────────────────────────────────────────────────────────────────────────────

WORKER, OWN, NODE, GPU = "host:7:pool", "host:7:own", "node-1", "SIM-node-1-0"


def worker(worker_id: str, pool_id: str, **given: Any) -> dict[str, Any]:
    usual = {"node_id": NODE, "status": "active", "revision": 0, "slots": 1, "ready": 1, "busy": 0}
    return usual | {"worker_id": worker_id, "pool_id": pool_id, "blocked": False, "trouble": None} | given


def pool(**given: Any) -> dict[str, Any]:
    usual = {"status": "running", "revision": 2, "desired_workers": 1, "min_workers": 0, "slots": 1, "idle_s": 5.0}
    more = {"hold_seconds": 3600, "min_memory_mb": 4000, "spawned_workers": 1, "status_reason": None}
    return {"pool_id": "chat"} | usual | more | given


def lease(**given: Any) -> dict[str, Any]:
    usual = {"token": "model:1", "memory_mb": 4000, "worker_id": WORKER, "slot": f"{WORKER}#1", "resident": True}
    return usual | {"ending_as": None, "job_id": None, "pinned": False, "age_s": 9.0, "shares": {GPU: 4000}} | given


def gpu(**given: Any) -> dict[str, Any]:
    usual = {"node_id": NODE, "usable_mb": 10_000, "leased_mb": 4000, "foreign_mb": 0, "quarantined_at": None}
    return usual | {"quarantine_reason": None} | given


def moment(*crews: dict[str, Any], **given: Any) -> Look:
    """One node that runs one pool of one worker, or these."""
    workers = [worker(OWN, "default"), *(crews or (worker(WORKER, "chat", revision=2),))]
    by_pool: dict[str, list[dict[str, Any]]] = {}
    for row in workers:
        by_pool.setdefault(row["pool_id"], []).append(row)
    usual = Look(
        mono=100.0,
        pools={"chat": pool()},
        assigned={"chat": {(NODE, 2): 1}},
        workers=workers,
        nodes={NODE: {"supervisor_id": "host:7:x", "heard": True, "drain_until": None}},
        leases=[lease()],
        gpus={GPU: gpu()},
        waiting=Counter(),
        owned=Counter(),
        slots=[Slot(11, 7, f"{OWN}#1"), Slot(12, 7, f"{WORKER}#1")],
        supervisors={7: NODE},
        crew_of=by_pool,
    )
    return replace(usual, **given)


def test_a_moment_in_which_all_is_well_lacks_nothing():
    assert lacks(moment()) == []


WAITS = {"revision": 2, "ready": 0, "blocked": True, "trouble": "no GPU has 4000 MB free"}
FULL = {"gpus": {GPU: gpu(leased_mb=9000)}, "leases": [lease(slot=f"{OWN}#1", pinned=True, shares={GPU: 9000})]}
STARTING = pool(status="starting", spawned_workers=0, status_reason="no GPU has 4000 MB free")


def test_a_worker_may_wait_for_memory_that_is_not_there():
    assert lacks(moment(worker(WORKER, "chat", **WAITS), pools={"chat": STARTING}, **FULL)) == []


@pytest.mark.parametrize(
    ("text", "broken_moment"),
    [
        ("does not run its pools", moment(nodes={NODE: {"supervisor_id": None, "heard": False, "drain_until": None}})),
        ("nobody noticed", moment(supervisors={})),
        ("workers for jobs without a pool", moment(crew_of={"chat": [worker(WORKER, "chat", revision=2)]})),
        ("is drained or dead", moment(worker(WORKER, "chat", revision=2, node_id="node-2"))),
        ("has not stopped", moment(pools={"chat": pool(status="draining")})),
        ("is evicted, and has the worker", moment(pools={"chat": pool(status="evicted")})),
        ("of its jobs run", moment(pools={"chat": pool(status="stopped")}, owned=Counter(chat=1))),
        ("is no more, and has", moment(pools={})),
        ("is no more, and nodes", moment(pools={})),
        ("workers assigned", moment(pools={"chat": pool(desired_workers=2)})),
        ("workers assigned", moment(pools={"chat": pool(hold_seconds=3, idle_s=60.0)})),
        ("revision 1 is assigned", moment(assigned={"chat": {(NODE, 1): 1}})),
        ("assigned to node-2", moment(assigned={"chat": {("node-2", 2): 1}})),
        ("should have left", moment(worker(WORKER, "chat", revision=1))),
        ("no worker of revision 2", moment(worker(WORKER, "chat", revision=1))),
        ("instead of 1", moment(worker(WORKER, "chat", revision=2, slots=2))),
        ("slots ready", moment(worker(WORKER, "chat", revision=2, ready=0))),
        ("memory that there is", moment(worker(WORKER, "chat", **WAITS), pools={"chat": STARTING})),
        (
            "nobody says so",
            moment(worker(WORKER, "chat", **WAITS), pools={"chat": STARTING | {"status_reason": None}}, **FULL),
        ),
        ("workers are ready; 1 are", moment(pools={"chat": pool(spawned_workers=0)})),
        ("is starting with", moment(pools={"chat": pool(status="starting")})),
        ("lost its supervisor", moment(slots=[*moment().slots, Slot(13, 1, f"{WORKER}#2")])),
        ("not registered", moment(slots=[*moment().slots, Slot(13, 7, "host:7:gone#1")])),
        ("and 2 processes", moment(slots=[*moment().slots, Slot(13, 7, f"{WORKER}#2")])),
        ("is ending", moment(leases=[lease(ending_as="spent")])),
        ("who is gone", moment(leases=[lease(worker_id="host:7:gone")])),
        ("which is gone", moment(leases=[lease(slot=f"{WORKER}#9")])),
        ("holds 2 leases", moment(leases=[lease(shares={GPU: 2000}), lease(shares={GPU: 2000})])),
        ("the leases say", moment(leases=[])),
        ("in quarantine", moment(gpus={GPU: gpu(quarantined_at="now")})),
    ],
)
def test_what_a_moment_lacks_is_found(text, broken_moment):
    assert any(text in found for found in lacks(broken_moment)), lacks(broken_moment)


# ── histories ───────────────────────────────────────────────────────────────────────────────────────────────────

HURT = Hurt(workers={"w1"})


def test_a_sound_history_passes():
    assert check(sound_history(), HURT) == []


@pytest.mark.parametrize(
    ("text", "change"),
    [
        (
            "was claimed after pool.draining",
            lambda: plus_events(
                event("pool.draining", 9, None, pool_id="chat"),
                event("job.claimed", 10, attempt=3, pool_id="chat"),
            ),
        ),
        ("attempts charged", lambda: with_row(attempts=3)),
    ],
)
def test_what_is_broken_is_found(text: str, change: Callable[[], dict[str, Any]]):
    found = check(replace(sound_history(), **change()), HURT)
    assert any(text in violation.text for violation in found), found


def test_a_pool_that_is_created_again_takes_jobs():
    closed, opened = event("pool.evicted", 9, None, pool_id="chat"), event("pool.created", 10, None, pool_id="chat")
    claimed = event("job.claimed", 11, "other", attempt=1, pool_id="chat")
    found = check(replace(sound_history(), **plus_events(closed, opened, claimed)), HURT)
    assert not any("was claimed after" in violation.text for violation in found)


def test_an_attempt_that_nobody_hurt_must_not_fail():
    history = sound_history()
    audit = [item for item in history.audit if item["event_type"] != "worker.lost"]
    renamed = [item | {"worker_id": "host:5:x"} if item["worker_id"] == "w1" else item for item in audit]
    found = check(replace(history, audit=renamed), Hurt())
    assert any("which nobody hurt" in violation.text for violation in found)
    assert not any("nobody hurt" in found.text for found in check(replace(history, audit=renamed), Hurt({5})))
