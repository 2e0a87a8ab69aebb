"""What a supervisor has once, for all of its posts."""

from contextlib import ExitStack

import pytest

from tests.factories import hire
from tests.waiting import wait_until
from tests.worker.test_keepalive import Member, make_old
from worker.node import Node


@pytest.fixture
def node(maria_db, redis_url, settings):
    given = settings(
        database_url=maria_db.settings.database_url,
        redis_url=redis_url,
        node_id="node-1",
        gpu_backend="none",
        db_pool_size=1,
    )
    opened = Node(given, lambda: None)
    yield opened
    opened.close()


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
