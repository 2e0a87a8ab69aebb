"""Caps when many claim and end at the same moment: never over, and back at zero."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from random import Random

from sqlalchemy import select, update

from orchestrator.policies import Book
from orchestrator.store import caps, outbox, schema
from orchestrator.store.claim import Claim, claim_jobs
from orchestrator.store.settle import End, Outcome, finish_all, record
from tests.factories import POLICY, done, failed, hire, rows, submit

BOOK = Book(1, caps={"agent:*": 2, "host:*": 1, "type:echo": 5})
THREADS, JOBS = 6, 60
#: Jobs that must have run at the same moment, or nothing is shown: until then nobody ends one.
AT_ONCE = 3


class Watch:
    """What runs, by the word of those who run it: between the commit of a claim and the commit of an end."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.broken: list[tuple[str, int]] = []
        self._lock = threading.Lock()

    @property
    def crowded(self):
        return self.most["type:echo"] >= AT_ONCE

    def begin(self, claim):
        with self._lock:
            self.now.update(claim.caps)
            for key in claim.caps:
                self.most[key] = max(self.most[key], self.now[key])
                if self.now[key] > (BOOK.cap(key) or 0):
                    self.broken.append((key, self.now[key]))

    def end(self, claim):
        with self._lock:
            self.now.subtract(claim.caps)


def work(db, hand, watch, seed, left):
    """Announce, claim, end: in every transaction ends and claims together, as a worker's ledger does."""
    rng = Random(seed)
    held: list[Claim] = []
    while left():
        ids = db.write(lambda conn: announce(conn, rng.randint(1, 4)))
        most = min(len(held), rng.randint(0 if ids else 1, 2)) if watch.crowded else 0
        over = [held.pop(rng.randrange(len(held))) for _ in range(most)]
        for claim in over:
            watch.end(claim)
        if not ids and not over:
            threading.Event().wait(0.01)
            continue
        ends = [end_of(rng, claim) for claim in over]
        answers = db.write(lambda conn, ids=ids, ends=ends: turn(conn, hand, ids, ends))
        claimed = [answer for answer in answers.values() if isinstance(answer, Claim)]
        for claim in claimed:
            watch.begin(claim)
        held += claimed
    for claim in held:
        watch.end(claim)
    hand.finish(*held)


def announce(conn, most):
    return [job.job_id for job in outbox.take(conn, "default", most, caps=caps.Glance(conn, BOOK))]


def end_of(rng, claim):
    kind = rng.choice(["done", "done", "done", "retry", "back"])
    if kind == "done":
        return done(claim)
    if kind == "retry":
        return failed(claim, retry_after_s=0.0)
    return End(claim.job_id, claim.attempt, Outcome.HANDED_BACK, error="leaving", caps=claim.caps)


def turn(conn, hand, ids, ends):
    seats = caps.Seats(conn, BOOK)
    seats.expect(ids, held=[key for end in ends for key in end.caps])
    if all(end.outcome is Outcome.DONE for end in ends):
        finish_all(conn, hand.by, ends, seats)
    else:
        record(conn, hand.by, [], ends, POLICY, seats=seats)
    answers = claim_jobs(conn, hand.by, ids, lambda _type: 0, seats=seats)
    seats.close()
    return answers


def unfinished(db):
    return db.read(lambda conn: conn.execute(select(schema.jobs.c.job_id).where(_open()).limit(1)).first())


def _open():
    return schema.jobs.c.status.in_(["pending", "claimed"])


def test_many_claim_and_end_at_once_and_no_cap_is_ever_passed(maria_db):
    rng = Random(6)
    for _ in range(JOBS):
        host = f"host:{rng.randrange(4)}"
        submit(maria_db, agent=f"a{rng.randrange(3)}", concurrency_keys=[host], max_attempts=100)
    watch, hands = Watch(), [hire(maria_db) for _ in range(THREADS)]
    with ThreadPoolExecutor(THREADS) as pool:
        running = [
            pool.submit(work, maria_db, hand, watch, seed, lambda: unfinished(maria_db))
            for seed, hand in enumerate(hands)
        ]
        while not all(one.done() for one in running):
            # Somebody who was handed back may wait for a seat that nobody gives back: the leader sees to those.
            assert maria_db.write(caps.heal) == 0, "a count was wrong although nobody died"
            maria_db.write(lambda conn: caps.let_go(conn, BOOK, "", 100))
            threading.Event().wait(0.05)
    for one in running:
        one.result()
    assert watch.broken == []
    assert watch.crowded
    assert [key for key, in_use in rows(maria_db, schema.concurrency_caps) if in_use] == []
    assert {job.status for job in rows(maria_db, schema.jobs)} == {"done"}


def test_who_parks_and_who_gives_back_at_once_miss_each_other_never(maria_db):
    """A job that is refused because of the one that just ends is let go by it, or finds its seat."""
    hand, other = hire(maria_db), hire(maria_db)
    book = hand.book = other.book = Book(1, caps={"agent:a": 1})
    for _ in range(25):
        first, second = submit(maria_db, 2, agent="a")
        (running,) = hand.claim(first)
        meet = threading.Barrier(2)

        def end(meet=meet, running=running):
            meet.wait()
            hand.finish(running)

        def claim(meet=meet, second=second):
            meet.wait()
            return other.offer(second)[second]

        with ThreadPoolExecutor(2) as pool:
            pool.submit(end)
            answer = pool.submit(claim).result()
        if isinstance(answer, Claim):
            other.finish(answer)
        else:
            ready = maria_db.write(lambda conn: outbox.take(conn, "default", 10, caps=caps.Glance(conn, book)))
            assert [job.job_id for job in ready] == [second]
            other.finish(*other.claim(second))


def test_what_dies_with_a_seat_is_healed(maria_db):
    """Whatever a bug or an operator's hand did to the rows: the jobs that run decide."""
    hand = hire(maria_db)
    hand.book = Book(1, caps={"agent:a": 3})
    hand.claim(*submit(maria_db, 2, agent="a"))
    maria_db.write(lambda conn: conn.execute(update(schema.jobs).values(status="failed", held_caps=None)))
    assert maria_db.write(caps.heal) == 1
    assert [row.in_use for row in rows(maria_db, schema.concurrency_caps)] == [0]
