"""Policies: what is written, what it was before, and how soon others know."""

from concurrent.futures import ThreadPoolExecutor, wait

import pytest
from sqlalchemy import func, select

from orchestrator.errors import InvalidInput, PolicyNotFound
from orchestrator.policies import AgentPolicy, Book, CapPolicy, PausePolicy, Scope, keys_of, parse
from orchestrator.store import policies
from orchestrator.store.schema import audit
from tests.factories import meeting, write_as


def put(db, scope, name, document, actor="ops"):
    return write_as(actor, db, lambda conn: policies.put(conn, scope, name, document))


def book(db) -> Book:
    return db.read(policies.read_book)


def test_a_policy_is_kept_with_its_history(db):
    assert put(db, Scope.AGENT, "a", AgentPolicy(weight=2.0)) == 1
    assert put(db, Scope.AGENT, "a", AgentPolicy(weight=3.0), "other") == 2
    kept = db.read(lambda conn: policies.get(conn, Scope.AGENT, "a"))
    assert (kept["version"], kept["document"], kept["actor"]) == (2, {"weight": 3.0}, "other")
    changes = db.read(lambda conn: policies.history(conn, Scope.AGENT, "a"))
    assert [(one["version"], one["before"], one["after"], one["actor"]) for one in changes] == [
        (2, {"weight": 2.0}, {"weight": 3.0}, "other"),
        (1, None, {"weight": 2.0}, "ops"),
    ]
    told = select(func.count()).where(audit.c.event_type == "policy.changed", audit.c.actor.is_not(None))
    assert db.read(lambda conn: conn.execute(told).scalar()) == 2


def test_the_same_again_is_no_change(db):
    put(db, Scope.AGENT, "a", AgentPolicy(rate=5.0))
    before = db.read(policies.generation)
    assert put(db, Scope.AGENT, "a", AgentPolicy(rate=5.0)) == 1
    assert db.read(policies.generation) == before


def test_two_who_make_the_same_policy_at_once_change_it_one_after_the_other(maria_db, monkeypatch):
    monkeypatch.setattr(policies, "_locked", meeting(2, policies._locked))
    documents = [AgentPolicy(weight=2.0), AgentPolicy(weight=3.0)]
    with ThreadPoolExecutor(2) as pool:
        versions = list(pool.map(lambda document: put(maria_db, Scope.AGENT, "a", document), documents))
    assert sorted(versions) == [1, 2]
    changes = maria_db.read(lambda conn: policies.history(conn, Scope.AGENT, "a"))
    assert [one["version"] for one in changes] == [2, 1]
    assert changes[0]["before"] == changes[1]["after"]


def test_rolling_back_is_a_change_too(db):
    put(db, Scope.CONCURRENCY, "agent:a", CapPolicy(max=1))
    put(db, Scope.CONCURRENCY, "agent:a", CapPolicy(max=9))
    db.write(lambda conn: policies.remove(conn, Scope.CONCURRENCY, "agent:a"))
    assert book(db).cap("agent:a") is None
    assert db.write(lambda conn: policies.roll_back(conn, Scope.CONCURRENCY, "agent:a", 1)) == 4
    assert book(db).cap("agent:a") == 1
    assert db.write(lambda conn: policies.roll_back(conn, Scope.CONCURRENCY, "agent:a", 3)) is None
    assert book(db).cap("agent:a") is None
    with pytest.raises(PolicyNotFound):
        db.write(lambda conn: policies.roll_back(conn, Scope.CONCURRENCY, "agent:a", 99))


def test_what_is_not_there_cannot_be_read_or_removed(db):
    with pytest.raises(PolicyNotFound):
        db.read(lambda conn: policies.get(conn, Scope.AGENT, "nobody"))
    with pytest.raises(PolicyNotFound):
        db.write(lambda conn: policies.remove(conn, Scope.AGENT, "nobody"))


def test_a_copy_hears_of_changes(db):
    copy = policies.Copy()
    assert not db.read(copy.book).limits
    put(db, Scope.CONCURRENCY, "global", CapPolicy(max=3))
    copy.expire()
    assert db.read(copy.book).cap("global") == 3


def test_a_copy_that_is_fresh_asks_nothing(db, monkeypatch):
    copy = policies.Copy()
    db.read(copy.book)
    monkeypatch.setattr(policies, "generation", lambda _conn: pytest.fail("asked"))
    monkeypatch.setattr(policies, "FRESH_S", 60.0)
    db.read(copy.book)


def test_the_caps_of_a_job():
    caps = {"global": 9, "agent:*": 2, "agent:vip": 5, "host:*": 1}
    one = Book(caps=caps, pauses={"type:embed": PausePolicy()})
    assert one.capped(keys_of("default", "vip", "echo", None, ["host:a", "other"])) == {
        "agent:vip": 5,
        "global": 9,
        "host:a": 1,
    }
    assert one.capped(keys_of("default", "me", "embed", "m")) == {"agent:me": 2, "global": 9, "type:embed": 0}
    assert list(one.capped(["host:b", "host:a", "global"])) == ["global", "host:a", "host:b"]


@pytest.mark.parametrize(
    ("scope", "body", "field"),
    [
        (Scope.AGENT, {"weight": 0}, "weight"),
        (Scope.AGENT, {"burst": 5}, "body"),
        (Scope.AGENT, {"max_in_flight": 5, "low_in_flight": 6}, "body"),
        (Scope.AGENT, {"wait": 1}, "wait"),
        (Scope.AGENT, {"rate": float("nan")}, "rate"),
        (Scope.AGENT, [], "body"),
        (Scope.CONCURRENCY, {}, "max"),
        (Scope.CONCURRENCY, {"max": -1}, "max"),
        (Scope.CONCURRENCY, {"max": True}, "max"),
        (Scope.PAUSE, {"action": "cpu"}, "action"),
    ],
)
def test_a_wrong_document_is_refused_by_field(scope, body, field):
    with pytest.raises(InvalidInput) as refused:
        parse(scope, body)
    assert refused.value.field == field


def test_a_document_of_a_later_version_does_not_stop_the_others():
    rows = [("agent", "a", {"weight": 2.0, "new": 1}), ("agent", "b", {"weight": 4.0}), ("other", "x", {})]
    assert Book.of(1, rows).agents.keys() == {"b"}


def test_two_changes_at_once_are_both_seen_in_whatever_order_they_are_committed(maria_db):
    put(maria_db, Scope.CONCURRENCY, "host:x", CapPolicy(max=1))
    copy = policies.Copy()

    def slow(conn):
        policies.put(conn, Scope.PAUSE, "agent:a", PausePolicy())
        other = threads.submit(put, maria_db, Scope.PAUSE, "agent:b", PausePolicy())
        wait([other], timeout=0.5)  # it may have to wait for us, and we do not wait for it
        maria_db.read(copy.book)
        return other

    with ThreadPoolExecutor() as threads:
        maria_db.write(slow).result()
    copy.expire()
    assert set(maria_db.read(copy.book).pauses) == {"agent:a", "agent:b"}
