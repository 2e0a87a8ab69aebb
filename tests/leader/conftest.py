"""Leaders need both kinds of server; each database meets one of the stream servers, not all pairs."""

from pathlib import Path

import pytest

from orchestrator.leader.context import DutyContext
from orchestrator.leader.term import borrow
from orchestrator.publisher import Publisher
from tests.factories import STALE_S


@pytest.fixture(params=["mariadb+redis", "sqlite+valkey"])
def servers(request):
    return request.param.split("+")


@pytest.fixture
def database_url(servers, request, tmp_path: Path):
    if servers[0] == "sqlite":
        return f"sqlite:///{tmp_path / 'orchestrator.db'}"
    return request.getfixturevalue("mariadb_url")


@pytest.fixture
def redis_url(servers, request):
    server = request.getfixturevalue(f"{servers[1]}_server")
    server.flush()
    return server.url


@pytest.fixture
def config(db_url, redis_url, settings):
    """Settings of one instance; what comes with time (a term's end, silence, idleness) takes longer than a test."""
    return settings(
        database_url=db_url,
        redis_url=redis_url,
        claim_idle_ms=30_000,
        leader_ttl_s=600.0,
        republish_after_s=30.0,
        worker_timeout_s=30.0,
        gpu_stale_s=STALE_S,
        lane_window_min=20,
        lane_window_max=100,
    )


@pytest.fixture
def publisher(db, hub, config):
    return Publisher(db, hub, config)


@pytest.fixture
def context(db, hub, config, publisher):
    """What a duty is called with, by the leader of this test."""
    return DutyContext(borrow(db, config, "the-test"), hub, publisher, config)
