"""Caps on real processes: what the handlers themselves saw."""

from functools import partial

import pytest

from tests.bench import caps
from tests.cluster import Cluster


@pytest.fixture
def capped(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(caps, "Cluster", partial(Cluster, forked=True))
    opened = caps.Capped(cluster.settings, tmp_path, leads=False)
    yield opened
    opened.close()


def test_no_more_run_at_once_than_caps_allow_and_whoever_ends_lets_the_next_one_go(capped):
    """Nobody leads here: whom no end let go would wait for ever."""
    capped.run(count=40, seconds=0.1, timeout_s=60)
    most = caps.most_at_once(capped.ledger)
    assert {key: seen for key, seen in most.items() if seen > caps.CAPS[key.partition(":")[0]]} == {}
    assert max(most.values()) == caps.CAPS["agent"]
