"""A whole orchestrator behind real HTTP; `api` is a client of it.

What the databases do differently is tested with the store. So most tests here run on MariaDB; those with the mark
`embedded_too` on SQLite as well: what is written there is any text, or written by many at once, or is the database.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
from sqlalchemy import func, select, text

from orchestrator.api.app import create_app
from orchestrator.api.backend import Backend
from orchestrator.api.server import HttpServer, listen, url_of
from orchestrator.daemon import Orchestrator
from orchestrator.settings import Settings
from orchestrator.store import schema
from orchestrator.store.database import Database
from tests.conftest import empty
from tests.servers import Redis
from tests.tables import make_tables
from tests.waiting import wait_until


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "database_url" in metafunc.fixturenames:
        both = metafunc.definition.get_closest_marker("embedded_too") is not None
        metafunc.parametrize("database_url", ["mariadb", "sqlite"] if both else ["mariadb"], indirect=True)


@pytest.fixture
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'orchestrator.db'}"
    return str(request.getfixturevalue("mariadb_url"))


#: What a leader writes by itself, whatever is asked for: of the audit the rows in its name, and all of these.
_OF_THE_LEADER = {schema.leadership.name, schema.tallies.name, schema.tally_cursor.name}
_NOT_ITS_OWN = " WHERE actor IS NULL OR actor NOT LIKE 'leader:%'"
_ROW_COUNTS = text(
    " UNION ALL ".join(
        f"SELECT '{name}', count(*) FROM {name}" + (_NOT_ITS_OWN if name == schema.audit.name else "")
        for name in schema.metadata.tables.keys() - _OF_THE_LEADER
    )
)


@dataclass
class Running:
    """One instance as a client sees it, and what is behind it."""

    http: httpx.Client
    orchestrator: Orchestrator
    server: HttpServer
    app: Any

    @property
    def db(self) -> Database:
        return self.orchestrator.db

    @property
    def backend(self) -> Backend:
        return self.app.state.backend

    def get(self, path: str, **given: Any) -> httpx.Response:
        return self.http.get(path, **given)

    def post(self, path: str, json: Any = None, **given: Any) -> httpx.Response:
        return self.http.post(path, json=json, **given)

    def submit(self, **fields: Any) -> str:
        """Submit a job that must be accepted; its id."""
        answer = self.post("/jobs/submit", {"type": "echo", "payload": {}} | fields)
        assert answer.status_code == 202, answer.text
        return answer.json()["job_id"]

    def led(self) -> Self:
        """Wait until it leads: whoever counts what is written must not meet its election."""
        wait_until(lambda: self.orchestrator.leader.term is not None, what="it leads")
        return self

    def wait_cancelled(self, workflow_id: str) -> None:
        """Wait until a workflow's cancel is over: tasks in the publisher's hands are left to the leader."""
        swept = select(schema.workflows.c.sweep).where(schema.workflows.c.workflow_id == workflow_id)
        wait_until(lambda: self.db.read(lambda conn: conn.execute(swept).scalar_one()) is None, what="all are stopped")

    def count_jobs(self) -> int:
        return self.db.read(lambda conn: conn.execute(select(func.count()).select_from(schema.jobs)).scalar_one())

    @contextmanager
    def adding_no_row(self) -> Iterator[None]:
        """What is asked for meanwhile adds no row to any table; whether it changes one is not seen."""
        before = self._row_counts()
        yield
        assert self._row_counts() == before

    def _row_counts(self) -> dict[str, int]:
        return self.db.read(lambda conn: {row[0]: row[1] for row in conn.execute(_ROW_COUNTS)})


#: What would happen by itself, and what no test here waits for. Nobody beats for these workers, nobody measures their
#: GPUs again, and a machine that stands still for seconds costs neither the leader its term nor a session its
#: transaction (whose limit is a part of a worker's). Nothing is old enough to be forgotten, so nobody looks for it.
PATIENT: dict[str, Any] = {
    "gpu_stale_s": 60.0,
    "leader_ttl_s": 30.0,
    "republish_after_s": 30.0,
    "retention_audit_s": 0.0,
    "retention_jobs_s": 0.0,
    "retention_results_s": 0.0,
    "worker_timeout_s": 45.0,
}


@contextmanager
def running(settings: Settings) -> Iterator[Running]:
    with ExitStack() as stack:
        orchestrator = Orchestrator(settings)
        stack.callback(orchestrator.close)
        orchestrator.start()
        listener = stack.enter_context(listen("127.0.0.1", 0))
        app = create_app(orchestrator)
        server = HttpServer(app, listener)
        thread = threading.Thread(target=server.run, name="http")
        thread.start()
        stack.callback(thread.join, 20)
        stack.callback(setattr, server, "should_exit", True)
        wait_until(lambda: server.started, what="the server listens")
        # Plain HTTP: reading the system's certificate authorities would take longer than the test.
        plain = httpx.Client(base_url=url_of(listener), timeout=30, trust_env=False, verify=False)  # noqa: S501
        http = stack.enter_context(plain)
        yield Running(http, orchestrator, server, app)


@pytest.fixture
def run_api(settings: Callable[..., Settings], redis_server: Redis) -> Iterator[Callable[..., Running]]:
    """Start an instance: `run_api(database_url=…, payload_max_bytes=100)`."""
    redis_server.flush()
    with ExitStack() as stack:
        usual = {"redis_url": redis_server.url} | PATIENT
        yield lambda **given: stack.enter_context(running(settings(**(usual | given))))


@pytest.fixture
def api(db: Database, run_api: Callable[..., Running]) -> Running:
    """An instance on empty tables."""
    return run_api(database_url=str(db.settings.database_url))


@pytest.fixture
def maria_api(maria_db: Database, run_api: Callable[..., Running]) -> Running:
    return run_api(database_url=str(maria_db.settings.database_url))


@pytest.fixture
def private_database(open_database: Callable[..., Database]) -> Callable[[str], str]:
    """Give a server of a test's own the tables."""

    def prepare(url: str) -> str:
        database = open_database(url)
        make_tables(database.engine)
        empty(database)
        return url

    return prepare
