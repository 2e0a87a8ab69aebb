"""A worker's surroundings: MariaDB, Redis and, where needed, an orchestrator in this process."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.daemon import Orchestrator
from orchestrator.settings import Settings
from tests.cluster import Cluster


@pytest.fixture
def cluster(db_url: str, redis_url: str, settings: Callable[..., Settings], tmp_path: Path) -> Iterator[Cluster]:
    """Real processes on both databases and both stream servers."""
    given = settings(
        database_url=db_url,
        redis_url=redis_url,
        data_dir=tmp_path,
        gpu_backend="sim:2x24576",
        node_id="node-1",
        worker_slots=2,
        worker_grace_s=0.5,
        worker_timeout_s=2.0,
    )
    opened = Cluster(given, tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def orchestrator(cluster: Cluster) -> Iterator[Orchestrator]:
    """Publishes and leads from inside the test's process."""
    running = Orchestrator(cluster.settings)
    running.start()
    yield running
    running.close()
