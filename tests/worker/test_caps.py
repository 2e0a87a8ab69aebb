"""Caps on real processes: what the handlers themselves saw, and how long it took them."""

import pytest

from tests.bench import caps


@pytest.fixture
def capped(cluster, tmp_path):
    opened = caps.Capped(cluster.settings, tmp_path)
    yield opened
    opened.close()


def test_no_more_run_at_once_than_caps_allow_and_no_seat_stays_empty_for_long(capped):
    count, seconds = 40, 0.2
    capped.run(count, seconds, timeout_s=60)
    most = caps.most_at_once(capped.ledger)
    assert {key: seen for key, seen in most.items() if seen > caps.CAPS[key.partition(":")[0]]} == {}
    # Without somebody who lets the next one go, each would wait for the leader.
    assert caps.seconds_taken(capped.ledger) < 3 * caps.least_seconds(count, seconds)
