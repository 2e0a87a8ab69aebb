"""What a supervisor has once, for all of its posts."""

import threading
from contextlib import ExitStack
from unittest.mock import Mock

import pytest
from sqlalchemy import text

from orchestrator import settings as setting_rules
from orchestrator.store.database import TookTooLong
from tests.factories import hire
from tests.proxy import Proxy
from tests.waiting import wait_until
from tests.worker.test_keepalive import Member, make_old
from worker.heart import Heart
from worker.keepalive import Keepalive
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
def too_long_s():
    return 10.0


@pytest.fixture
def heart(far, monkeypatch, too_long_s):
    """For which half a second is long, and `too_long_s` too long."""
    monkeypatch.setattr(setting_rules, "SHORTEST_HEARTBEAT_LIMIT_S", 0.1)
    opened = Heart.of(far[0].model_copy(update={"worker_timeout_s": 1.5, "db_timeout_s": too_long_s}))
    yield opened
    opened.close()


class Asked:
    """Takes the database a second when it is slow; remembers how often it was asked."""

    def __init__(self) -> None:
        self.slow, self.times = True, 0

    def __call__(self, conn):
        self.times += 1
        return conn.execute(text(f"SELECT SLEEP({1.0 * self.slow})")).scalar_one()


def test_a_server_that_is_slow_is_waited_for_and_not_asked_twice_again_and_again(heart):
    """Else all workers of a busy cluster would be declared dead, and their jobs make it busier."""
    asked = Asked()
    assert heart.write(asked) == 0
    assert asked.times == 2, "the first connection might have died in silence"
    assert heart.write_at_once(asked) == 0
    assert asked.times == 3, "this one answered, if late"
    asked.slow = False
    heart.write(asked)
    asked.slow, asked.times = True, 0
    assert heart.write(asked) == 0
    assert asked.times == 2, "it was quick again meanwhile"


def test_what_may_miss_a_beat_is_not_asked_twice(heart):
    asked = Asked()
    with pytest.raises(TookTooLong):
        heart.write(asked, again_when_late=False)
    assert asked.times == 1


def test_progress_and_samples_may_miss_a_beat(heart, given, caplog):
    asked = Asked()
    assert Keepalive(heart, "node-1", Mock(), given)._try("progress", asked) is None
    assert asked.times == 1
    assert "not written" in caplog.text


@pytest.mark.parametrize("too_long_s", [0.8])
def test_what_took_too_long_twice_is_not_asked_again(heart):
    """The next beat is due: it says the same."""
    asked = Asked()
    with pytest.raises(TookTooLong):
        heart.write(asked)
    assert asked.times == 2


def test_a_second_try_has_a_connection_that_cannot_have_died(heart, far):
    asked = Asked()
    heart.write(asked)
    asked.slow = False
    heart.write(asked)
    heart.write(asked)
    far[1].strand()  # that of the first try, and that of the last second one
    heart.write(asked)
