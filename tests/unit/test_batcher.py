"""Group commit: everything that waits goes together, and every caller gets the answer to its own item."""

import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest

from orchestrator import remote
from orchestrator.errors import DatabaseUnavailable, Overloaded
from orchestrator.store.batcher import Batcher
from orchestrator.store.reports import Report
from orchestrator.store.settle import End, Outcome

WAIT_S = 10.0


class Door:
    """A flush that the test opens: it notes every batch and waits until it may go on."""

    def __init__(self, answer=lambda item: item):
        self.batches, self.entered, self.may_go = [], threading.Semaphore(0), threading.Semaphore(0)
        self.answer = answer

    def __call__(self, items):
        self.batches.append(list(items))
        self.entered.release()
        assert self.may_go.acquire(timeout=WAIT_S)
        return [self.answer(item) for item in items]

    def wait_entered(self):
        assert self.entered.acquire(timeout=WAIT_S)

    def open(self, times=1):
        for _ in range(times):
            self.may_go.release()


@pytest.fixture
def batchers():
    made = []

    def make(flush, **options):
        made.append(Batcher("test-batcher", flush, **options))
        return made[-1]

    yield make
    assert all(batcher.close(WAIT_S) for batcher in made)


def test_a_lone_item_is_flushed_at_once(batchers):
    batcher = batchers(lambda items: [item * 2 for item in items])
    assert batcher.submit(21).result(WAIT_S) == 42


def test_what_arrives_during_a_flush_goes_into_the_next_one_together(batchers):
    door = Door()
    batcher = batchers(door)
    first = batcher.submit(0)
    door.wait_entered()
    rest = [batcher.submit(n) for n in range(1, 6)]
    assert not first.done()
    door.open(2)
    assert [future.result(WAIT_S) for future in [first, *rest]] == [0, 1, 2, 3, 4, 5]
    assert door.batches == [[0], [1, 2, 3, 4, 5]]


def test_flushers_that_go_alone_leave_the_rest_for_one_batch(batchers):
    door, alone = Door(), True
    batcher = batchers(door, flushers=3, alone=lambda: alone)
    futures = [batcher.submit(0)]
    door.wait_entered()
    futures += [batcher.submit(n) for n in (1, 2, 3)]
    door.open(2)
    assert [future.result(WAIT_S) for future in futures] == [0, 1, 2, 3]
    assert door.batches == [[0], [1, 2, 3]]
    alone = False
    futures = [batcher.submit(n) for n in (4,)]
    door.wait_entered()
    door.wait_entered()
    futures.append(batcher.submit(5))
    door.wait_entered()
    assert sorted(door.batches[2:]) == [[4], [5]]
    door.open(2)
    assert [future.result(WAIT_S) for future in futures] == [4, 5]


def test_flushers_that_go_alone_all_end(batchers):
    door = Door()
    batcher = batchers(door, flushers=3, alone=lambda: True)
    futures = [batcher.submit(0)]
    door.wait_entered()
    futures.append(batcher.submit(1))
    door.open(2)
    assert batcher.close(WAIT_S)
    assert [future.result(0) for future in futures] == [0, 1]


def test_one_bad_item_fails_alone(batchers):
    def flush(items):
        if 13 in items:
            raise ValueError("13")
        return items

    started, stopper = threading.Event(), threading.Event()

    def slow_flush(items):
        started.set()
        stopper.wait(WAIT_S)
        return flush(items)

    batcher = batchers(slow_flush)
    blocker = batcher.submit(-1)
    assert started.wait(WAIT_S)
    futures = [batcher.submit(n) for n in range(20)]  # they wait together
    stopper.set()
    assert blocker.result(WAIT_S) == -1
    for n, future in enumerate(futures):
        if n == 13:
            with pytest.raises(ValueError, match="13"):
                future.result(WAIT_S)
        else:
            assert future.result(WAIT_S) == n


def test_an_answer_that_is_an_error_is_raised_to_its_caller_alone(batchers):
    batcher = batchers(lambda items: [KeyError(item) if item == "bad" else item for item in items])
    good, bad = batcher.submit("good"), batcher.submit("bad")
    assert good.result(WAIT_S) == "good"
    with pytest.raises(KeyError):
        bad.result(WAIT_S)


def test_an_unavailable_server_fails_all_at_once_without_splitting(batchers):
    calls, stopper = [], threading.Event()

    def flush(items):
        calls.append(len(items))
        stopper.wait(WAIT_S)
        raise DatabaseUnavailable("away")

    batcher = batchers(flush)
    futures = [batcher.submit(0)]
    while not calls:
        stopper.wait(0.001)
    futures += [batcher.submit(n) for n in range(1, 11)]
    stopper.set()
    for future in futures:
        with pytest.raises(DatabaseUnavailable):
            future.result(WAIT_S)
    assert calls == [1, 10]


def test_a_batcher_goes_on_after_every_kind_of_failure(batchers):
    troubles = iter([DatabaseUnavailable("away"), RuntimeError("bug"), None])

    def flush(items):
        trouble = next(troubles)
        if trouble:
            raise trouble
        return items

    batcher = batchers(flush)
    with pytest.raises(DatabaseUnavailable):
        batcher.submit(1).result(WAIT_S)
    with pytest.raises(RuntimeError):
        batcher.submit(2).result(WAIT_S)
    assert batcher.submit(3).result(WAIT_S) == 3


def test_a_cancelled_item_is_left_out(batchers):
    door = Door()
    batcher = batchers(door)
    first = batcher.submit("first")
    door.wait_entered()
    gone, stays = batcher.submit("gone"), batcher.submit("stays")
    assert gone.cancel()
    assert not first.cancel()  # being written: too late
    door.open(2)
    assert (first.result(WAIT_S), stays.result(WAIT_S)) == ("first", "stays")
    with pytest.raises(CancelledError):
        gone.result(WAIT_S)
    assert door.batches == [["first"], ["stays"]]


def test_a_batch_of_cancelled_items_is_not_flushed(batchers):
    door = Door()
    batcher = batchers(door)
    first = batcher.submit(1)
    door.wait_entered()
    assert all(batcher.submit(n).cancel() for n in range(5))
    door.open()
    assert first.result(WAIT_S) == 1
    last = batcher.submit(9)
    door.open()
    assert last.result(WAIT_S) == 9
    assert door.batches == [[1], [9]]


def test_closing_flushes_what_waits_and_takes_no_more():
    door = Door()
    batcher = Batcher("closing", door)
    futures = [batcher.submit(0)]
    door.wait_entered()
    futures += [batcher.submit(n) for n in (1, 2)]
    assert batcher.close(0.01) is False  # still busy
    with pytest.raises(Overloaded, match="shutting down"):
        batcher.submit(3)
    door.open(2)
    assert batcher.close(WAIT_S) is True
    assert [future.result(0) for future in futures] == [0, 1, 2]
    assert batcher.close(WAIT_S) is True


def test_too_much_waiting_is_refused(batchers):
    door = Door()
    batcher = batchers(door, max_waiting=3)
    first = batcher.submit(0)
    door.wait_entered()
    waiting = [batcher.submit(n) for n in (1, 2, 3)]
    with pytest.raises(Overloaded) as refused:
        batcher.submit(4)
    assert refused.value.retry_after_s > 0
    door.open(2)
    assert [future.result(WAIT_S) for future in [first, *waiting]] == [0, 1, 2, 3]


def test_heavy_items_fill_a_batch_sooner_and_are_never_split(batchers):
    door = Door(answer=len)
    batcher = batchers(door, weight=len, max_batch=10)
    futures = [batcher.submit("x")]
    door.wait_entered()
    futures += [batcher.submit("y" * size) for size in (4, 4, 4, 50, 1)]
    door.open(10)
    assert [future.result(WAIT_S) for future in futures] == [1, 4, 4, 4, 50, 1]
    assert [[len(item) for item in batch] for batch in door.batches] == [[1], [4, 4, 4], [50], [1]]


def test_many_callers_each_get_their_own_answer(batchers):
    sizes = []

    def flush(items):
        sizes.append(len(items))
        return [item * 10 for item in items]

    batcher = batchers(flush, max_batch=64)
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda n: batcher.submit(n).result(WAIT_S), range(2000)))
    assert answers == [n * 10 for n in range(2000)]
    assert sum(sizes) == 2000
    assert max(sizes) <= 64


def test_a_flush_that_answers_too_little_is_a_bug_of_that_flush_and_nobody_hangs(batchers):
    batcher = batchers(lambda items: items[:-1])
    for _ in range(2):
        with pytest.raises(AssertionError, match="0 answers to 1 items"):
            batcher.submit(1).result(WAIT_S)


def test_what_nobody_waits_for_and_fails_is_told_without_what_it_says(caplog):
    def refuse(_items):
        raise ValueError("no")

    batcher: Batcher[Report, None] = Batcher("b", refuse, about=remote._about)
    batcher.post(Report("w", End("j", 3, Outcome.DONE, result='"a secret"')))
    assert batcher.close(5)
    (line,) = caplog.records
    assert (line.message, line.item, line.error) == ("a write failed", "Report", "no")
    assert (line.job_id, line.attempt, line.worker_id) == ("j", 3, "w")
    assert "secret" not in str(vars(line))
