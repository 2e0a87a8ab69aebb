"""What a read costs does not grow with what is kept: the rows that MariaDB reads are counted, among thousands."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Connection, insert

from orchestrator.jobs import Status
from orchestrator.store import dead_letters, failures, paging, schema, worker_reads, workflows
from orchestrator.store.database import Database
from orchestrator.store.dialect import utc_shift
from orchestrator.workflows import FlowStatus
from tests.conftest import empty
from tests.factories import many_jobs, rows_read

#: Rows of each kind, and those that one question may look at.
MANY, WINDOW = 3000, 100
#: Entries of an index for the end of a window, its rows, and as many of the table beside it; and a row at each end.
MOST = 3 * WINDOW + 10


@pytest.fixture(scope="module")
def crowded(mariadb_with_tables: Database) -> Iterator[Database]:
    """Dead letters, failed jobs, workflows and workers that ended, of which hardly one is what anybody looks for."""
    db = mariadb_with_tables
    empty(db)
    many_jobs(db, MANY, status="dead_letter", queued=None, agent=lambda i: f"agent-{i % 2}")
    many_jobs(db, MANY, job_id=lambda i: f"failed-{i:06}", status="failed", queued=None)
    letters = [{"job_id": f"many-{i:06}", "reason": "timeout", "attempts": 3} for i in range(MANY)]
    flows = [
        {"workflow_id": f"w-{i}", "agent": "ann", "content_hash": "", "status": status, "total": 1}
        for i, status in enumerate([FlowStatus.RUNNING, FlowStatus.DONE] * (MANY // 2))
    ]
    worker = {"node_id": "n", "pool_id": "p", "hostname": "h", "pid": 1, "slots": 1, "types": "[]", "batch_sizes": "{}"}
    ended = [worker | {"worker_id": f"gone-{i}", "status": "lost" if i % 2 else "stopped"} for i in range(MANY)]

    def fill(conn: Connection) -> None:
        conn.execute(insert(schema.dead_letters), letters)
        conn.execute(insert(schema.workflows), flows)
        conn.execute(insert(schema.workers).values(last_heartbeat=utc_shift(-7200.0)), ended)
        conn.execute(insert(schema.workers), [worker | {"worker_id": f"lives-{i}"} for i in range(10)])

    db.write(fill)
    yield db
    empty(db)


def letters(**named: Any) -> Callable[[Connection], Any]:
    return lambda conn: dead_letters.page(conn, dead_letters.Filter(**named), 50, None)


def flows(status: FlowStatus | None, agent: str | None) -> Callable[[Connection], Any]:
    return lambda conn: workflows.page(conn, workflows.Filter(status, agent), 50, None)


def to_change(**named: Any) -> Callable[[Connection], Any]:
    return lambda conn: dead_letters.look(conn, dead_letters.Filter(**named), None)


def failed(status: Status, **named: Any) -> Callable[[Connection], Any]:
    return lambda conn: failures.look(conn, failures.Filter(**named), status, None)


READS: dict[str, Callable[[Connection], Any]] = {
    "letters": letters(),
    "letters of a type": letters(type="unheard-of"),
    "letters of an agent": letters(agent="nobody"),
    "letters of an agent that has many jobs": letters(agent="anonymous"),
    "letters of a pool": letters(pool_id="nowhere"),
    "letters with a reason": letters(reason="nothing"),
    "letters with a reason, of an agent": letters(reason="nothing", agent="agent-1"),
    "letters to change": to_change(),
    "letters of a type to change": to_change(type="unheard-of"),
    "failed jobs to start over": failed(Status.FAILED),
    "failed jobs of a type to start over": failed(Status.FAILED, type="unheard-of"),
    "letters to start over": failed(Status.DEAD_LETTER, agent="nobody"),
    "count of letters": lambda conn: dead_letters.count(conn, most=WINDOW),
    "count of letters of an agent": lambda conn: dead_letters.count(conn, dead_letters.Filter(agent="me"), WINDOW),
    "workflows": flows(None, None),
    "workflows that run": flows(FlowStatus.RUNNING, None),
    "workflows of an agent": flows(None, "ann"),
    "workflows of an agent that run": flows(FlowStatus.RUNNING, "nobody"),
    "workflows of an agent that failed": flows(FlowStatus.FAILED, "ann"),
    "workers": lambda conn: worker_reads.page(conn, 50),
    "batches of workers": worker_reads.batch_sizes,
}


#: Those that need not even look at the rows of a window.
CHEAPER = {"count of letters": WINDOW + 10, "workers": 50, "batches of workers": 50}


@pytest.mark.parametrize("name", READS)
def test_a_read_costs_its_window_whatever_is_kept(crowded, monkeypatch, name):
    monkeypatch.setattr(paging, "WINDOW", WINDOW)
    with crowded.engine.connect() as connection:
        before = rows_read(connection)
        READS[name](connection)
        assert rows_read(connection) - before <= CHEAPER.get(name, MOST)
