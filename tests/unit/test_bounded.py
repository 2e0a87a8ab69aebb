"""Many calls, a bounded number at a time: every promise of `orchestrator.bounded`, and that nothing can hang it."""

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing

import pytest

from orchestrator import bounded
from orchestrator.bounded import Cancellation, Failures
from orchestrator.bounded.round import Retrying, Round
from orchestrator.errors import Aborted, NoThreads
from orchestrator.limits import Lane
from tests.waiting import wait_until

WAIT_S = 20.0
ONE, TWO, FOUR = Lane(1, 4), Lane(2, 8), Lane(4, 16)


@pytest.fixture(autouse=True)
def _nothing_is_left_running():
    yield
    ours = lambda: [thread.name for thread in threading.enumerate() if thread.name.startswith("bounded-")]
    wait_until(lambda: not ours(), what=lambda: f"threads end: {ours()}")


class Gate:
    """A function that the test lets go on, one item at a time."""

    def __init__(self, answer=lambda item: item):
        self.answer = answer
        self.entered, self.opened, self._lock = [], set(), threading.Condition()

    def __call__(self, item, call):
        with call.token.telling(self.open), self._lock:
            self.entered.append(item)
            self._lock.notify_all()
            assert self._lock.wait_for(lambda: item in self.opened or call.token.cancelled, WAIT_S)
        return self.answer(item)

    def open(self, *items):
        with self._lock:
            self.opened.update(items)
            self._lock.notify_all()

    def wait_entered(self, count):
        with self._lock:
            assert self._lock.wait_for(lambda: len(self.entered) >= count, WAIT_S), self.entered


class Beside:
    """`bounded.run` in another thread: the test looks at it from outside."""

    def __init__(self, *args, **given):
        self.result = self.error = None

        def call():
            try:
                self.result = bounded.run(*args, **given)
            except BaseException as error:
                self.error = error

        self._thread = threading.Thread(target=call, name="beside", daemon=True)
        self._thread.start()

    def end(self):
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "it hangs"
        return self.result

    def failure(self):
        self.end()
        assert self.error is not None
        return self.error


class Noting:
    """The items, and which of them were taken."""

    def __init__(self, items: Iterable[int]) -> None:
        self._items = items
        self.taken: list[int] = []

    def __iter__(self) -> Iterator[int]:
        for item in self._items:
            self.taken.append(item)
            yield item


def boom(*_):
    raise ValueError("boom")


def odd_ones_fail(item, _call):
    if item % 2:
        raise ValueError(item)
    return item * 10


# --- results ---


def test_nothing_to_do_is_done():
    assert bounded.run([], boom) == []
    assert list(bounded.stream(iter(()), boom)) == []


def test_results_stand_in_the_order_of_the_items():
    gate = Gate(lambda item: item * 10)
    seen = []
    round_ = Beside(range(4), gate, lane=FOUR, on_result=lambda result, call: seen.append((call.index, result)))
    gate.wait_entered(4)
    for item in [2, 0, 3, 1]:
        gate.open(item)
        wait_until(lambda: len(seen) == len(gate.opened))
    assert round_.end() == [0, 10, 20, 30]
    assert seen == [(2, 20), (0, 0), (3, 30), (1, 10)]


def test_the_function_gets_to_know_its_item_index_and_token():
    token = Cancellation()
    calls = []
    bounded.run("ab", lambda item, call: calls.append((item, call.item, call.index, call.token.cancelled)), token=token)
    assert sorted(calls) == [("a", "a", 0, False), ("b", "b", 1, False)]


def test_threads_have_names_and_are_no_more_than_allowed():
    names = set()
    bounded.run(range(200), lambda *_: names.add(threading.current_thread().name), lane=FOUR)
    assert names <= {"bounded-0", "bounded-1", "bounded-2", "bounded-3"}
    bounded.run([1], lambda *_: names.add(threading.current_thread().name), name="bounded-import")
    assert "bounded-import-0" in names


def test_as_many_run_as_the_lane_says_and_no_more():
    gate = Gate()
    round_ = Beside(range(10), gate, lane=FOUR)
    gate.wait_entered(4)
    assert sorted(gate.entered) == [0, 1, 2, 3]
    gate.open(0)
    gate.wait_entered(5)
    gate.open(*range(10))
    assert round_.end() == list(range(10))


def test_items_and_callbacks_belong_to_the_callers_thread():
    threads = set()

    def here(*_):
        threads.add(threading.current_thread())
        return 0

    items = (here() or n for n in range(6))
    with pytest.raises(Failures):
        bounded.run(items, odd_ones_fail, size_of=here, on_result=here, on_error=here, best_effort=True)
    assert threads == {threading.current_thread()}


# --- laziness ---


def test_an_endless_iterator_is_taken_as_there_is_room():
    gate, items, token = Gate(), Noting(itertools.count()), Cancellation()
    round_ = Beside(items, gate, lane=Lane(2, 5), token=token)
    gate.wait_entered(2)
    wait_until(lambda: len(items.taken) == 6)  # five in the house, one at the door
    gate.open(0)
    gate.wait_entered(3)
    wait_until(lambda: len(items.taken) == 7)
    token.cancel()
    assert isinstance(round_.failure(), Aborted)
    assert len(items.taken) == 7


def test_what_is_done_and_not_taken_counts_too():
    items = Noting(range(100))
    with closing(bounded.stream(items, lambda n, _: n, lane=Lane(2, 6))) as results:
        for _ in range(4):
            next(results)
        assert len(items.taken) <= 4 + 6 + 1


def test_bytes_bound_what_is_in_the_house():
    gate, items = Gate(), Noting([40, 41, 42, 43])
    round_ = Beside(items, gate, lane=FOUR, size_of=lambda size: size, max_bytes=100)
    gate.wait_entered(2)
    wait_until(lambda: items.taken == [40, 41, 42])
    assert sorted(gate.entered) == [40, 41], "the third would make 123"
    gate.open(40)
    gate.wait_entered(3)
    gate.open(41, 42, 43)
    assert round_.end() == [40, 41, 42, 43]


def test_one_that_is_larger_than_all_room_runs_alone():
    gate = Gate()
    round_ = Beside([1, 500, 2], gate, lane=FOUR, size_of=lambda size: size, max_bytes=100)
    for count, item in enumerate([1, 500, 2], start=1):
        gate.wait_entered(count)
        assert gate.entered[count - 1 :] == [item]
        gate.open(item)
    assert round_.end() == [1, 500, 2]


@pytest.mark.parametrize("max_bytes", [0, -1])
def test_no_room_at_all_means_one_at_a_time(max_bytes):
    assert bounded.run([1, 2, 3], lambda n, _: n, size_of=lambda n: n, max_bytes=max_bytes) == [1, 2, 3]


# --- the first failure stops all ---


def test_the_first_failure_stops_what_has_not_begun():
    gate = Gate(lambda item: odd_ones_fail(item, None))
    items, told, failed = Noting(range(100)), [], []
    round_ = Beside(
        items,
        gate,
        lane=Lane(3, 10),
        on_result=lambda result, call: told.append(call.index),
        on_error=lambda error, call: failed.append((call.index, error.args[0])),
    )
    gate.wait_entered(3)
    wait_until(lambda: len(items.taken) == 11)
    gate.open(1)
    wait_until(lambda: failed == [(1, 1)])
    assert told == [], "0 and 2 are in flight, and settle"
    gate.open(0)
    wait_until(lambda: told == [0])
    gate.open(2)
    error = round_.failure()
    assert isinstance(error, ValueError) and error.args == (1,)
    assert (sorted(gate.entered), told, len(items.taken)) == ([0, 1, 2], [0, 2], 11)


def test_of_several_failures_the_first_in_time_is_raised_and_all_are_told():
    gate, failed = Gate(lambda item: odd_ones_fail(item, None)), []
    round_ = Beside([1, 3, 5], gate, lane=FOUR, on_error=lambda error, call: failed.append(call.item))
    gate.wait_entered(3)
    for item in (5, 1, 3):
        gate.open(item)
        wait_until(lambda: len(failed) == len(gate.opened))
    assert round_.failure().args == (5,)
    assert failed == [5, 1, 3]


def test_the_failure_is_raised_as_it_is():
    with pytest.raises(ValueError, match="boom") as caught:
        bounded.run([1], boom)
    assert caught.traceback[-1].name == "boom"


# --- best effort ---


def test_best_effort_tries_everything_and_tells_each_failure_once():
    told, failed = [], []
    with pytest.raises(Failures, match="3 of 7 items failed") as caught:
        bounded.run(
            range(7),
            odd_ones_fail,
            best_effort=True,
            on_result=lambda result, call: told.append(call.index),
            on_error=lambda error, call: failed.append(call.index),
        )
    group = caught.value
    assert isinstance(group, ExceptionGroup)
    assert sorted(error.args[0] for error in group.exceptions) == [1, 3, 5]
    assert group.results == [0, None, 20, None, 40, None, 60]
    assert {index: error.args[0] for index, error in group.failed.items()} == {1: 1, 3: 3, 5: 5}
    assert (sorted(told), sorted(failed)) == ([0, 2, 4, 6], [1, 3, 5])
    assert group.code == "items_failed"


def test_best_effort_without_failures_is_as_usual():
    assert bounded.run(range(0, 6, 2), odd_ones_fail, best_effort=True) == [0, 20, 40]


def test_a_part_of_the_failures_still_knows_the_results():
    with pytest.raises(Failures) as caught:
        bounded.run([0, 1], odd_ones_fail, best_effort=True)
    part = caught.value.subgroup(ValueError)
    assert isinstance(part, Failures) and part.results == [0, None] and set(part.failed) == {1}


# --- callbacks that fail ---


@pytest.mark.parametrize("best_effort", [False, True])
def test_a_callback_for_results_that_fails_is_a_failure_of_its_item(best_effort):
    failed = []

    def on_result(result, call):
        if call.index == 1:
            raise KeyError("disk full")

    with pytest.raises((KeyError, Failures)) as caught:
        bounded.run(
            range(3),
            lambda n, _: n,
            lane=ONE,
            best_effort=best_effort,
            on_result=on_result,
            on_error=lambda error, call: failed.append((call.index, type(error))),
        )
    assert failed == [(1, KeyError)]
    assert getattr(caught.value, "results", None) == ([0, None, 2] if best_effort else None)


def test_a_callback_for_errors_that_fails_ends_nothing_when_everything_is_tried():
    told = []

    def on_error(error, call):
        told.append(call.index)
        raise KeyError(call.index)

    with pytest.raises(Failures, match="2 of 5 items") as caught:
        bounded.run(range(5), odd_ones_fail, best_effort=True, on_error=on_error)
    assert sorted(told) == [1, 3], "once each"
    assert sorted(type(error).__name__ for error in caught.value.exceptions) == ["KeyError"] * 2 + ["ValueError"] * 2
    assert [type(error) for error in caught.value.failed.values()] == [ValueError, ValueError]


def test_a_callback_for_errors_that_fails_does_not_hide_the_first_error():
    with pytest.raises(ValueError, match="1"):
        bounded.run([1], odd_ones_fail, on_error=boom)


def test_a_size_that_cannot_be_told_is_a_failure_of_its_item():
    with pytest.raises(Failures, match="1 of 3") as caught:
        bounded.run([1, 2, 3], lambda n, _: n, size_of=lambda n: 1 // (n - 2), best_effort=True)
    assert caught.value.results == [1, None, 3]


# --- retries ---


def test_an_item_is_tried_again_and_told_of_when_all_tries_failed():
    tries: dict[str, int] = {}
    failed = []

    def third_time_lucky(item, _call):
        tries[item] = tries.get(item, 0) + 1
        if tries[item] < 3 or item == "never":
            raise OSError(tries[item])
        return tries[item]

    assert bounded.run(["a", "b"], third_time_lucky, retries=2) == [3, 3]
    with pytest.raises(OSError, match="4"):
        bounded.run(["never"], third_time_lucky, retries=3, on_error=lambda error, _: failed.append(error.args))
    assert failed == [(4,)]


def test_what_is_not_worth_another_try_gets_none():
    gate = Gate(boom)
    gate.open(1)
    with pytest.raises(ValueError):
        bounded.run([1], gate, retries=5, retry_if=lambda error: isinstance(error, OSError))
    assert gate.entered == [1]


def test_pauses_grow_to_a_minute_and_are_jittered():
    retrying = Retrying(99, 2.0, None)
    pauses = lambda tries: [retrying.pause_s(tries, ValueError()) or 0.0 for _ in range(50)]
    assert all(1.0 <= pause <= 2.0 for pause in pauses(1))
    assert all(4.0 <= pause <= 8.0 for pause in pauses(3))
    assert all(30.0 <= pause <= 60.0 for pause in pauses(99))
    assert len(set(pauses(1))) > 1
    assert retrying.pause_s(100, ValueError()) is None


def test_a_pause_ends_when_another_item_fails_for_good():
    paused = threading.Event()

    def fn(item, _call):
        if item == "patient":
            paused.set()
            raise OSError("patient")
        assert paused.wait(WAIT_S)
        raise KeyError("hasty")

    before, failed = time.monotonic(), []
    with pytest.raises(KeyError):
        bounded.run(
            ["patient", "hasty"],
            fn,
            lane=TWO,
            retries=5,
            backoff_s=60.0,
            retry_if=lambda error: isinstance(error, OSError),
            on_error=lambda error, call: failed.append(call.item),
        )
    assert time.monotonic() - before < WAIT_S
    assert sorted(failed) == ["hasty", "patient"]


def test_a_pause_ends_with_a_cancellation():
    token, tried = Cancellation(), threading.Event()

    def fn(*_):
        tried.set()
        raise OSError("again")

    round_ = Beside([1], fn, retries=5, backoff_s=60.0, token=token, best_effort=True)
    assert tried.wait(WAIT_S)
    token.cancel("enough")
    error = round_.failure()
    assert isinstance(error, Aborted) and error.reason == "enough"
    assert isinstance(error.__cause__, Failures), "what failed before"


# --- cancellation ---


def test_what_is_cancelled_before_takes_nothing():
    token, items = Cancellation(), Noting(range(3))
    token.cancel("too late")
    with pytest.raises(Aborted, match="cancelled: too late") as caught:
        bounded.run(items, boom, token=token)
    assert (items.taken, caught.value.code) == ([], "aborted")


@pytest.mark.parametrize("best_effort", [False, True])
def test_a_cancellation_stops_what_has_not_begun_in_either_mode(best_effort):
    token, gate, told, failed = Cancellation(), Gate(), [], []
    round_ = Beside(
        range(100),
        gate,
        lane=TWO,
        token=token,
        best_effort=best_effort,
        on_result=lambda result, call: told.append(call.index),
        on_error=lambda error, call: failed.append(call.index),
    )
    gate.wait_entered(2)
    token.cancel()
    assert isinstance(round_.failure(), Aborted)
    assert sorted(gate.entered) == sorted(told) == [0, 1], "what had begun settled, and was told"
    assert failed == []


def test_who_looks_at_the_token_has_not_failed():
    token, entered, failed = Cancellation(), threading.Event(), []

    def fn(_item, call):
        entered.set()
        assert call.token.wait(WAIT_S)
        call.token.raise_if_cancelled()

    round_ = Beside([1], fn, token=token, on_error=lambda *_: failed.append(1), retries=3)
    assert entered.wait(WAIT_S)
    token.cancel()
    assert isinstance(round_.failure(), Aborted)
    assert failed == []


def test_a_cancellation_that_came_last_is_raised_all_the_same():
    token = Cancellation()
    with pytest.raises(Aborted):
        bounded.run([1], lambda *_: token.cancel(), token=token)


def test_whoever_cancels_may_name_the_error():
    class Withdrawn(Exception):
        pass

    token = Cancellation()
    token.cancel(Withdrawn("by its owner"))
    with pytest.raises(Withdrawn, match="by its owner"):
        bounded.run([1], boom, token=token)


def test_a_cancellation_is_one_for_ever_and_its_first_reason_stays():
    token = Cancellation()
    token.raise_if_cancelled()
    assert not token.wait(0.0)
    token.cancel("first")
    token.cancel("second")
    assert token.cancelled and token.wait(60.0)
    with pytest.raises(Aborted, match="first"):
        token.raise_if_cancelled()


def test_a_child_is_cancelled_with_its_parent_and_not_the_other_way_round():
    parent = Cancellation()
    child, other = Cancellation(parent), Cancellation(parent)
    other.cancel("other")
    assert not parent.cancelled and not child.cancelled
    waited = []
    thread = threading.Thread(target=lambda: waited.append(child.wait(WAIT_S)), name="waits")
    thread.start()
    parent.cancel("all")
    thread.join(WAIT_S)
    assert waited == [True]
    with pytest.raises(Aborted, match="all"):
        child.raise_if_cancelled()
    with pytest.raises(Aborted, match="other"):
        other.raise_if_cancelled()


def test_a_round_leaves_nothing_behind_at_the_token():
    token = Cancellation()
    bounded.run(range(5), lambda n, _: n, token=token)
    token.wait(0.0)
    assert token._heard == []


def test_a_signal_handler_may_cancel():
    token = Cancellation()
    before = signal.signal(signal.SIGUSR1, lambda *_: token.cancel("SIGUSR1"))
    try:

        def fn(_item, call):
            os.kill(os.getpid(), signal.SIGUSR1)
            assert call.token.wait(WAIT_S)

        with pytest.raises(Aborted, match="SIGUSR1"):
            bounded.run(range(3), fn, lane=ONE, token=token)
    finally:
        signal.signal(signal.SIGUSR1, before)


# --- nothing hangs ---


def broken_source(after):
    yield from range(after)
    raise OSError("the file is gone")


@pytest.mark.parametrize("after", [0, 1, 50])
def test_items_that_break_off_end_the_round(after):
    told = []
    with pytest.raises(OSError, match="the file is gone"):
        bounded.run(broken_source(after), lambda n, _: n, lane=TWO, on_result=lambda r, _: told.append(r))
    assert len(told) <= after


def test_items_that_break_off_let_the_others_end_when_everything_is_tried():
    told = []
    with pytest.raises(Failures) as caught:
        bounded.run(broken_source(50), odd_ones_fail, lane=TWO, best_effort=True, on_result=lambda r, _: told.append(r))
    assert len(told) == 25
    assert len(caught.value.failed) == 25
    assert sum(isinstance(error, OSError) for error in caught.value.exceptions) == 1


def test_what_is_no_iterable_is_said_at_once():
    with pytest.raises(TypeError, match="not iterable"):
        bounded.run(7, boom)  # type: ignore[arg-type]


@pytest.mark.parametrize("best_effort", [False, True])
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_what_is_no_exception_ends_the_round_in_either_mode(error, best_effort):
    calls, told = [], []

    def fn(item, _call):
        calls.append(item)
        raise error

    with pytest.raises(error):
        bounded.run(range(50), fn, lane=ONE, best_effort=best_effort, on_error=lambda *_: told.append(1))
    assert (calls, told) == ([0], [])


def test_a_callback_that_is_interrupted_ends_the_round():
    def interrupted(*_):
        raise KeyboardInterrupt

    entered = threading.Event()

    def fn(item, call):
        if item:
            entered.set()
            return call.token.wait(WAIT_S)
        return entered.wait(WAIT_S)

    with pytest.raises(KeyboardInterrupt):
        bounded.run(range(50), fn, lane=TWO, on_result=interrupted)


def test_a_machine_without_threads_is_an_error_with_a_name(monkeypatch):
    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(NoThreads, match="can't start new thread") as caught:
        bounded.run(range(5), lambda n, _: n, lane=FOUR)
    assert caught.value.code == "no_threads"


def test_with_fewer_threads_it_goes_on_with_those(monkeypatch):
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def once(thread):
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", once)
    assert bounded.run(range(50), lambda n, _: n, lane=FOUR) == list(range(50))


def interrupt_main():
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def test_ctrl_c_asks_calls_in_flight_to_stop_and_waits_for_them():
    told, asked = [], []

    def fn(item, call):
        if item == 0:
            interrupt_main()
        asked.append(call.token.wait(WAIT_S))
        return item

    with pytest.raises(KeyboardInterrupt):
        bounded.run(range(50), fn, lane=ONE, on_result=lambda result, _: told.append(result))
    assert (told, asked) == ([0], [True]), "its result was told, nothing else began"


def test_a_first_ctrl_c_between_two_steps_does_not_pass_for_the_second(monkeypatch):
    entered, told, asked, interrupts, is_over = threading.Event(), [], [], [KeyboardInterrupt], Round._is_over

    def fn(item, call):
        entered.set()
        asked.append(call.token.wait(WAIT_S))
        return item

    def interrupted(round_):
        if entered.is_set() and interrupts:
            raise interrupts.pop()
        return is_over(round_)

    monkeypatch.setattr(Round, "_is_over", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bounded.run(range(50), fn, lane=ONE, on_result=lambda result, _: told.append(result))
    assert (told, asked) == ([0], [True])


def test_a_second_ctrl_c_waits_for_nobody():
    stubborn = threading.Event()

    def fn(_item, call):
        interrupt_main()
        assert call.token.wait(WAIT_S)
        interrupt_main()
        stubborn.wait(WAIT_S)

    before = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            bounded.run([1], fn, lane=ONE)
        assert time.monotonic() - before < WAIT_S
    finally:
        stubborn.set()


def test_a_call_that_does_not_settle_is_left_behind(caplog):
    stubborn, entered = threading.Event(), threading.Event()

    def fn(item, _call):
        if item:
            assert entered.wait(WAIT_S)
            raise ValueError("boom")
        entered.set()
        stubborn.wait(WAIT_S)

    try:
        with pytest.raises(ValueError, match="boom") as caught:
            bounded.run([0, 1], fn, lane=TWO, settle_s=0.05)
        assert caught.value.__notes__ == ["1 calls were still running 0.05 s after that"]
        assert "did not settle in time" in caplog.text
    finally:
        stubborn.set()


def test_rounds_inside_of_rounds_do_not_wait_for_each_other():
    inner = lambda n, _: sum(bounded.run(range(n), lambda m, _call: m, lane=ONE))
    assert bounded.run(range(20), inner, lane=TWO) == [sum(range(n)) for n in range(20)]


# --- streams ---


def test_a_stream_yields_as_calls_complete():
    gate = Gate()
    with closing(bounded.stream(range(3), gate, lane=FOUR)) as results:
        gate.open(2)
        assert next(results) == (2, 2)
        gate.open(0)
        assert next(results) == (0, 0)
        gate.open(1)
        assert list(results) == [(1, 1)]


def test_a_stream_in_order_waits_for_the_first_and_takes_no_more_meanwhile():
    gate, items = Gate(), Noting(range(50))
    gate.open(*range(1, 50))
    with closing(bounded.stream(items, gate, lane=Lane(2, 6), in_order=True)) as results:
        is_full = lambda: (len(gate.entered), len(items.taken)) == (6, 7)
        opener = threading.Thread(target=lambda: (wait_until(is_full), gate.open(0)), name="opener")
        opener.start()
        assert next(results) == (0, 0)
        opener.join(WAIT_S)
        assert len(items.taken) == 7, "six in the house, one at the door"
        assert [index for index, _ in results] == list(range(1, 50))


def test_a_stream_in_order_passes_over_what_failed():
    results = bounded.stream(range(6), odd_ones_fail, in_order=True, best_effort=True)
    seen: list[tuple[int, int]] = []
    with pytest.raises(Failures, match="3 of 6"):
        seen.extend(results)
    # `extend` keeps what came before the error
    assert seen == [(0, 0), (2, 20), (4, 40)]


def test_a_stream_raises_after_what_was_in_flight():
    gate = Gate(lambda item: odd_ones_fail(item, None))
    gate.open(1)
    results = bounded.stream(range(50), gate, lane=TWO, on_error=lambda *_: gate.open(0))
    assert next(results) == (0, 0)
    with pytest.raises(ValueError, match="1"):
        next(results)
    assert sorted(gate.entered) == [0, 1]


def test_whoever_leaves_a_stream_early_leaves_nothing_running():
    stopped = []

    def fn(item, call):
        if item:
            stopped.append(call.token.wait(WAIT_S))
        return item

    results = bounded.stream(itertools.count(), fn, lane=TWO)
    assert next(results) == (0, 0)
    results.close()
    assert all(stopped) and len(stopped) <= 2


def test_nothing_begins_once_it_is_cancelled():
    token = Cancellation()
    flow: bounded.Flow[int, int] = bounded.Flow(8, token=token)
    for item in range(3):
        flow.admit(flow.call(item))
    first = flow.begin()
    assert first is not None
    token.cancel()
    assert (flow.begin(), flow.waiting, flow.running, flow.takes_more) == (None, 0, 1, False)
    flow.succeed(first, 0)
    assert not flow.over, "its result is not handed out yet"
    assert flow.hand_out() == (first, 0)
    assert flow.over
