"""The example in examples/: a worker that knows nothing but HTTP, run and killed as a real process."""

import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.settings import Settings
from orchestrator.store import worker_reads
from tests.cluster import Cluster, post
from tests.conftest import SHORT
from tests.tables import make_tables
from tests.waiting import wait_until

pytestmark = pytest.mark.e2e

#: Seconds until a silent worker is lost.
TIMEOUT_S = 2.0
EXAMPLE = Path(__file__).parents[2] / "examples" / "http_worker.py"

Start = Callable[[str], subprocess.Popen[str]]


@pytest.fixture(scope="module")
def cluster(mariadb, redis_server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One for all tests here, each of which has a pool of its own."""
    redis_server.flush()
    url = mariadb.create_database(f"http_{secrets.token_hex(4)}")
    short = SHORT | {"worker_timeout_s": TIMEOUT_S, "worker_heartbeat_s": TIMEOUT_S / 5}
    opened = Cluster(Settings(**short, database_url=url, redis_url=redis_server.url), tmp_path_factory.mktemp("http"))
    make_tables(opened.db.engine)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def url(cluster: Cluster) -> str:
    return cluster.serve()[1]


@pytest.fixture
def start(url: str, tmp_path: Path) -> Iterator[Start]:
    """Start the example for a pool, away from our packages."""
    running: list[subprocess.Popen[str]] = []

    def begin(pool: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-I", str(EXAMPLE), url, pool]
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        return process

    yield begin
    for process in running:
        process.kill()
        process.communicate()


def submit(url: str, pool: str, job_id: str, **payload: object) -> None:
    post(url, "/jobs/submit", {"job_id": job_id, "pool_id": pool, "type": "shout", "payload": payload})


def counted(cluster: Cluster, pool: str) -> tuple[int, int]:
    """Jobs that the one worker of a pool did, and that failed there, by its own account."""
    (counts,) = cluster.db.read(lambda conn: worker_reads.ended_jobs(conn, pool)).values()
    return counts


def test_it_needs_nothing_of_ours():
    modules = {line.split()[1].split(".")[0] for line in EXAMPLE.read_text().splitlines() if line.startswith("import ")}
    assert modules <= sys.stdlib_module_names


def test_without_its_arguments_it_says_how_to_use_it():
    ended = subprocess.run(
        [sys.executable, "-I", str(EXAMPLE)], capture_output=True, text=True, timeout=30, check=False
    )
    assert (ended.returncode, ended.stderr.split(" (")[0].strip()) == (1, "usage: python http_worker.py URL POOL")


def test_ctrl_c_ends_it_quietly(start: Start):
    process = start("quiet")
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 0


def test_it_runs_jobs_and_tells_what_failed(cluster: Cluster, url: str, start: Start):
    start("good")
    submit(url, "good", "fine", text="hello")
    submit(url, "good", "wrong", words="none")
    submit(url, "good", "slow", text="outlives the timeout", seconds=1.5 * TIMEOUT_S)  # its signs of life keep it
    assert cluster.wait_for("fine", "done")["result"] == "HELLO"
    slow = cluster.wait_for("slow", "done")
    assert (slow["result"], slow["attempt"]) == ("OUTLIVES THE TIMEOUT", 1)
    wrong = wait_until(lambda: (job := cluster.job("wrong"))["attempt"] > 1 and job, what="it is tried again")
    assert wrong["last_error"] == "KeyError('text')"
    wait_until(lambda: counted(cluster, "good")[0] == 2 and counted(cluster, "good")[1], what="it tells what it ended")


def test_killed_in_the_middle_of_a_job_another_runs_it(cluster: Cluster, url: str, start: Start):
    victim = start("ugly")
    submit(url, "ugly", "long", text="x", seconds=1)
    before = cluster.wait_for("long", "running")["worker_id"]
    victim.kill()
    start("ugly")
    wait_until(lambda: cluster.job("long")["worker_id"] not in (None, before), what="another has it")
    job = cluster.wait_for("long", "done")
    assert (job["attempt"], job["result"]) == (2, "X")


def test_stopped_in_order_it_hands_back_what_it_has(cluster: Cluster, url: str, start: Start):
    first = start("orderly")
    submit(url, "orderly", "longer", text="x", seconds=30)
    cluster.wait_for("longer", "running")
    first.terminate()
    assert first.wait(10) == 0
    job = cluster.job("longer")
    assert (job["status"], job["attempts"], job["wait_reason"]) == ("pending", 0, "its worker left")
