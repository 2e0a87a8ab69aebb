"""Tables as they are after a long time: what queries must not walk over, and a little of what each looks for."""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Table, insert

from orchestrator.store import leadership, schema
from tests.factories import Hand, hire, many_jobs, now

HISTORY = 3000
LETTERS = 1000


def crowd(db, history=HISTORY, letters=LETTERS) -> Hand:
    """A long history, a backlog, and little of what each query looks for."""
    start = now(db) - timedelta(hours=2)

    def moment(i, step=1.0):
        return start + timedelta(seconds=i * step)

    def owned(status, queued, count, prefix, **columns):
        base = {
            "job_id": lambda i: f"{prefix}-{i:06}",
            "created_at": moment,
            "status": status,
            "queued": queued,
        }
        many_jobs(
            db,
            count,
            **(base | {"attempt": 1, "attempts": 1, "agent": lambda i: f"agent-{i % 20}"} | columns),
        )

    hand = hire(db)
    owned("done", None, history, "done", worker_id=lambda i: f"old-{i % 30}")
    owned("pending", "ready", history, "ready")
    owned("pending", "announced", 60, "announced", published_at=moment)
    owned("pending", "delayed", 500, "later", not_before=lambda i: moment(i) + timedelta(days=9))
    owned("pending", "delayed", 10, "due", not_before=moment)
    owned("running", None, 20, "mine", worker_id=hand.worker_id)
    owned("running", None, 40, "other", worker_id="somebody-else")
    owned("pending", "ready", 300, "dated", expires_at=lambda i: moment(i) + timedelta(days=9))
    owned("pending", "ready", 10, "overdue", expires_at=moment)
    owned("pending", "ready", 300, "calm", start_by=lambda i: moment(i) + timedelta(days=9))
    owned("pending", "ready", 10, "near", start_by=moment)
    owned("pending", "announced", 10, "near-announced", start_by=moment)
    owned("pending", "ready", 300, "elsewhere", lane="idle-later", start_by=moment)
    owned("running", None, 10, "late", worker_id="somebody-else", expires_at=moment)
    owned("pending", "blocked", 500, "gated", blocked_on=lambda i: ("capacity", "quiet")[i % 2], cost_units=1.0)
    owned("skipped", None, 300, "task", workflow_id="flow")
    owned("dead_letter", None, letters, "dead", type=lambda i: f"type-{i % 7}")
    db.write(
        lambda conn: conn.execute(
            insert(schema.dead_letters),
            [
                {"job_id": f"dead-{i:06}", "reason": f"reason-{i % 3}", "attempts": 3, "buried_at": moment(i)}
                | {"entry_id": f"{i}-0" if i >= 8 else None}
                for i in range(letters)
            ],
        )
    )
    db.write(
        lambda conn: conn.execute(
            insert(schema.audit),
            [{"event_type": "job.done", "job_id": f"done-{i % 500:06}"} for i in range(history)],
        )
    )
    db.write(
        lambda conn: conn.execute(
            insert(schema.results),
            [{"job_id": f"done-{i:06}", "attempt": 1, "result": "{}", "run_seconds": 1.0} for i in range(history)],
        )
    )
    lease = {"agent_name": "a", "memory_mb": 1, "ttl_seconds": 60.0}
    db.write(
        lambda conn: conn.execute(
            insert(schema.leases),
            [
                lease
                | {
                    "token": f"{i:064}",
                    "state": "active" if i < 400 else "released",
                    "expires_at": moment(i) if i < 10 or i >= 400 else moment(i) + timedelta(days=9),
                    # Twenty active ones are of this node, and so are all that are over.
                    "node_id": "node-1" if i < 20 or i >= 400 else f"node-{i}",
                    "worker_id": hand.worker_id if i < 20 or i >= 400 else f"worker-{i}",
                    "ending_as": "spent" if 15 <= i < 20 else None,
                    "resident": 10 <= i < 15 or i >= 1000,
                    "idle_since": moment(i) if 10 <= i < 15 else None,
                    "model_id": "m" if 10 <= i < 15 or i >= 1000 else None,
                    "evicted_at": moment(i) if 10 <= i < 12 or i >= 1000 else None,
                }
                for i in range(1500)
            ],
        )
    )
    db.write(
        lambda conn: conn.execute(
            insert(schema.lease_gpus),
            [
                {"token": f"{i:064}", "gpu_uuid": "GPU-0" if i < 20 or i >= 400 else f"GPU-{i}", "memory_mb": 1}
                for i in range(1500)
            ],
        )
    )
    silent = {"node_id": "n", "hostname": "h", "pid": 1, "slots": 1, "types": "[]"}
    db.write(
        lambda conn: conn.execute(
            insert(schema.workers),
            [
                silent
                | {
                    "worker_id": f"w-{i}",
                    "pool_id": f"pool-{i % 20}",
                    "status": "active" if i < 300 else "stopped",
                    "last_heartbeat": moment(i) if i < 5 or i >= 300 else moment(i) + timedelta(days=9),
                }
                for i in range(1000)
            ],
        )
    )
    db.write(lambda conn: conn.execute(insert(schema.lanes), [{"lane": "default"}, {"lane": "idle"}]))
    leadership.ensure_row(db, "leader")
    for table, several in _others(moment).items():
        db.write(lambda conn, table=table, several=several: conn.execute(insert(table), several))
    return hand


def _others(moment: Callable[[int], datetime]) -> dict[Table, list[dict[str, Any]]]:
    """What belongs to workflows, pools and operators."""
    return {
        schema.workflows: [
            {"workflow_id": f"flow-{i}", "agent": f"agent-{i % 20}", "content_hash": "", "total": 3}
            | {"created_at": moment(i), "status": "done" if i >= 60 else "running"}
            | {"sweep": "all" if i < 5 else None, "expires_at": moment(i) if 5 <= i < 10 else None}
            for i in range(2000)
        ],
        schema.task_edges: [
            {"task_id": f"follower-{i}", "position": place, "needs_id": f"parent-{i // 3}"}
            for i in range(1500)
            for place in range(2)
        ],
        schema.task_stages: [{"job_id": f"adding-{i}", "attempt": 1, "seq": 0, "body": "{}"} for i in range(300)],
        schema.spawns: [
            {"job_id": f"adding-{i}", "attempt": 1, "workflow_id": f"flow-{i}", "remaining": 1} for i in range(300)
        ],
        schema.worker_pools: [{"pool_id": f"pool-{i}"} for i in range(20)],
        schema.pool_assignments: [
            {"pool_id": f"pool-{i}", "node_id": f"node-{n}", "revision": 1, "workers": 1}
            for i in range(20)
            for n in range(50)
        ],
        schema.gpus: [
            {"gpu_uuid": f"GPU-{i}", "node_id": f"node-{i // 8}", "gpu_index": i % 8, "name": "g"}
            | {"total_mb": 1000, "usable_mb": 900}
            for i in range(400)
        ],
        schema.policy_history: [
            {"scope": "agent", "name": f"agent-{i % 100}", "version": i // 100 + 1, "document_after": "{}"}
            for i in range(1000)
        ],
        schema.schedules: [
            {"schedule_id": f"s-{i}", "every_seconds": 3600.0, "anchor_at": moment(i), "job": "{}"}
            | {"catch_up": "skip", "catch_up_max": 1}
            | {"next_fire_at": moment(i) if i < 10 else moment(i) + timedelta(days=9)}
            for i in range(500)
        ],
    }
