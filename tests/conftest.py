"""Fixtures of all tests: a clean environment and real servers.

Servers start when the first test asks for one and are shared by the session. A server that is not installed
skips its tests on a laptop and fails them when CI is set: there, a skip would pass for a success.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import pytest

from tests.servers import MariaDB, MissingBinaryError, Redis, Server, Valkey

S = TypeVar("S", bound=Server)


def pytest_configure() -> None:
    # Before any test module is imported: what a developer has exported must not decide what the tests see.
    for name in [name for name in os.environ if name.startswith("ORCH_")]:
        del os.environ[name]


# --- servers ---


def new_server(kind: type[S]) -> S:
    try:
        return kind()
    except MissingBinaryError as missing:
        if os.environ.get("CI"):
            pytest.fail(f"{missing}, and CI is set")
        pytest.skip(f"{missing}; `make test` as root installs it on Debian")


@pytest.fixture
def private_server() -> Iterator[Callable[[type[S]], S]]:
    """Start servers of a test's own, to stop and kill: `private_server(Redis)`."""
    with ExitStack() as servers:

        def start(kind: type[S]) -> S:
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


# --- addresses ---


@pytest.fixture(params=["mariadb", "sqlite"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Both databases in turn: one of MariaDB, shared by the session; a fresh file of SQLite per test."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'orchestrator.db'}"
    mariadb: MariaDB = request.getfixturevalue("mariadb")
    return mariadb.create_database("orchestrator_tests")


@pytest.fixture(params=["redis", "valkey"])
def redis_url(request: pytest.FixtureRequest) -> str:
    """Both stream servers in turn, empty."""
    server: Redis = request.getfixturevalue(f"{request.param}_server")
    server.flush()
    return server.url


# --- fixtures that need orchestrator code (schema, truncation, store, stream) go below ---
