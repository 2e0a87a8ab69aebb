"""Workers that are declared dead now: what comes of it is tested without the wait for their silence."""

import signal

from sqlalchemy import ColumnElement, Connection, select, update

from orchestrator.store import nodes, schema
from orchestrator.store.dialect import utc_shift
from tests.cluster import Cluster, Member


def freeze(cluster: Cluster, worker: Member) -> None:
    """Stop it between two heartbeats: in one, others would wait for its row until the server ends its transaction."""
    cluster.db.write(lambda conn: _signal(conn, worker, signal.SIGSTOP))


def declare_dead(cluster: Cluster, worker: Member, number: signal.Signals) -> None:
    """Stop or kill it by this signal, and do what the leader does about one that was silent for an hour."""

    def work(conn: Connection) -> None:
        _signal(conn, worker, number)
        conn.execute(update(schema.workers).where(_row(worker)).values(last_heartbeat=utc_shift(-3600.0)))
        assert len(nodes.declare_lost(conn, 1800.0, 10)) == 1

    cluster.db.write(work)


def _signal(conn: Connection, worker: Member, number: signal.Signals) -> None:
    """While we hold its row, and so it does not."""
    conn.execute(select(schema.workers).where(_row(worker)).with_for_update()).one()
    worker.send(number)


def _row(worker: Member) -> ColumnElement[bool]:
    return schema.workers.c.pid == worker.process.pid
