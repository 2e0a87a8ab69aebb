"""The same call for many items, a bounded number of them at a time.

    results = bounded.run(paths, lambda path, call: load(path))                 # the first failure stops all
    for index, result in bounded.stream(batches, send, lane=limits.io): ...    # as they complete

What callers may rely on:

1. **Order.** Results stand in the order of the items. `stream` yields them as they complete, or with `in_order`.
2. **Laziness.** `items` may be any iterator, also an endless one. No more than `lane.pending` items and `max_bytes` are
   in the house (taken from `items`, and their result not yet handed out), plus one that waits for room. One that is
   larger than `max_bytes` alone is let in when the house is empty.
3. **Whose thread.** `fn` is called by threads `NAME-0`, `NAME-1`, …; `items`, `size_of`, `on_result` and `on_error` by
   the caller's, one at a time: they need no locks.
4. **Fail fast**, by default: after the first failure nothing more begins, what waits is dropped, calls in flight
   settle (their results and failures are still told), the first error is raised.
5. **Best effort**: everything is tried; at the end `Failures`, an ExceptionGroup, has every error. The result of a
   failed item is None in its `results`.
6. **Failures.** An item has failed when `fn` raised for it after all `retries`, or a callback did. `on_result` is
   called for successes only, `on_error` once at most for each item that failed. What is no Exception (SystemExit,
   LeaseLost) ends the round in either mode and is raised as it is.
7. **Cancellation** is looked at before an item is taken, before each call and each retry, and at the end: then Aborted
   is raised, in either mode, caused by what failed before. Calls in flight see it as `call.token`.
8. **No wait without an end.** Pauses before retries end when the round does. Once a round stops, calls in flight have
   `settle_s` to settle; then it ends without them. Ctrl-C stops the round like a cancellation, a second one at once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import closing

from orchestrator import limits
from orchestrator.bounded.flow import Call, Failures, Flow, Item, Result
from orchestrator.bounded.round import Retrying, Round
from orchestrator.cancellation import Cancellation
from orchestrator.limits import Lane

__all__ = ["Call", "Cancellation", "Failures", "Flow", "run", "stream"]

#: Seconds that calls in flight are given once a round stops.
SETTLE_S = 60.0


def run(
    items: Iterable[Item],
    fn: Callable[[Item, Call[Item]], Result],
    *,
    lane: Lane | None = None,
    max_bytes: int | None = None,
    size_of: Callable[[Item], int] | None = None,
    best_effort: bool = False,
    on_result: Callable[[Result, Call[Item]], object] | None = None,
    on_error: Callable[[Exception, Call[Item]], object] | None = None,
    retries: int = 0,
    backoff_s: float = 0.0,
    retry_if: Callable[[Exception], bool] | None = None,
    token: Cancellation | None = None,
    settle_s: float = SETTLE_S,
    name: str = "bounded",
) -> list[Result]:
    """`fn(item, call)` for every item; the results in order of the items.

    lane: how many run at a time and how many are in the house; by default that for requests (`limits.of_this_process`).
    max_bytes, size_of: bound what is in the house by size too.
    retries, backoff_s, retry_if: further tries of an item; the pause before the first, which doubles up to a minute and
    is jittered; which errors are worth one.

    What it returns has no gaps; those of failed items are in `Failures.results`. Raises as the module says.
    """
    lane = lane or limits.of_this_process().io
    flow: Flow[Item, Result] = Flow(lane.pending, max_bytes, best_effort=best_effort, token=token)
    retrying = Retrying(retries, backoff_s, retry_if)
    round_ = Round(flow, items, fn, lane.concurrency, size_of, on_error, retrying, settle_s=settle_s, name=name)
    results: dict[int, Result] = {}
    try:
        with closing(round_.outcomes()) as outcomes:
            for call, result in outcomes:
                if on_result is None or _is_told(round_, on_result, result, call):
                    results[call.index] = result
    except Failures as failures:
        failures.results = [results.get(index) for index in range(flow.count)]
        raise
    return [results[index] for index in range(flow.count)]


def _is_told(
    round_: Round[Item, Result],
    on_result: Callable[[Result, Call[Item]], object],
    result: Result,
    call: Call[Item],
) -> bool:
    try:
        on_result(result, call)
    except Exception as error:  # noqa: BLE001 - it is the item's, as any other failure
        round_.fail(call, error)
        return False
    return True


def stream(
    items: Iterable[Item],
    fn: Callable[[Item, Call[Item]], Result],
    *,
    lane: Lane | None = None,
    max_bytes: int | None = None,
    size_of: Callable[[Item], int] | None = None,
    best_effort: bool = False,
    in_order: bool = False,
    on_error: Callable[[Exception, Call[Item]], object] | None = None,
    retries: int = 0,
    backoff_s: float = 0.0,
    retry_if: Callable[[Exception], bool] | None = None,
    token: Cancellation | None = None,
    settle_s: float = SETTLE_S,
    name: str = "bounded",
) -> Generator[tuple[int, Result], None, None]:
    """`run` for those who want each result when it is there: (index, result), and nothing is kept.

    Errors are raised after the last result. Whoever stops early closes it (`contextlib.closing`): nothing more begins
    then, and calls in flight settle.
    """
    lane = lane or limits.of_this_process().io
    flow: Flow[Item, Result] = Flow(lane.pending, max_bytes, best_effort=best_effort, in_order=in_order, token=token)
    retrying = Retrying(retries, backoff_s, retry_if)
    round_ = Round(flow, items, fn, lane.concurrency, size_of, on_error, retrying, settle_s=settle_s, name=name)
    with closing(round_.outcomes()) as outcomes:
        for call, result in outcomes:
            yield call.index, result
