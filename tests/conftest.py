"""Fixtures of all tests: a clean environment and real servers.

Servers start when the first test asks for one and are shared by the session. A server that is not installed
skips its tests on a laptop and fails them when CI is set: there, a skip would pass for a success. What lies in
../shared beside the project is no part of it: without it, tests that read it are skipped, and every run names them.
"""

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from shutil import copyfile
from tempfile import mkdtemp
from typing import Any, TypeVar

import hypothesis
import pytest
import redis
from sqlalchemy import create_engine, text
from sqlalchemy.util import LRUCache

from orchestrator.settings import Settings
from orchestrator.store import schema
from orchestrator.store.database import Database
from orchestrator.stream.hub import Hub
from tests import status_writes
from tests.gpu.driver import MissingCompilerError, build
from tests.servers import MariaDB, MissingBinaryError, Redis, Server, Valkey, find_binary, memory
from tests.tables import make_tables

S = TypeVar("S", bound=Server)
T = TypeVar("T")

# Hypothesis measures by the wall clock: 200 ms for an example and a second to draw some are soon over where others run.
hypothesis.settings.register_profile("patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("patient")


def _hear_signals() -> None:
    """However we were started (nohup, in the background of a script): what tests start can be sent any signal."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)


def pytest_configure() -> None:
    # Before any test module is imported: what a developer has exported must not decide what the tests see.
    for name in [name for name in os.environ if name.startswith(("ORCH_", "GPUORCH_", "OTEL_"))]:
        del os.environ[name]
    # Tests start programs by the hundred: each would compile all of the source again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    Server.home = memory()
    if Server.home and "PYTEST_DEBUG_TEMPROOT" not in os.environ:
        # Where pytest makes the folders of tests; by such a name they are removed when their tests are gone.
        os.environ["PYTEST_DEBUG_TEMPROOT"] = mkdtemp(prefix=f"orch-pytest-{os.getpid()}-", dir=Server.home)
    _hear_signals()
    status_writes.watch()


@pytest.fixture(scope="module", autouse=True)
def _what_is_left_open_is_found() -> Iterator[None]:
    """In the file that left it: later it would be found in a test that cannot help it, or after the last."""
    yield
    gc.collect()


# --- servers ---


def installed(find: Callable[[], T]) -> T:
    """What was found; without it the test is skipped, or fails when CI is set."""
    try:
        return find()
    except MissingBinaryError as missing:
        if os.environ.get("CI"):
            pytest.fail(f"{missing}, and CI is set")
        pytest.skip(f"{missing}; `make test` as root installs it on Debian")


def new_server(kind: Callable[[], S]) -> S:
    return installed(kind)


@pytest.fixture
def private_server() -> Iterator[Callable[[Callable[[], S]], S]]:
    """Start servers of a test's own, to stop and kill: `private_server(Redis)`."""
    with ExitStack() as servers:

        def start(kind: Callable[[], S]) -> S:
            server = new_server(kind)
            servers.enter_context(server)
            return server

        yield start


@pytest.fixture(scope="session")
def mariadb() -> Iterator[MariaDB]:
    with new_server(MariaDB) as server:
        yield server


@pytest.fixture(scope="session")
def redis_server() -> Iterator[Redis]:
    with new_server(Redis) as server:
        yield server


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[Valkey]:
    with new_server(Valkey) as server:
        yield server


@pytest.fixture(scope="session")
def promtool() -> str:
    """The program that checks configurations and rules; it comes with Prometheus."""
    return installed(lambda: find_binary("promtool"))


@pytest.fixture(scope="session")
def driver_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in for the NVIDIA driver: `Driver(path, driver_library).environment()` is all a process needs."""
    try:
        return build(tmp_path_factory.mktemp("driver"))
    except MissingCompilerError as missing:
        if os.environ.get("CI"):
            pytest.fail(f"{missing}, and CI is set")
        pytest.skip(f"{missing}; `make test` as root installs it on Debian")


# --- addresses ---


@pytest.fixture(scope="session")
def mariadb_url(mariadb: MariaDB) -> str:
    """The one database of MariaDB that the tests of a session share."""
    return mariadb.create_database("orchestrator_tests")


@pytest.fixture(params=["mariadb", "sqlite"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Both databases in turn: one of MariaDB, shared by the session; a fresh file of SQLite per test."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'orchestrator.db'}"
    return str(request.getfixturevalue("mariadb_url"))


@pytest.fixture(params=["redis", "valkey"])
def redis_url(request: pytest.FixtureRequest) -> str:
    """Both stream servers in turn, empty."""
    server: Redis = request.getfixturevalue(f"{request.param}_server")
    server.flush()
    return server.url


# --- settings ---

#: Everything that a test may have to wait for, as short as the relations between settings allow; but what a leader does
#: again and again not so often that its tests mostly do that. And a window for all that it submits, also where nobody
#: reads.
SHORT: dict[str, Any] = {
    "claim_idle_ms": 1000,
    "db_timeout_s": 5.0,
    "lane_window_min": 32,
    "leader_interval_s": 0.2,
    "leader_trust_margin_s": 0.5,
    "leader_ttl_s": 2.0,
    "publish_interval_s": 0.3,
    "purge_interval_s": 0.4,
    "reclaim_interval_s": 0.4,
    "redis_block_ms": 200,
    "redis_timeout_s": 1.0,
    "republish_after_s": 0.6,
    "retry_base_s": 0.1,
    "retry_cap_s": 1.0,
    "worker_heartbeat_s": 0.2,
    "worker_timeout_s": 1.0,
}


@pytest.fixture
def settings() -> Callable[..., Settings]:
    """Settings with short times; what a test gives beats them: `settings(redis_url=…, leader_ttl_s=3.0)`."""
    return lambda **given: Settings(**(SHORT | given))


# --- databases ---


class _Compiled(LRUCache[Any, Any]):
    """Statements by the kind of database alone: two engines of a kind compile them alike."""

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get((key[0].name, *key[1:]), default)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__((key[0].name, *key[1:]), value)


@pytest.fixture(scope="session", autouse=True)
def _compiled_once() -> Iterator[None]:
    """A program has one database and compiles its statements once; tests open one after the other."""
    with pytest.MonkeyPatch.context() as patch:
        options = {"compiled_cache": _Compiled(2000)}
        for database in ("mariadb", "sqlite"):
            engines = f"orchestrator.store.dialect.{database}.create_engine"
            patch.setattr(engines, partial(create_engine, execution_options=options))
        yield


@pytest.fixture(scope="session")
def mariadb_with_tables(mariadb_url: str) -> Iterator[Database]:
    """Open for the whole session: connecting takes longer than most tests."""
    database = Database(Settings(**SHORT, database_url=mariadb_url))
    make_tables(database.engine)
    yield database
    database.close()


@pytest.fixture(scope="session")
def sqlite_with_tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "orchestrator.db"
    engine = create_engine(f"sqlite:///{path}")
    make_tables(engine)
    engine.dispose()
    return path


#: Which tables have rows: one question instead of one statement for each table, of which a test writes few.
_WRITTEN = text(
    " UNION ALL ".join(f"SELECT '{name}' WHERE EXISTS (SELECT 1 FROM {name})" for name in schema.metadata.tables)
)


def empty(database: Database) -> None:
    with database.engine.begin() as connection:
        written = set(connection.execute(_WRITTEN).scalars())
        for table in schema.metadata.sorted_tables:
            if table.name in written:
                connection.execute(table.delete())


@pytest.fixture
def open_database(settings: Callable[..., Settings]) -> Iterator[Callable[..., Database]]:
    """Open databases that the test's end closes: `open_database(url, db_pool_size=2)`."""
    with ExitStack() as opened:

        def start(url: str, **given: Any) -> Database:
            database = Database(settings(database_url=url, **given))
            opened.callback(database.close)
            return database

        yield start


@pytest.fixture
def db_url(database_url: str, request: pytest.FixtureRequest) -> str:
    """The address of a database with empty tables; both kinds in turn."""
    if database_url.startswith("sqlite"):
        copyfile(request.getfixturevalue("sqlite_with_tables"), database_url.removeprefix("sqlite:///"))
    else:
        empty(request.getfixturevalue("mariadb_with_tables"))
    return database_url


@pytest.fixture
def db(db_url: str, open_database: Callable[..., Database], request: pytest.FixtureRequest) -> Database:
    """Both databases in turn, with empty tables."""
    if db_url.startswith("sqlite"):
        return open_database(db_url)
    database: Database = request.getfixturevalue("mariadb_with_tables")
    return database


@pytest.fixture
def maria_db(mariadb_with_tables: Database) -> Database:
    """MariaDB alone, for what only a server can do: be killed, explain, let several write at once."""
    empty(mariadb_with_tables)
    return mariadb_with_tables


# --- streams ---


@pytest.fixture
def hub(redis_url: str, settings: Callable[..., Settings]) -> Iterator[Hub]:
    """Both stream servers in turn, empty."""
    opened = Hub(settings(redis_url=redis_url))
    yield opened
    opened.close()


@pytest.fixture
def raw(redis_url: str) -> Iterator[redis.Redis]:
    """A plain client of the same server, to look behind the hub."""
    with redis.Redis.from_url(redis_url, socket_timeout=5, decode_responses=True) as client:
        yield client


# --- faults ---


@pytest.fixture
def lose_commits(db: Database, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`lose_commits(n)`: the next n commits happen, but their answers get lost on the way."""
    dialect: Any = db.engine.dialect
    commit, errors, to_lose = dialect.do_commit, dialect.dbapi, 0
    lost = (
        errors.ProgrammingError("Cannot operate on a closed database.")
        if dialect.name == "sqlite"
        else errors.OperationalError(2013, "Lost connection to server during query")
    )

    def commit_without_answer(connection: Any) -> None:
        nonlocal to_lose
        commit(connection)
        if to_lose > 0:
            to_lose -= 1
            raise lost

    def arm(count: int) -> None:
        nonlocal to_lose
        to_lose = count

    monkeypatch.setattr(dialect, "do_commit", commit_without_answer)
    return arm
