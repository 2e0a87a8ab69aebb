"""A worker's surroundings: a database, a stream server and, where needed, an orchestrator in this process."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.daemon import Orchestrator
from orchestrator.settings import Settings
from tests.cluster import Cluster

#: Each database with one of the stream servers: their seams are tested elsewhere, here whole processes run.
PAIRS = [("mariadb", "redis"), ("sqlite", "valkey")]


@pytest.fixture(params=["mariadb"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'orchestrator.db'}"
    return str(request.getfixturevalue("mariadb_url"))


@pytest.fixture
def redis_url(database_url: str, request: pytest.FixtureRequest) -> str:
    kind = dict(PAIRS)["sqlite" if database_url.startswith("sqlite") else "mariadb"]
    server = request.getfixturevalue(f"{kind}_server")
    server.flush()
    return str(server.url)


@pytest.fixture
def worker_timeout_s() -> float:
    """Longer than a busy machine may be slow; who waits for a worker to be declared dead makes it shorter."""
    return 20.0


@pytest.fixture
def cluster(
    db_url: str, redis_url: str, settings: Callable[..., Settings], worker_timeout_s: float, tmp_path: Path
) -> Iterator[Cluster]:
    """Real processes, with a short life for everything that is waited for."""
    given = settings(
        database_url=db_url,
        redis_url=redis_url,
        data_dir=tmp_path,
        gpu_backend="sim:2x24576",
        node_id="node-1",
        worker_slots=2,
        worker_grace_s=0.5,
        worker_timeout_s=worker_timeout_s,
    )
    opened = Cluster(given, tmp_path, forked=True)
    yield opened
    opened.close()


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A file that holds jobs up (`gated_handlers`, for one) until the test deletes it."""
    path = tmp_path / "gate"
    path.touch()
    return path


@pytest.fixture
def orchestrator(cluster: Cluster) -> Iterator[Orchestrator]:
    """Publishes and leads from inside the test's process."""
    running = Orchestrator(cluster.settings)
    running.start()
    yield running
    running.close()
