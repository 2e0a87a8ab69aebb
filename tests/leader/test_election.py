"""Elections: one term at a time, and a write of an earlier one is refused, whatever its author believes."""

import threading
from types import SimpleNamespace

import pytest
from sqlalchemy import Connection, create_engine, event, text, update
from sqlalchemy.exc import DBAPIError

from orchestrator.errors import DatabaseUnavailable, StaleEpoch
from orchestrator.leader import term as term_module
from orchestrator.leader.term import Candidate, Term, borrow
from orchestrator.store import leadership, schema
from orchestrator.store.dialect import utc_shift
from orchestrator.store.dialect.mariadb import ServerLock, lock_name
from tests.factories import now, rows
from tests.servers import Galera
from tests.tables import make_tables
from tests.waiting import wait_until

NAME = "gpu_orchestrator_leader"
#: Neither a term ends by itself, nor does the server end a transaction because the machine is busy.
PATIENT = {"leader_ttl_s": 30.0, "worker_timeout_s": 30.0}


@pytest.fixture
def candidates(db, db_url, settings, open_database):
    """Candidates on databases of their own, as in different processes."""
    made = []

    def make(holder, **given):
        given = PATIENT | given
        made.append(Candidate(open_database(db_url, **given), settings(database_url=db_url, **given), holder))
        return made[-1]

    yield make
    for candidate in made:
        candidate._drop_lock()


def row(db):
    return db.read(lambda conn: leadership.current(conn, NAME))


def epoch_of(candidate):
    return candidate.term.epoch if candidate.term else None


def take(db, holder="usurper", ttl_s=30.0, *, lock_held=True):
    return db.write(lambda conn: leadership.take(conn, NAME, holder, ttl_s, lock_held=lock_held))


def end_term(db):
    """As if the last renewal had been long ago."""
    over = update(schema.leadership).values(expires_at=utc_shift(-1.0))
    db.write(lambda conn: conn.execute(over))


def mark(term, lane):
    term.write(lambda conn: conn.execute(schema.lanes.insert(), {"lane": lane}))


def marks(db):
    return sorted(lane.lane for lane in rows(db, schema.lanes))


# --- two candidates ---


def test_one_of_two_candidates_leads_and_keeps_leading(db, candidates):
    one, other = candidates("one"), candidates("other")
    for _ in range(3):
        one.tick()
        other.tick()
    assert (epoch_of(one), other.term) == (1, None)
    assert (row(db).holder, row(db).epoch, row(db).alive) == ("one", 1, True)
    assert [e.event_type for e in rows(db, schema.audit)] == ["leader.elected"]


def test_who_resigns_is_followed_at_once(db, candidates):
    one, other = candidates("one"), candidates("other")
    one.tick()
    one.resign()
    assert one.term is None
    assert row(db).alive is False
    other.tick()
    assert epoch_of(other) == 2
    one.tick()
    assert one.term is None


def test_epochs_only_grow(db, candidates):
    seen = []
    for n in range(5):
        candidate = candidates(f"c{n % 2}")
        candidate.tick()
        seen.append(epoch_of(candidate))
        candidate.resign()
    assert seen == [1, 2, 3, 4, 5]


def test_many_candidates_at_the_same_moment_elect_one(db, candidates):
    crowd = [candidates(f"c{n}") for n in range(6)]
    barrier = threading.Barrier(6)

    def stand(candidate):
        barrier.wait(10)
        candidate.tick()

    threads = [threading.Thread(target=stand, args=(c,), name="stand") for c in crowd]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [c.term.epoch for c in crowd if c.term] == [1]


# --- fencing ---


def test_a_write_of_an_older_epoch_is_refused_while_its_connection_is_open(db, candidates):
    """INV-18."""
    one = candidates("one")
    one.tick()
    old = one.term
    mark(old, "before")
    assert take(db) == 2
    assert one.term is old  # it still believes
    with pytest.raises(StaleEpoch):
        mark(old, "after")
    assert marks(db) == ["before"]


def test_a_write_of_an_expired_term_is_refused_even_without_a_successor(db, candidates):
    one = candidates("one")
    one.tick()
    end_term(db)
    with pytest.raises(StaleEpoch):
        mark(one.term, "late")
    assert marks(db) == []


def test_a_successor_waits_for_a_write_that_began_before_it(db, candidates):
    """Whoever was fenced finishes; only then the next term begins. No write falls between two epochs."""
    one = candidates("one")
    one.tick()
    inside, go_on, order = threading.Event(), threading.Event(), []

    def slow(conn):
        inside.set()
        assert go_on.wait(10)
        conn.execute(schema.lanes.insert(), {"lane": "slow"})

    def write():
        one.term.write(slow)
        order.append("write")

    def follow():
        take(db)
        order.append("take")

    writing = threading.Thread(target=write, name="writing")
    taking = threading.Thread(target=follow, name="taking")
    writing.start()
    assert inside.wait(10)
    taking.start()
    taking.join(0.3)
    assert taking.is_alive()
    go_on.set()
    writing.join(10)
    taking.join(10)
    assert sorted(order) == ["take", "write"]
    assert marks(db) == ["slow"]
    assert row(db).epoch == 2


def test_two_leader_writes_do_not_wait_for_each_other(maria_db, open_database):
    """The fence is a shared lock: duties run side by side."""
    leadership.ensure_row(maria_db, NAME)
    database = open_database(maria_db.settings.database_url, **PATIENT)
    term = Term(database, NAME, take(maria_db), "leader:test")

    def outer(_conn):
        inner = []
        thread = threading.Thread(target=lambda: inner.append(term.write(lambda _c: "done")), name="inner")
        thread.start()
        thread.join(30)
        return inner

    assert term.write(outer) == ["done"]


def test_without_the_lock_a_living_term_is_respected_and_a_finished_one_followed(db):
    leadership.ensure_row(db, NAME)
    assert take(db, lock_held=False) == 1  # nobody ever led
    assert take(db, lock_held=False) is None
    end_term(db)
    assert take(db, lock_held=False) == 2


def test_a_term_of_a_time_that_has_not_come_is_followed_without_the_lock(db):
    """F-31: its leader died, and the clock was set back: it would not be over for an hour."""
    leadership.ensure_row(db, NAME)
    take(db, ttl_s=3600.0)
    assert take(db, ttl_s=3600.0, lock_held=False) is None
    assert take(db, ttl_s=30.0, lock_held=False) == 2


def test_an_expired_term_is_not_renewed(db, candidates):
    one = candidates("one")
    one.tick()
    end_term(db)
    one.tick()
    assert one.term is None
    assert row(db).alive is False
    one.tick()
    assert epoch_of(one) == 2


def test_a_renewal_extends_the_term(db, candidates):
    one = candidates("one")
    one.tick()
    soon = update(schema.leadership).values(expires_at=utc_shift(2.0))
    db.write(lambda conn: conn.execute(soon))
    one.tick()
    assert (row(db).expires_at - now(db)).total_seconds() > 20


# --- doubt ---


def test_a_term_is_trusted_only_until_its_margin_on_the_own_clock(db, candidates, monkeypatch):
    """INV-19: the row still says it leads; its own clock says stop."""
    clock = [1000.0]
    monkeypatch.setattr(term_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    one = candidates("one", leader_ttl_s=30.0, leader_trust_margin_s=5.0)
    one.tick()
    clock[0] += 24.9
    assert one.term is not None
    clock[0] += 0.2
    assert one.term is None
    assert row(db).alive is True
    one.tick()  # too late to renew: it must not act as if it had never doubted
    assert one.term is None
    one.tick()
    assert epoch_of(one) == 2


def test_trust_is_counted_from_the_start_of_the_election(candidates, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(term_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    one = candidates("one", leader_ttl_s=30.0, leader_trust_margin_s=5.0)
    write = one._db.write

    def slow(work):
        clock[0] += 20.0  # the answer takes long: for all we know, the row was written right away
        return write(work)

    monkeypatch.setattr(one._db, "write", slow)
    one.tick()
    assert one._trusted_until <= 1000.0 + 25.0 + 20.0  # ensure_row came first
    clock[0] = one._trusted_until - 0.1
    assert one.term is not None
    assert one._trusted_until - clock[0] < 6.0


def test_trust_is_counted_from_the_start_of_the_renewal(candidates, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(term_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    one = candidates("one", leader_ttl_s=30.0, leader_trust_margin_s=5.0)
    one.tick()
    write = one._db.write

    def slow(work):
        written = write(work)
        clock[0] += 20.0  # the answer takes long: the row was written right away
        return written

    monkeypatch.setattr(one._db, "write", slow)
    clock[0] = 1010.0
    one.tick()
    clock[0] = 1010.0 + 25.0 - 0.1
    assert one.term is not None
    clock[0] = 1010.0 + 25.0 + 0.1
    assert one.term is None


@pytest.mark.parametrize("when", ["standing", "leading"])
def test_a_database_that_is_away_ends_the_term_and_gives_up_the_lock(db, candidates, monkeypatch, when):
    one, other = candidates("one"), candidates("other")
    if when == "leading":
        one.tick()

    def away(_work):
        raise DatabaseUnavailable("away")

    monkeypatch.setattr(one._db, "write", away)
    one.tick()
    assert one.term is None
    other.tick()
    assert other.term is not None
    monkeypatch.undo()
    one.tick()
    assert one.term is None


def test_without_a_lock_that_proves_anything_the_row_alone_decides(db, candidates, monkeypatch):
    """Galera."""
    one, other = candidates("one"), candidates("other")
    for candidate in (one, other):
        monkeypatch.setattr(candidate._db, "leader_lock", lambda: None)
        candidate.tick()
    assert (epoch_of(one), other.term) == (1, None)
    end_term(db)
    other.tick()
    assert epoch_of(other) == 2
    one.tick()
    assert one.term is None


def test_on_galera_a_leader_is_elected_and_no_lock_is_asked_for(private_server, settings, open_database):
    """There the lock of one node proves nothing to the others: whoever believed it would not wait for a living term."""
    url = private_server(Galera).url
    make_tables(open_database(url).engine)
    one, other = (Candidate(open_database(url, **PATIENT), settings(database_url=url, **PATIENT), n) for n in "ab")
    for candidate in (one, other) * 2:
        candidate.tick()
    assert (epoch_of(one), other.term) == (1, None)
    assert one._lock_known
    assert one._lock is None
    mark(one.term, "written")
    end_term(one._db)
    other.tick()
    one.tick()
    assert (one.term, epoch_of(other)) == (None, 2)


# --- GET_LOCK ---


@pytest.fixture
def maria_candidates(maria_db, settings, open_database):
    url = maria_db.settings.database_url
    made = []

    def make(holder, **given):
        given = PATIENT | given
        made.append(Candidate(open_database(url, **given), settings(database_url=url, **given), holder))
        return made[-1]

    yield make
    for candidate in made:
        candidate._drop_lock()


def lock_of(db):
    return db.read(lambda conn: lock_name(conn, NAME))


def lock_holder(db):
    return db.read(lambda conn: conn.execute(text(f"SELECT IS_USED_LOCK('{lock_of(db)}')")).scalar())


def test_the_lock_is_taken_once_and_then_only_looked_at(maria_db, maria_candidates):
    """wolverine#4284: taking it on each tick stacks, and one release frees nothing."""
    one = maria_candidates("one")
    asked = []

    def note(_conn, _cursor, statement, *_rest):
        asked.append(statement)

    engine = one._db._reader
    event.listen(engine, "before_cursor_execute", note)
    for _ in range(5):
        one.tick()
    event.remove(engine, "before_cursor_execute", note)
    assert epoch_of(one) == 1
    assert sum("GET_LOCK" in statement for statement in asked) == 1
    assert sum("IS_USED_LOCK" in statement for statement in asked) == 4
    assert lock_holder(maria_db) is not None
    one.resign()
    wait_until(
        lambda: lock_holder(maria_db) is None, timeout=15, what="the lock is free, long before the server would end it"
    )


def test_a_killed_lock_connection_ends_the_term_and_the_next_one_has_a_new_epoch(maria_db, maria_candidates):
    """F-23, vault#11319."""
    one, other = maria_candidates("one"), maria_candidates("other")
    one.tick()
    old, holder = one.term, lock_holder(maria_db)
    with maria_db.engine.connect() as connection:
        connection.execute(text(f"KILL CONNECTION {holder}"))
        connection.rollback()
    wait_until(lambda: lock_holder(maria_db) is None, what="the lock is free")
    other.tick()
    assert epoch_of(other) == 2
    assert one.term is old  # it has not talked to the database yet
    with pytest.raises(StaleEpoch):
        mark(old, "too late")
    one.tick()
    assert one.term is None
    one.tick()
    assert one.term is None
    other.resign()
    one.tick()
    assert epoch_of(one) == 3


def test_a_leader_whose_lock_is_gone_steps_down_although_its_row_is_fine(maria_db, maria_candidates):
    one = maria_candidates("one")
    one.tick()
    holder = lock_holder(maria_db)
    with maria_db.engine.connect() as connection:
        connection.execute(text(f"KILL CONNECTION {holder}"))
        connection.rollback()
    one.tick()
    assert one.term is None
    wait_until(lambda: lock_holder(maria_db) is None, what="the server ended the killed session")
    one.tick()
    assert epoch_of(one) == 2


def test_who_closes_a_candidate_does_not_talk_on_a_connection_that_another_thread_waits_on(maria_candidates):
    one, other = maria_candidates("one"), maria_candidates("other")
    one.tick()
    assert one._lock._asking.acquire(timeout=5)  # as if its server did not answer
    one.resign()
    one._lock._asking.release()
    wait_until(lambda: other.tick() or epoch_of(other) == 2, what="the server ended the session, and with it the lock")


def test_who_gives_the_lock_up_leaves_it_to_the_next_before_its_connection_is_gone(maria_candidates, monkeypatch):
    """A server may notice late that a connection was closed."""
    one, other = maria_candidates("one"), maria_candidates("other")
    one.tick()
    closed = []

    def close_later(connection):
        closed.append(connection)

    monkeypatch.setattr(Connection, "invalidate", close_later)
    one.resign()
    other.tick()
    assert epoch_of(other) == 2
    assert len(closed) == 1
    monkeypatch.undo()
    closed[0].invalidate()


@pytest.mark.parametrize("answer", [None, 0])
def test_an_answer_that_is_not_one_is_no_success(maria_db, maria_candidates, monkeypatch, answer):
    """cacti#6777: NULL is an error."""
    one = maria_candidates("one")
    monkeypatch.setattr(ServerLock, "_ask", lambda *_args: answer)
    one.tick()
    assert one.term is None
    assert row(maria_db).epoch == 0


def test_a_lock_that_somebody_else_holds_is_waited_for(maria_db, maria_candidates):
    one, lock = maria_candidates("one"), lock_of(maria_db)
    with maria_db.engine.connect() as stranger:
        assert stranger.execute(text(f"SELECT GET_LOCK('{lock}', 0)")).scalar() == 1
        one.tick()
        one.tick()
        assert one.term is None
        stranger.execute(text(f"SELECT RELEASE_LOCK('{lock}')"))
        one.tick()
        assert epoch_of(one) == 1
        stranger.rollback()


def test_two_deployments_on_one_server_have_a_leader_each(mariadb, settings, open_database):
    """GET_LOCK's names are the server's: with the name of the setting alone the second would never lead."""
    made = []
    for name in ("Deployment_a", "deployment_b"):
        url = mariadb.create_database(name)
        make_tables(open_database(url).engine)
        made.append(Candidate(open_database(url, **PATIENT), settings(database_url=url, **PATIENT), "same-name"))
    for candidate in made * 2:
        candidate.tick()
    assert [epoch_of(candidate) for candidate in made] == [1, 1]
    for candidate in made:
        candidate.resign()


def test_the_name_of_a_lock_says_whose_it_is_in_lower_case_and_as_long_as_the_server_takes(maria_db, mariadb, settings):
    other = create_engine(mariadb.create_database("Deployment_a"))
    with maria_db.engine.connect() as here, other.connect() as there:
        long = ["x" * 63 + end for end in "ab"]
        names = [lock_name(conn, ours) for conn in (here, there) for ours in (NAME, "Prod.LEADER", *long)]
        taken = [here.execute(text("SELECT GET_LOCK(:name, 0)"), {"name": name}).scalar() for name in names]
        here.execute(text("SELECT RELEASE_ALL_LOCKS()"))
        here.rollback()
    other.dispose()
    assert taken == [1] * 8
    assert len(set(names)) == 8
    assert [name.startswith(f"{NAME}_") for name in names] == [True, False, False, False] * 2
    assert all(name == name.lower() and len(name) <= 64 for name in names)


def test_who_holds_a_lock_of_another_name_takes_the_term_over_and_two_never_write(maria_db, maria_candidates):
    """An instance of another version beside us: its lock proves nothing to us, the row decides."""
    one, other = maria_candidates("one"), maria_candidates("other")
    other._lock, other._lock_known = ServerLock(other._db._reader, NAME, 30.0), True
    terms = []
    for candidate in (one, other, one, one, other, other):
        candidate.tick()
        if candidate.term is not None:
            terms.append(candidate.term)
            mark(candidate.term, f"term-{len(terms)}")
        for older in {term.epoch: term for term in terms[:-1] if term.epoch != terms[-1].epoch}.values():
            with pytest.raises(StaleEpoch):
                mark(older, "too late")
    assert {term.epoch for term in terms} == {1, 2, 3, 4}
    assert len(marks(maria_db)) == len(terms)


def test_the_lock_connection_is_ended_by_the_server_when_it_is_not_used(maria_db, maria_candidates):
    """A frozen leader: nobody asks, and the server itself gives the lock to the next."""
    one = maria_candidates("one", leader_ttl_s=3.0)
    one.tick()
    assert lock_holder(maria_db) is not None
    wait_until(lambda: lock_holder(maria_db) is None, what="the server ended the idle session")
    one.tick()
    assert one.term is None


def test_a_transaction_that_was_frozen_half_way_does_not_hold_up_its_successor(maria_db, open_database):
    """A process stopped between fence and commit holds a lock on the row that every successor needs."""
    frozen_db = open_database(maria_db.settings.database_url)
    leadership.ensure_row(maria_db, NAME)
    epoch = take(maria_db)
    with frozen_db.engine.connect() as frozen:
        leadership.fence(frozen, NAME, epoch)
        assert take(maria_db, "successor") == epoch + 1  # before its patience was over
        with pytest.raises(DBAPIError):  # the server ended it
            frozen.execute(text("SELECT 1"))
        frozen.invalidate()


# --- by hand ---


def test_a_duty_by_hand_runs_under_the_living_leaders_epoch_or_one_of_its_own(db, db_url, settings, candidates):
    config = settings(database_url=db_url, leader_ttl_s=30.0)
    own = borrow(db, config, "operator")
    assert own.epoch == 1
    mark(own, "by-hand")
    assert borrow(db, config, "operator").epoch == 1
    end_term(db)
    one = candidates("one")
    one.tick()
    assert borrow(db, config, "operator").epoch == epoch_of(one) == 2
    assert marks(db) == ["by-hand"]
