"""What deleting a worker's pod costs, as Kubernetes is told: an API is served here and keeps what it hears."""

import threading
from collections.abc import Iterator
from itertools import pairwise

import pytest

from orchestrator.kubernetes import DELETION_COST, Kubernetes, Pod
from tests.factories import new_job
from tests.kubernetes_api import Asked, KubernetesApi
from tests.waiting import wait_until
from tests.worker.test_worker import wait_for_heartbeat
from worker import price as prices
from worker.price import BUSY, FULL, IDLE, LONGEST_REST_S, REST_S, PriceTag, cost
from worker.supervisor import Supervisor

PATH = "/api/v1/namespaces/models/pods/embed-1"


class Api(KubernetesApi):
    def __init__(self) -> None:
        super().__init__()
        self.speak.set()
        self.status = 200

    def answer(self, _asked: Asked) -> tuple[int, bytes]:
        self.speak.wait(60)
        return self.status, b"{}"

    @property
    def costs(self) -> list[int]:
        return [int(asked.body["metadata"]["annotations"][DELETION_COST]) for asked in self.requests]


@pytest.fixture
def api() -> Iterator[Api]:
    with Api().serving() as served:
        yield served


@pytest.fixture
def given(settings, api, tmp_path):
    token = tmp_path / "token"
    token.write_text("secret\n")
    named = {"pod_name": "embed-1", "kubernetes_namespace": "models"}
    return settings(kubernetes_url=api.url, kubernetes_token_file=token, **named)


class Load:
    now = (0, 2)

    def __call__(self):
        return self.now


@pytest.mark.parametrize(
    ("busy", "slots", "price"), [(0, 0, IDLE), (0, 4, IDLE), (1, 4, BUSY), (4, 4, FULL), (5, 4, FULL)]
)
def test_busier_is_dearer(busy, slots, price):
    assert cost(busy, slots) == price


def test_the_pod_is_patched_and_nothing_else(given, api):
    Kubernetes(given).price(Pod("models", "embed-1"), 100)
    told = {"metadata": {"annotations": {"controller.kubernetes.io/pod-deletion-cost": "100"}}}
    assert api.requests == [Asked("PATCH", PATH, "Bearer secret", "application/merge-patch+json", told)]


def test_it_is_written_when_it_changes_and_not_often(given, api):
    load = Load()
    tag = PriceTag(given, load)
    tag.look(0.0)
    load.now = (1, 2)
    tag.look(REST_S - 1)
    assert api.costs == [IDLE]
    tag.look(REST_S)
    tag.look(3 * REST_S)
    assert api.costs == [IDLE, BUSY]
    load.now = (2, 2)
    tag.look(4 * REST_S)
    load.now = (0, 2)
    tag.look(5 * REST_S)
    assert api.costs == [IDLE, BUSY, FULL, IDLE]


def test_an_api_that_refuses_is_left_alone_for_longer_and_longer(given, api):
    tag = PriceTag(given, Load())
    api.status = 403
    moments = [second for second in range(2000) if _heard(tag, api, float(second))]
    pauses = [after - before for before, after in pairwise(moments)]
    assert pauses[0] >= 2 * REST_S and max(pauses) == LONGEST_REST_S and pauses == sorted(pauses)
    tag._failures = 2000  # after days of it
    tag.look(1e5)
    api.status = 200
    tag.look(1e6)
    assert api.costs[-1] == IDLE


def _heard(tag, api, now) -> bool:
    before = len(api.requests)
    tag.look(now)
    return len(api.requests) > before


@pytest.fixture
def in_a_pod(cluster, api, monkeypatch):
    """Start a worker in this process, whose price is written whenever it changes."""
    monkeypatch.setattr(prices, "REST_S", 0.1)
    monkeypatch.setattr(prices, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr("orchestrator.kubernetes.TIMEOUT_S", 600.0)  # who asks again would tell the next price
    named = {"pod_name": "embed-1", "kubernetes_namespace": "models", "kubernetes_url": api.url}
    given = named | {"worker_handlers": ("tests.worker.gated_handlers",)}
    supervisor = Supervisor(cluster.settings.model_copy(update=given))
    thread = threading.Thread(target=supervisor.run, name="supervisor")
    yield thread.start
    supervisor.stop()
    if thread.is_alive():
        thread.join()


def test_a_worker_says_what_it_would_cost_and_heartbeats_do_not_wait_for_kubernetes(
    cluster, orchestrator, api, gate, in_a_pod
):
    api.speak.clear()  # nobody is answered
    in_a_pod()
    wait_until(lambda: api.costs[:1] == [IDLE], what="a first price")
    job = new_job(type="gated", payload={"gate": str(gate)})
    orchestrator.submit([job]).result(10)
    cluster.wait_for(job.job_id, "running")
    wait_for_heartbeat(cluster)
    assert api.costs == [IDLE]
    api.speak.set()
    wait_until(lambda: BUSY in api.costs, what="a busy pod")
    assert {asked.path for asked in api.requests} == {PATH}
    gate.unlink()
    cluster.wait_for(job.job_id, "done")


def test_outside_of_kubernetes_nobody_is_told_anything(cluster, orchestrator, api):
    cluster.worker(kubernetes_url=api.url)
    job = new_job()
    orchestrator.submit([job]).result(10)
    cluster.wait_for(job.job_id, "done")
    assert api.requests == []
