"""Processes that die or stay on cards of the stand-in driver, and cards that fail: who gets the memory, and when."""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from sqlalchemy import select

from orchestrator.settings import Settings
from orchestrator.store import audit, schema
from orchestrator.stream.hub import Hub
from tests.api.conftest import running
from tests.cluster import Cluster, Member, post
from tests.gpu.driver import Driver
from tests.plain import http
from tests.processes import gone
from tests.waiting import wait_until

CARDS = ("GPU-aaaa", "GPU-bbbb")
#: Of which leases may use 18,000.
TOTAL_MB = 20_000
#: Seconds that a busy machine may take longer than the system promises.
SLACK_S = 2.0


class Note(NamedTuple):
    """What a handler wrote down when it held its memory."""

    job_id: str
    attempt: int
    pid: int
    device: str


class Node:
    """One orchestrator behind HTTP, and one node with two cards."""

    def __init__(self, cluster: Cluster, cards: Driver, url: str, hub: Hub, folder: Path) -> None:
        self.cluster, self.cards, self.url, self.hub = cluster, cards, url, hub
        self.db = cluster.db
        self.notes_file = folder / "notes"
        self.notes_file.touch()

    def work(self, **given: Any) -> Member:
        return self.cluster.worker(
            environment=self.cards.environment(), worker_handlers=("tests.worker.card_handlers",), **given
        )

    def submit(self, type: str, memory_mb: int, need_mb: int, **payload: Any) -> str:
        job_id = f"job-{secrets.token_hex(4)}"
        given = {"notes": str(self.notes_file), "memory_mb": memory_mb} | payload
        job = {"job_id": job_id, "type": type, "payload": given, "min_memory_mb": need_mb}
        post(self.url, "/jobs/submit", job)
        return job_id

    def notes(self, job_id: str) -> list[Note]:
        lines = [line.split() for line in self.notes_file.read_text().splitlines()]
        found = [Note(job, int(attempt), int(pid), device) for job, attempt, pid, device in lines]
        return [note for note in found if note.job_id == job_id]

    def started(self, job_id: str, attempt: int = 1) -> Note:
        """Wait until an attempt holds its memory."""

        def look() -> Note | None:
            return next((note for note in self.notes(job_id) if note.attempt == attempt), None)

        found = wait_until(look, timeout=30, what=lambda: f"a start of {self.cluster.job(job_id)}")
        assert found is not None
        return found

    def gpu(self, uuid: str) -> Any:
        return self.db.read(lambda conn: conn.execute(select(schema.gpus).where(schema.gpus.c.gpu_uuid == uuid)).one())

    def lease(self, memory_mb: int, pid: int | None = None, ttl_s: float = 60.0) -> dict[str, Any]:
        body = {"agent": "test", "min_memory_mb": memory_mb, "ttl_seconds": ttl_s, "node_id": "node-1"}
        return post(self.url, "/leases", body if pid is None else body | {"pid": pid})

    def has_room(self, memory_mb: int) -> bool:
        """Whether it is of any use to ask for a lease of so much, which costs far more than a look."""
        cards = map(self.gpu, CARDS)
        return any(card.leased_mb + card.foreign_mb + memory_mb <= card.usable_mb for card in cards)

    def becomes_leasable(self, memory_mb: int, within_s: float) -> None:
        """A lease of so much is granted, by the clock of now; it is given back."""
        began = time.monotonic()

        def granted() -> dict[str, Any]:
            answer = self.lease(memory_mb) if self.has_room(memory_mb) else {}
            return answer if answer.get("granted") else {}

        grant = wait_until(
            granted,
            timeout=within_s + 10,
            what=lambda: f"room for {memory_mb} MB: {self.lease(memory_mb)}",
        )
        took_s = time.monotonic() - began
        assert took_s <= within_s + SLACK_S, f"took {took_s:.1f} s"
        post(self.url, f"/leases/{grant['token']}/release", {})

    def history(self, job_id: str) -> list[dict[str, Any]]:
        return self.db.read(lambda conn: audit.of_job(conn, job_id))


@pytest.fixture
def cards(driver_library: Path, tmp_path: Path) -> Driver:
    driver = Driver(tmp_path / "gpus", driver_library)
    for place, uuid in enumerate(CARDS):
        driver.add_gpu(uuid, TOTAL_MB, bus=0x41 + place)
    return driver


@pytest.fixture
def node(
    db_url: str, redis_url: str, settings: Callable[..., Settings], cards: Driver, tmp_path: Path
) -> Iterator[Node]:
    """Times of leases and samples as they are by default; nobody waits for a worker's death."""
    given = settings(
        database_url=db_url,
        redis_url=redis_url,
        data_dir=tmp_path,
        gpu_backend="nvml",
        node_id="node-1",
        worker_slots=2,
        worker_heartbeat_s=2.0,
        worker_timeout_s=20.0,
        claim_idle_ms=10_000,
        purge_interval_s=1.0,
    )
    cluster = Cluster(given, tmp_path, forked=True)
    with running(given) as api:
        yield Node(cluster, cards, str(api.http.base_url), api.orchestrator.hub, tmp_path)
    cluster.close()


@pytest.fixture
def bystander() -> Iterator[Callable[[], int]]:
    """Start processes that just live; their pids. The test's end kills them."""
    children: list[subprocess.Popen[bytes]] = []

    def start() -> int:
        children.append(subprocess.Popen(["sleep", "600"]))
        return children[-1].pid

    yield start
    for child in children:
        child.kill()
        child.wait()


# ── processes that die ──────────────────────────────────────────────────────────────────────────────────────────

CLIENT = """
import os, sys, time
from pathlib import Path
from orchestrator.client import lease
from tests.gpu.driver import VARIABLE, Driver
driver = Driver(Path(os.environ[VARIABLE]), Path("nobody loads it"))
with lease(min_memory_mb=17000, agent="trainer", ttl_seconds=4.0) as held, driver.allocated(held.gpu_uuids[0], 16000):
    print(held.gpu_uuids[0], flush=True)
    time.sleep(600)
"""


def test_a_killed_client_frees_its_memory_within_ttl_purge_and_sample(node):
    """INV-17. TTL 4 s + purge 1 s + sample 1 s; until then nobody else gets it."""
    node.work()
    environment = {**os.environ, **node.cards.environment(), "GPUORCH_URL": node.url, "ORCH_NODE_ID": "node-1"}
    with subprocess.Popen([sys.executable, "-c", CLIENT], env=environment, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        uuid = client.stdout.readline().strip()
        assert uuid in CARDS
        wait_until(lambda: node.gpu(uuid).used_mb == 16_000, what="its memory seen")
        assert (node.gpu(uuid).leased_mb, node.gpu(uuid).foreign_mb) == (17_000, 0)
        (other,) = set(CARDS) - {uuid}
        node.cards.set_used(other, TOTAL_MB - 1000)
        wait_until(lambda: node.gpu(other).gate_closed_at, what="the other card is full")
        client.kill()
        assert not node.lease(2000)["granted"]
        node.becomes_leasable(17_000, within_s=4.0 + 1.0 + 1.0)
    assert node.gpu(uuid).quarantined_at is None


def test_a_killed_slot_frees_its_memory_within_five_seconds_and_its_job_is_retried(node):
    worker = node.work()
    job_id = node.submit("use", 16_000, need_mb=17_000)
    started = node.started(job_id)
    assert started.pid in worker.slots()
    wait_until(lambda: node.gpu(started.device).used_mb == 16_000, what="its memory seen")
    (other,) = set(CARDS) - {started.device}
    node.cards.set_used(other, TOTAL_MB - 1000)
    wait_until(lambda: node.gpu(other).gate_closed_at, what="the other card is full")
    os.kill(started.pid, signal.SIGKILL)
    killed = time.monotonic()
    again = node.started(job_id, attempt=2)
    assert again.device == started.device
    assert time.monotonic() - killed < 5.0 + SLACK_S
    record = node.cluster.wait_for(job_id, "done")
    assert (record["attempt"], record["crashes"]) == (2, 1)
    node.becomes_leasable(17_000, within_s=5.0)
    assert node.gpu(started.device).quarantined_at is None


# ── cards that fail ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_job_whose_card_is_lost_runs_again_on_another_and_its_history_says_why(node, bystander):
    """F-39."""
    node.work()
    job_id = node.submit("use", 4000, need_mb=5000)
    first = node.started(job_id)
    neighbour = node.lease(5000, pid=bystander())
    assert neighbour["granted"]
    node.cards.lose(first.device)
    second = node.started(job_id, attempt=2)
    assert second.device != first.device
    record = node.cluster.wait_for(job_id, "done")
    assert (record["attempt"], record["crashes"]) == (2, 1)
    (retry,) = [event for event in node.history(job_id) if event["event_type"] == "job.retry"]
    assert retry["details"]["kind"] == "gpu_lost" and first.device in retry["details"]["error"]
    assert not Path(f"/proc/{first.pid}").exists()
    lost = node.gpu(first.device)
    assert (lost.health, lost.leased_mb) == ("lost", 0)
    assert node.gpu(second.device).quarantined_at is None
    answer = http.post(f"{node.url}/leases/{neighbour['token']}/heartbeat")
    if neighbour["gpu_uuid"] == first.device:
        assert answer.status_code == 410 and "lost" in answer.text
    else:
        assert answer.status_code == 200


def test_the_leases_of_clients_on_a_lost_card_are_revoked_with_the_reason(node, bystander):
    node.work()
    held = [node.lease(10_000, pid=bystander()) for _ in CARDS]
    assert {lease["gpu_uuid"] for lease in held} == set(CARDS)
    node.cards.lose(CARDS[0])
    by_card = {lease["gpu_uuid"]: f"{node.url}/leases/{lease['token']}/heartbeat" for lease in held}
    wait_until(lambda: http.post(by_card[CARDS[0]]).status_code == 410, what="revoked")
    assert "fell off the bus" in http.post(by_card[CARDS[0]]).text
    assert http.post(by_card[CARDS[1]]).status_code == 200
    assert (node.gpu(CARDS[0]).leased_mb, node.gpu(CARDS[1]).leased_mb) == (0, 10_000)
    assert not node.lease(9000)["granted"]


# ── memory that others took ─────────────────────────────────────────────────────────────────────────────────────


def test_memory_taken_between_grant_and_start_hands_the_job_back_until_there_is_room(node, bystander):
    """F-42: the database gives what it believes to be there; the look before the start finds otherwise."""
    # It has sampled its cards when it is ready; the next sample is not near.
    worker = node.work(worker_slots=1, gpu_sample_s=5.0, gpu_stale_s=30.0, worker_heartbeat_s=5.0)
    stranger = bystander()
    for uuid in CARDS:
        node.cards.set_processes(uuid, (stranger, 15_000))
    job_id = node.submit("use", 9000, need_mb=10_000, seconds=0)
    back = wait_until(
        lambda: [event for event in node.history(job_id) if event["event_type"] == "job.handed_back"],
        timeout=30,
        what=lambda: f"handed back: {node.history(job_id)} {worker.tail()}",
    )
    assert "has 5000 MB free: others took it just now" in back[0]["details"]["error"]
    assert node.notes(job_id) == []
    # From now on the database knows, and nobody claims the job in vain.
    wait_until(
        lambda: "3000 of 18000 MB free" in (node.cluster.job(job_id)["wait_reason"] or ""),
        timeout=30,
        what=lambda: f"a reason to wait: {node.cluster.job(job_id)}",
    )
    assert [node.gpu(uuid).leased_mb for uuid in CARDS] == [0, 0]
    node.cards.set_processes(CARDS[1])
    node.hub.ring("test")  # a sample now
    record = node.cluster.wait_for(job_id, "done")
    assert (record["attempts"], record["crashes"]) == (1, 0)
    assert [note.device for note in node.notes(job_id)] == [CARDS[1]]


# ── memory that does not come back ──────────────────────────────────────────────────────────────────────────────


def test_a_process_that_outlives_its_job_is_killed_and_its_memory_comes_back(node):
    """F-43: it left its slot's group and session, and is known by the mark in its environment."""
    worker = node.work(worker_slots=1)
    job_id = node.submit("abandon", 16_000, need_mb=17_000)
    left = node.started(job_id)
    try:
        node.cluster.wait_for(job_id, "done")
        worker.says("ended a process that outlived its job")
        wait_until(lambda: gone(left.pid), what="it is gone")
        wait_until(lambda: node.gpu(left.device).leased_mb == 0, what="its memory is back")
        node.becomes_leasable(17_000, within_s=3.0)
        assert node.gpu(left.device).quarantined_at is None
        again = node.submit("use", 16_000, need_mb=17_000, seconds=0)
        node.cluster.wait_for(again, "done")
    finally:
        with suppress(ProcessLookupError):
            os.kill(left.pid, signal.SIGKILL)


def test_a_client_that_keeps_its_memory_puts_the_card_into_quarantine_until_it_is_cleared(node, bystander):
    """INV-16, F-43: nobody kills a client's process."""
    worker = node.work(gpu_release_s=3.0)
    pid = bystander()
    held = node.lease(10_000, pid=pid)
    uuid = held["gpu_uuid"]
    node.cards.set_processes(uuid, (pid, 8000))
    wait_until(lambda: node.gpu(uuid).used_mb == 8000, what="its memory seen")
    post(node.url, f"/leases/{held['token']}/release", {})
    assert node.gpu(uuid).leased_mb == 10_000  # not free: it is in use
    worker.says("GPU quarantined")
    card = node.gpu(uuid)
    assert card.quarantined_at is not None
    assert f"held by process {pid}" in card.quarantine_reason
    assert (card.leased_mb, card.foreign_mb) == (0, 8000)
    grants = [node.lease(7000, pid=pid) for _ in range(3)]
    assert [grant["granted"] for grant in grants] == [True, True, False]  # two on the other card
    assert uuid not in {grant.get("gpu_uuid") for grant in grants}
    assert Path(f"/proc/{pid}").exists()

    node.cards.set_processes(uuid)
    wait_until(lambda: node.gpu(uuid).used_mb == 0, what="seen to be empty")
    assert not node.lease(7000)["granted"]  # an operator must look first
    assert post(node.url, f"/gpus/{uuid}/clear", {}) == {"cleared": True}
    assert node.lease(18_000)["gpu_uuid"] == uuid
