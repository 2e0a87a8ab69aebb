"""Requests to look at pools: each leader reads them under a name of its own, which does not stay for ever."""

import pytest

from orchestrator.stream import preloads
from orchestrator.stream.hub import Hub
from orchestrator.stream.preloads import GROUP

KEY = "stream:orchestrator:preloads"


@pytest.fixture
def hub(redis_url, settings):
    opened = Hub(settings(redis_url=redis_url))
    yield opened
    opened.close()


@pytest.fixture
def take(hub):
    """Read what was asked for, as an orchestrator does that was started just now: `take("one")`."""
    opened = []

    def new(name):
        hub.ask_for_pools("gold")
        opened.append(hub.preloads())
        return opened[-1].take(name, 1)

    yield new
    for one in opened:
        one.ear.close()


def readers(raw):
    return {consumer["name"] for consumer in raw.xinfo_consumers(KEY, GROUP)}


def test_leaders_that_are_gone_are_forgotten_unless_something_is_theirs(raw, hub, take, monkeypatch):
    assert (take("old"), take("older")) == (1, 1)
    hub.ask_for_pools("gold")
    raw.xreadgroup(GROUP, "died", {KEY: ">"})  # and before it could acknowledge
    take("new")
    assert readers(raw) == {"old", "older", "died", "new"}  # they may be alive
    monkeypatch.setattr(preloads, "CONSUMER_IDLE_MS", 0)
    take("newer")
    assert readers(raw) == {"died", "newer"}


def test_others_are_not_looked_for_with_every_read(raw, hub):
    leader = hub.preloads()
    looks = lambda: raw.info("commandstats")["cmdstat_xinfo|consumers"]["calls"]
    leader.take("one", 1)
    before = looks()
    leader.take("one", 1)
    assert looks() == before
    leader.ear.close()
