"""Group commit: everything that waits goes together, and every caller gets the answer to its own item."""

import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest

from orchestrator import remote
from orchestrator.errors import DatabaseUnavailable, Overloaded
from orchestrator.store import batcher as batching
from orchestrator.store.batcher import Batcher, Later
from orchestrator.store.database import RowsHeld, Waiting
from orchestrator.store.reports import Report
from orchestrator.store.settle import End, Outcome
from tests.waiting import wait_until

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


# --- rows that somebody holds ---


class Rows:
    """A flush and its `apart`: neither can write what is `held`; the first says so only after a long wait.

    What is `busy` is only for those who queue for it.
    """

    def __init__(self, *held, busy=(), put_off=None):
        self.held, self.busy, self.put_off = set(held), set(busy), put_off
        self.waited, self.tried, self.queued, self.written = [], [], [], []
        #: Of those that were tried, the ones for which a moment was taken.
        self.moments = []
        self.may_begin = threading.Event()

    def flush(self, items):
        assert self.may_begin.wait(WAIT_S)
        self.waited.append(list(items))
        return self._write(items)

    def apart(self, items, waiting):
        queues = waiting is Waiting.BRIEFLY
        (self.queued if queues else self.tried).append(list(items))
        self.moments += [list(items)] if waiting is Waiting.MOMENT else []
        try:
            return self._write(items, self.held if queues else self.held | self.busy)
        except RowsHeld:
            if self.put_off is not None and len(items) == 1:
                return [Later(self.put_off)]
            raise

    def _write(self, items, held=None):
        if (self.held | self.busy if held is None else held).intersection(items):
            raise RowsHeld("somebody holds a row")
        self.written += items
        return [item * 10 for item in items]


@pytest.fixture
def batcher_of(batchers, monkeypatch):
    """A batcher of such rows, into which these items go as one batch, after one that nobody holds."""
    monkeypatch.setattr(batching, "PATIENT_EVERY_S", 0.05)

    def make(rows, *items, **options):
        batcher = batchers(rows.flush, apart=rows.apart, **options)
        first = batcher.submit(-1)
        wait_until(lambda: not batcher._waiting)
        futures = [batcher.submit(item) for item in items]
        rows.may_begin.set()
        assert first.result(WAIT_S) == -10
        return batcher, futures

    return make


def test_a_held_row_fails_its_own_item_and_is_waited_for_once(batcher_of):
    rows = Rows(3)
    _, futures = batcher_of(rows, *range(8))
    for n, future in enumerate(futures):
        if n == 3:
            with pytest.raises(RowsHeld):
                future.result(WAIT_S)
        else:
            assert future.result(WAIT_S) == n * 10
    assert rows.waited == [[-1], [*range(8)]]
    assert rows.tried == [[*range(8)], [0, 1, 2, 3], [0, 1], [2, 3], [2], [3], [4, 5, 6, 7]]
    assert rows.queued == [[3]]
    assert sorted(rows.written) == [-1, 0, 1, 2, 4, 5, 6, 7], "each once"


def test_a_lone_item_whose_row_is_held_hears_of_it(batcher_of):
    rows = Rows(1)
    _, (future,) = batcher_of(rows, 1)
    with pytest.raises(RowsHeld):
        future.result(WAIT_S)
    assert (rows.waited, rows.tried, rows.queued) == ([[-1], [1]], [[1]], [[1]])


@pytest.mark.parametrize("wary_s", [batching.WARY_S, 0.0])
def test_after_a_wait_in_vain_nobody_waits_again_for_a_while(batcher_of, monkeypatch, wary_s):
    monkeypatch.setattr(batching, "WARY_S", wary_s)
    rows = Rows(1)
    batcher, (held,) = batcher_of(rows, 1)
    with pytest.raises(RowsHeld):
        held.result(WAIT_S)
    with pytest.raises(RowsHeld):
        batcher.submit(1).result(WAIT_S)
    assert batcher.submit(2).result(WAIT_S) == 20
    assert rows.waited == ([[-1], [1]] if wary_s else [[-1], [1], [1], [2]])


def test_of_those_at_fault_one_queues_at_a_time_and_each_gets_its_turn(batcher_of):
    """Who only tries does not get a row for which others queue all the time."""
    rows = Rows(1, 2, busy=[3, 4], put_off=0.01)
    _, (one, two, three, four) = batcher_of(rows, 1, 2, 3, 4)
    assert [three.result(WAIT_S), four.result(WAIT_S)] == [30, 40]
    assert not (one.done() or two.done())
    assert all(len(batch) == 1 for batch in rows.queued)
    rows.held.clear()
    assert [one.result(WAIT_S), two.result(WAIT_S)] == [10, 20]


def test_hundreds_at_fault_wait_once_together(batcher_of, monkeypatch):
    rows = Rows(*range(100))
    monkeypatch.setattr(batching, "PATIENT_EVERY_S", WAIT_S)
    _, futures = batcher_of(rows, *range(100))
    for future in futures:
        with pytest.raises(RowsHeld):
            future.result(WAIT_S)
    assert rows.queued == [[0]]


def test_a_batch_that_is_told_apart_takes_a_moment_as_a_whole_and_not_for_its_parts(batcher_of):
    rows, urgent = Rows(1), {-1, 1}
    batcher, (held,) = batcher_of(rows, 1, linger=lambda: WAIT_S, urgent=lambda item: item in urgent)
    with pytest.raises(RowsHeld):
        held.result(WAIT_S)
    urgent = {4}  # the last one: they go together
    futures = [batcher.submit(item) for item in (2, 3, 1, 4)]
    assert [future.result(WAIT_S) for future in futures if future is not futures[2]] == [20, 30, 40]
    assert rows.moments == [[2, 3, 1, 4]]


def test_who_waited_in_vain_is_tried_as_often_as_before(batcher_of, monkeypatch):
    monkeypatch.setattr(batching, "PATIENT_EVERY_S", 600.0)
    rows = Rows(1, put_off=0.01)
    _, (held,) = batcher_of(rows, 1)
    wait_until(lambda: rows.queued, what="that it waited in vain")
    rows.held.clear()
    assert held.result(WAIT_S) == 10
    assert rows.queued == [[1]], "once"


def test_who_closes_does_not_wait_until_what_was_put_off_is_due(batcher_of):
    rows = Rows(1, put_off=600.0)
    batcher, (held,) = batcher_of(rows, 1)
    wait_until(lambda: rows.queued and batcher._put_off, what="that it waited in vain")
    rows.held.clear()
    assert batcher.close(WAIT_S)
    assert held.result(0) == 10


def test_a_bad_item_among_those_that_are_told_apart_fails_alone(batchers):
    def apart(items, _waiting):
        if 13 in items:
            raise ValueError("13")
        return items

    def flush(items):
        raise RowsHeld("somebody holds a row")

    batcher = batchers(flush, apart=apart, linger=lambda: 1.0, urgent=lambda item: item == 15)
    futures = [batcher.submit(n) for n in (12, 13, 14, 15)]
    with pytest.raises(ValueError, match="13"):
        futures.pop(1).result(WAIT_S)
    assert [future.result(WAIT_S) for future in futures] == [12, 14, 15]


def test_what_is_put_off_holds_up_nobody_and_is_written_when_it_can_be(batcher_of):
    rows = Rows(1, 2, put_off=0.01)
    batcher, (one, two, three) = batcher_of(rows, 1, 2, 3)
    assert three.result(WAIT_S) == 30
    assert batcher.submit(4).result(WAIT_S) == 40
    wait_until(lambda: rows.tried.count([1]) > 2, what="tried again")
    assert not one.done()
    rows.held.clear()
    assert [one.result(WAIT_S), two.result(WAIT_S)] == [10, 20]
    assert sorted(rows.written) == [-1, 1, 2, 3, 4]
    assert all(1 not in batch for batch in rows.waited[2:]), "it was waited for once"


def test_new_items_come_between_those_that_are_put_off_however_often_they_are_tried(batcher_of):
    """A try may take longer than until the next is due."""
    rows = Rows(1, put_off=0.01)
    tries, may_end = threading.Semaphore(0), threading.Semaphore(0)
    batcher, _ = batcher_of(rows, 1)
    apart = rows.apart

    def slowly(items, waiting):
        if items == [1] and waiting is Waiting.NOT:
            tries.release()
            assert may_end.acquire(timeout=WAIT_S)
            return [Later(0.0)]
        return apart(items, waiting)

    batcher._apart = slowly
    for item in (2, 3):
        assert tries.acquire(timeout=WAIT_S)
        new = batcher.submit(item)
        may_end.release()
        assert new.result(WAIT_S) == item * 10
    rows.held.clear()
    batcher._apart = apart
    may_end.release(100)


def test_flushers_that_go_alone_see_to_what_is_put_off(batcher_of):
    rows = Rows(1, put_off=0.01)
    batcher, (held,) = batcher_of(rows, 1, flushers=3, alone=lambda: True)
    wait_until(lambda: rows.tried.count([1]) > 5, what="tried again")
    rows.held.clear()
    assert held.result(WAIT_S) == 10
    assert batcher.close(WAIT_S)


def test_closing_waits_for_what_is_put_off(batcher_of):
    rows = Rows(1, put_off=0.01)
    batcher, (held,) = batcher_of(rows, 1, flushers=2)
    wait_until(lambda: rows.tried.count([1]) > 2, what="put off")
    turns, take_waiting = [], batcher._take_waiting

    def take_and_count():
        turns.append(len(rows.tried))
        return take_waiting()

    batcher._take_waiting = take_and_count
    assert batcher.close(0.1) is False
    wait_until(lambda: len(turns) > 1)
    assert not held.done()
    assert len(turns) <= turns[-1] - turns[0] + 1, "a turn for each try: it sleeps until something is due"
    rows.held.clear()
    assert batcher.close(WAIT_S) is True
    assert held.result(0) == 10


def test_who_gives_up_what_is_put_off_can_be_closed(batcher_of, caplog):
    rows = Rows(1, 2, put_off=0.01)
    batcher, (held,) = batcher_of(rows, 1)
    batcher.post(2)
    assert batcher.close(0.1) is False
    rows.put_off = None
    assert batcher.close(WAIT_S) is True
    with pytest.raises(RowsHeld):
        held.result(0)
    assert [line.message for line in caplog.records] == ["a write failed"]
