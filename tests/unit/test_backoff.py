"""How long whoever failed waits."""

from orchestrator.backoff import doubled, spread


def test_it_doubles_up_to_its_limit_however_often():
    assert [doubled(0.5, times, 60.0) for times in range(4)] == [0.5, 1.0, 2.0, 4.0]
    assert doubled(0.5, 7, 60.0) == doubled(0.5, 100_000, 60.0) == 60.0
    assert doubled(0.5, -1, 60.0) == 0.5, "before the first failure there is nothing to double"


def test_not_all_come_back_at_one_moment_and_nobody_later_than_told():
    waits = [spread(10.0) for _ in range(200)]
    assert all(5.0 <= wait_s <= 10.0 for wait_s in waits) and len(set(waits)) > 100
