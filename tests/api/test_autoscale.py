"""/autoscale/{pool_id}: the same everywhere, never a zero that nobody knows to be true."""

import pytest

from tests.api.conftest import Running
from tests.factories import hire

pytestmark = pytest.mark.embedded_too


def test_an_empty_lane_needs_nobody(api: Running) -> None:
    assert api.get("/autoscale/default").json() == {
        "pool_id": "default",
        "depth": 0,
        "waiting": 0,
        "running": 0,
        "delayed": 0,
        "blocked": 0,
        "at_least": False,
        "oldest_wait_seconds": 0.0,
        "mean_latency_seconds": 0.0,
        "ended_lately": False,
        "window_seconds": 60.0,
        "workers": 0,
        "busy_workers": 0,
        "draining": 0,
        "slots_per_worker": 4.0,
        "open": True,
        "paused": False,
        "desired_workers": 0,
    }


def test_one_job_wakes_a_lane(api: Running) -> None:
    api.submit(pool_id="gold")
    found = api.get("/autoscale/gold").json()
    assert (found["depth"], found["desired_workers"]) == (1, 1)
    assert api.get("/autoscale/default").json()["depth"] == 0


def test_a_running_job_keeps_its_worker(api: Running) -> None:
    job_id = api.submit(pool_id="gold")
    hand = hire(api.db, pool="gold")
    (claim,) = hand.claim(job_id)
    found = api.get("/autoscale/gold").json()
    assert (found["depth"], found["running"], found["busy_workers"], found["desired_workers"]) == (1, 1, 1, 1)
    hand.finish(claim)
    found = api.get("/autoscale/gold").json()
    assert (found["depth"], found["desired_workers"], found["ended_lately"]) == (0, 0, True)


@pytest.mark.parametrize("what", [{"scope": "pool", "name": "gold"}, {"scope": "all"}])
def test_a_paused_lane_says_what_waits_and_wants_nobody_for_it(api: Running, what: dict[str, str]) -> None:
    for _ in range(3):
        api.submit(pool_id="gold")
    assert api.post("/control/pause", what).status_code == 200
    found = api.get("/autoscale/gold").json()
    assert (found["depth"], found["paused"], found["desired_workers"]) == (3, True, 0)
    assert api.post("/control/resume", what).status_code == 200
    found = api.get("/autoscale/gold").json()
    assert (found["depth"], found["paused"], found["desired_workers"]) == (3, False, 1)


def test_a_name_that_nobody_knows_is_a_problem_and_no_zero(api: Running) -> None:
    api.submit(pool_id="gold")
    for name in ("typo", "gold%20", "x" * 200, "a%2Fb"):
        answer = api.get(f"/autoscale/{name}")
        assert answer.status_code == 404, name
        assert "depth" not in answer.json()
    assert api.get("/autoscale/typo").json()["code"] == "lane_not_found"
