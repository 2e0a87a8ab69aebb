"""What a supervisor has once, for all of its posts."""

import threading
from contextlib import ExitStack

import pytest
from sqlalchemy import text

from orchestrator import settings as setting_rules
from orchestrator.store import schema
from tests.factories import hire
from tests.proxy import Proxy
from tests.waiting import wait_until
from tests.worker.test_keepalive import Member, make_old
from worker.node import Node
from worker.supervisor import Supervisor


@pytest.fixture
def given(maria_db, redis_url, settings):
    return settings(
        database_url=maria_db.settings.database_url,
        redis_url=redis_url,
        node_id="node-1",
        gpu_backend="none",
        db_pool_size=1,
    )


@pytest.fixture
def node(given):
    opened = Node(given, lambda: None)
    yield opened
    opened.close()


@pytest.fixture
def far(given, mariadb):
    """Settings with which others wait for an answer longer than any test does, and the way to the database."""
    with Proxy(mariadb.port) as proxy:
        url = given.database_url.replace(f":{mariadb.port}/", f":{proxy.port}/")
        yield given.model_copy(update={"database_url": url, "db_timeout_s": 600.0}), proxy


def test_no_heartbeat_waits_for_a_connection_of_the_posts(maria_db, node):
    member = Member(hire(maria_db))
    make_old(maria_db)
    with ExitStack() as held:
        for _ in range(2 * node.settings.db_pool_size):
            held.enter_context(node.db.engine.connect())
        node.keepalive.start()
        node.keepalive.join(member.pulse)
    assert member.heard(maria_db)


def test_a_bell_makes_everybody_look(maria_db, node):
    """The supervisor at its orders, and all workers at what became of their jobs."""
    rung = []
    node._rang = lambda: rung.append("rang")
    node.keepalive._interval_s = 600.0
    member = Member(hire(maria_db))
    node.start()
    node.keepalive.join(member.pulse)
    make_old(maria_db)
    node._hear()
    wait_until(lambda: member.heard(maria_db), what="a heartbeat")
    assert rung == ["rang"]


def test_a_worker_whose_connection_died_in_silence_is_heard_on_another(maria_db, far):
    settings, proxy = far
    node = Node(settings, lambda: None)
    node.keepalive.start()
    member = Member(hire(maria_db))
    node.keepalive.join(member.pulse)
    proxy.strand()
    make_old(maria_db)
    wait_until(lambda: member.heard(maria_db), what="a heartbeat")
    assert member.told == []
    proxy.heal()
    node.close()


def test_a_node_whose_connection_died_in_silence_runs_its_pools_on(far, caplog):
    """Else the leader would give its pools to other nodes."""
    settings, proxy = far
    supervisor = Supervisor(settings)
    supervisor._look()
    proxy.strand()
    looks = threading.Thread(target=supervisor._look, daemon=True)
    looks.start()
    looks.join(30.0)
    assert not looks.is_alive()
    assert "orders" not in caplog.text
    supervisor._node.close()


@pytest.fixture
def slow_rows(maria_db):
    """Whoever writes a worker's row takes a second to do so, and holds it meanwhile."""
    trigger = f"CREATE TRIGGER slow_rows BEFORE UPDATE ON {schema.workers.name} FOR EACH ROW SET @slept = SLEEP(1)"
    maria_db.write(lambda conn: conn.execute(text(trigger)))
    yield
    maria_db.write(lambda conn: conn.execute(text("DROP TRIGGER slow_rows")))


def test_a_worker_is_heard_however_slow_its_row_is_to_write(maria_db, given, monkeypatch, slow_rows):
    """Its first try is not given up for a second one, which would find the row held by the first."""
    monkeypatch.setattr(setting_rules, "SHORTEST_HEARTBEAT_LIMIT_S", 0.1)
    node = Node(given.model_copy(update={"worker_timeout_s": 1.5}), lambda: None)
    assert node.settings.heartbeat_limit_s == 0.5
    node.keepalive.start()
    member = Member(hire(maria_db))
    node.keepalive.join(member.pulse)
    assert member.heard(maria_db)
    node.close()
