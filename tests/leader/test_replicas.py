"""Pools of the provider kubernetes, against an API that is served here and keeps what it was told."""

import json
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from orchestrator import kubernetes
from orchestrator.errors import InvalidInput, KubernetesUnavailable
from orchestrator.kubernetes import Deployment, Kubernetes
from orchestrator.leader import delivery, duties, replicas
from orchestrator.leader.context import DutyContext
from orchestrator.leader.term import borrow
from orchestrator.pools import PoolChange, PoolSpec
from orchestrator.publisher import Publisher
from orchestrator.settings import Settings
from orchestrator.store import pools
from orchestrator.stream.hub import Hub
from tests.factories import hire
from tests.kubernetes_api import Asked, KubernetesApi


class Api(KubernetesApi):
    """Deployments by path."""

    def __init__(self) -> None:
        super().__init__()
        self.replicas: dict[str, int] = {}
        #: Said instead of what is true.
        self.says: tuple[int, bytes] | None = None
        #: Paths that get no answer before it speaks.
        self.silent: set[str] = set()

    def answer(self, asked: Asked) -> tuple[int, bytes]:
        if asked.path in self.silent:
            self.speak.wait(30.0)
        if asked.path not in self.replicas:
            return self.says or (404, json.dumps({"kind": "Status", "message": "not found"}).encode())
        if asked.body:
            self.replicas[asked.path] = asked.body["spec"]["replicas"]
        scale = {"kind": "Scale", "spec": {"replicas": self.replicas[asked.path]}}
        return self.says or (200, json.dumps(scale).encode())


@pytest.fixture
def api() -> Iterator[Api]:
    with Api().serving() as served:
        yield served


CHAT = Deployment("models", "chat")


@pytest.fixture
def context(db, api, settings, tmp_path, redis_server):
    token = tmp_path / "token"
    token.write_text("secret\n")
    redis_server.flush()
    given: Settings = settings(
        database_url=db.settings.database_url,
        redis_url=redis_server.url,
        kubernetes_url=api.url,
        kubernetes_token_file=token,
        leader_ttl_s=60.0,  # the term of a test lasts longer than the test, however slow the machine
        worker_timeout_s=30.0,
    )
    hub = Hub(given)
    yield DutyContext(borrow(db, given, "test"), hub, Publisher(db, hub, given), given)
    hub.close()


@pytest.fixture
def clock(monkeypatch):
    """The time that counts for `Replicas`; it stands still until it is told otherwise."""
    given = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(replicas, "time", SimpleNamespace(monotonic=lambda: given.now))
    return given


def create(db, name="chat", **fields):
    metadata = {"deployment": name, "namespace": "models"}
    spec = PoolSpec(pool_id=name, provider="kubernetes", metadata=metadata, hold_seconds=3600, **fields)
    db.write(lambda conn: pools.create(conn, spec))


def reason(db, name="chat"):
    return db.read(lambda conn: pools.get(conn, name))["status_reason"] or ""


def test_the_deployment_follows_the_pool(db, context, api):
    api.replicas[CHAT.path] = 0
    create(db, desired_workers=3)
    duties.reconcile(context)
    assert api.replicas[CHAT.path] == 3
    db.write(lambda conn: pools.change(conn, "chat", PoolChange(desired_workers=2)))
    duties.reconcile(context)
    assert api.replicas[CHAT.path] == 2
    assert {asked.token for asked in api.requests} == {"Bearer secret"}
    assert {asked.kind for asked in api.requests if asked.method == "PATCH"} == {"application/merge-patch+json"}


def test_what_is_as_it_should_be_is_told_nothing_and_asked_rarely(db, context, api, clock):
    api.replicas[CHAT.path] = 1
    create(db)
    for _ in range(5):
        duties.reconcile(context)
    assert [asked.method for asked in api.requests] == ["GET"]


def test_a_draining_pool_keeps_its_pods_until_it_has_stopped(db, context, api):
    api.replicas[CHAT.path] = 1
    create(db)
    hand = hire(db, pool="chat")
    duties.reconcile(context)
    db.write(lambda conn: pools.drain(conn, "chat", 60.0))
    duties.reconcile(context)
    assert api.replicas[CHAT.path] == 1
    hand.go_silent()
    delivery.reclaim(context)
    duties.reconcile(context)  # sees that nobody is left
    duties.reconcile(context)  # and takes the pods away
    assert api.replicas[CHAT.path] == 0


def test_a_refusal_is_the_pools_reason_and_holds_up_no_other_pool(db, context, api):
    create(db)
    other = PoolSpec(pool_id="local-one", desired_workers=0)
    db.write(lambda conn: pools.create(conn, other))
    duties.reconcile(context)
    assert "404" in db.read(lambda conn: pools.get(conn, "chat"))["status_reason"]
    assert db.read(lambda conn: pools.get(conn, "local-one"))["status"] == "running"


NONSENSE = [b"{}", b"[]", b"null", b'"x"', b'{"spec": null}', b'{"spec": {"replicas": "x"}}', b"<html>", b"[" * 100_000]


@pytest.mark.parametrize("said", NONSENSE)
def test_an_answer_that_is_no_scale_is_the_pools_reason(db, context, api, said):
    api.says = 200, said
    create(db)
    db.write(lambda conn: pools.create(conn, PoolSpec(pool_id="local-one", desired_workers=0)))
    duties.reconcile(context)
    assert "no Scale" in reason(db)
    assert db.read(lambda conn: pools.get(conn, "local-one"))["status"] == "running"


def test_a_refusal_that_no_database_would_store_is_stored(db, context, api):
    api.says = 403, b'{"message": "\\ud800 says no"}'
    create(db)
    duties.reconcile(context)
    assert "? says no" in reason(db)


def test_broken_certificates_are_named(settings, tmp_path):
    (tmp_path / "ca.crt").touch()
    trusting_nobody = Kubernetes(settings(kubernetes_url="https://127.0.0.1:9", kubernetes_ca_file=tmp_path / "ca.crt"))
    with pytest.raises(KubernetesUnavailable, match="SSLError"):
        trusting_nobody.scale(CHAT, 1)


def test_an_api_that_does_not_answer_is_asked_ever_more_rarely_by_all_pools_together(
    db, context, api, clock, monkeypatch
):
    monkeypatch.setattr(kubernetes, "TIMEOUT_S", 0.05)
    names = ["chat", "draw", "talk"]
    api.silent = {Deployment("models", name).path for name in names}
    for name in names:
        create(db, name)
    scale, asked, start = Kubernetes.scale, [], clock.now

    def asking(*args):
        asked.append(clock.now - start)
        return scale(*args)

    monkeypatch.setattr(Kubernetes, "scale", asking)
    for second in (0, 1, 2, 5, 6, 13, 14, 29, 30, 61, 62, 121, 122):
        clock.now = start + second
        duties.reconcile(context)
        assert all("TimeoutError" in reason(db, name) for name in names)
    assert asked == [0, 2, 6, 14, 30, 62, 122]

    monkeypatch.setattr(kubernetes, "TIMEOUT_S", 30.0)
    api.speak.set()
    api.silent.clear()
    api.replicas = dict.fromkeys([Deployment("models", name).path for name in names], 0)
    clock.now += 60.0
    duties.reconcile(context)
    assert set(api.replicas.values()) == {1}
    assert not any("TimeoutError" in reason(db, name) for name in names)


def test_a_deployment_that_hangs_leaves_turns_to_the_others(db, context, api, clock, monkeypatch):
    scale = Kubernetes.scale

    def scaling(self, deployment, count):
        """The other one answers in time, however slow the machine."""
        monkeypatch.setattr(kubernetes, "TIMEOUT_S", 0.05 if deployment == CHAT else 30.0)
        return scale(self, deployment, count)

    monkeypatch.setattr(Kubernetes, "scale", scaling)
    api.silent = {CHAT.path}
    other = Deployment("models", "draw").path
    api.replicas = {CHAT.path: 0, other: 0}
    create(db)
    create(db, "draw")
    duties.reconcile(context)
    assert api.replicas[other] == 0
    clock.now += 2.0
    duties.reconcile(context)
    assert api.replicas == {CHAT.path: 0, other: 1}


def test_slow_answers_are_waited_for_one_by_one(db, context, api, clock, monkeypatch):
    slow_scale = Kubernetes.scale

    def scale(self, deployment, count):
        clock.now += replicas.SLOW_S
        return slow_scale(self, deployment, count)

    monkeypatch.setattr(Kubernetes, "scale", scale)
    names = ["chat", "draw", "talk"]
    api.replicas = dict.fromkeys([Deployment("models", name).path for name in names], 0)
    for name in names:
        create(db, name)
    for looks in range(1, 4):
        duties.reconcile(context)
        assert sum(api.replicas.values()) == looks


def test_an_api_that_is_away_is_named(settings):
    away = Kubernetes(settings(kubernetes_url="http://127.0.0.1:9"))
    with pytest.raises(KubernetesUnavailable, match="GET /apis/apps/v1/namespaces/models/deployments/chat/scale"):
        away.scale(CHAT, 1)


@pytest.mark.parametrize("name", ["../secrets", "a/b", "", "UPPER", "x" * 300, "a?b", None])
def test_only_a_name_becomes_part_of_a_path(name):
    with pytest.raises(InvalidInput):
        Deployment.of({"deployment": name}, "models")
    with pytest.raises(InvalidInput):
        Deployment.of({"deployment": "chat", "namespace": name or "-"}, "models")
