"""`orchestrator.testing`: the whole system in a block, and nothing of it afterwards; and a queue that is run dry."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from orchestrator import testing
from orchestrator.errors import ConfigError
from orchestrator.settings import Settings
from orchestrator.store import migrate, revisions
from orchestrator.store.database import Database
from orchestrator.testing import running
from tests.processes import alive, children

pytestmark = pytest.mark.e2e

PATIENCE_S = 60.0


def traces() -> tuple[set[str], set[int], set[str]]:
    """Threads, child processes and directories that a system may leave behind."""
    threads = {thread.name for thread in threading.enumerate() if thread is not threading.main_thread()}
    folders = {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("gpuorch-test-")}  # noqa: PTH208
    return threads, {pid for pid in children(os.getpid()) if alive(pid)}, folders


@pytest.fixture(autouse=True)
def _folder_of_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may test it at the same time, and leave traces of theirs. The template stays until the process ends."""
    testing._template()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def handlers_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def test_a_job_of_our_own_and_no_trace_of_it(handlers_path):
    before = traces()
    with running(handlers=["testing_handlers"], gpus="1x8192", workers=1, job_retry_max=1) as client:
        assert client.url.startswith("http://127.0.0.1:")
        answer = client.submit({"type": "double", "payload": {"n": 21}, "min_memory_mb": 100})
        job = client.wait(answer["job_id"], timeout_s=PATIENCE_S)
        assert (job["status"], job["result"]["doubled"], job["max_attempts"]) == ("done", 42, 1)
        folders = traces()[2] - before[2]
        (folder,) = (Path(tempfile.gettempdir(), name) for name in folders)
        # The same tables as by hand: migrations made them.
        db = Database(Settings(database_url=f"sqlite:///{folder}/scratch.db"))
        assert not revisions.pending(db)
        db.close()
        # A second one beside it has nothing in common with it, and what fails inside leaves no trace either.
        alone = traces()
        with pytest.raises(ZeroDivisionError), running(gpus="none", workers=1) as other:
            assert list(other.jobs()) == [] and other.url != client.url
            raise ZeroDivisionError
        assert traces() == alone
    assert traces() == before


@pytest.mark.parametrize(
    "given",
    [
        {"gpus": "many"},
        {"workers": 0},
        {"no_such_setting": 1},
        {"handlers": ["no_such_module"]},
        {"handlers": ["tests.no_such_module"]},
    ],
)
def test_what_cannot_start_says_so_and_leaves_no_trace(given):
    before = traces()
    with pytest.raises(ConfigError), running(**given):
        pytest.fail("it started")
    assert traces() == before


# --- gpuorch queue run --drain ---


def gpuorch(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "orchestrator", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False
    )


def test_a_queue_is_run_until_it_is_empty(redis_server, tmp_path):
    """Without any orchestrator: one job fails at first and is due again later, which somebody has to see to."""
    from orchestrator.daemon import Orchestrator
    from orchestrator.jobs import NewJob

    redis_server.flush()
    url = f"sqlite:///{tmp_path}/jobs.db"
    settings = Settings(database_url=url, redis_url=redis_server.url, data_dir=tmp_path)
    db = Database(settings)
    migrate.upgrade(db)
    db.close()
    orchestrator = Orchestrator(settings)
    jobs: list[dict] = [{"type": "double", "payload": {"n": n}} for n in range(20)]
    jobs.append({"type": "fail", "payload": {"times": 1}, "retry_base_sec": 0.2})
    prepared = [NewJob.prepare(job, max_bytes=1 << 20, max_depth=64) for job in jobs]
    orchestrator.submit(prepared).result(30)
    orchestrator.close()
    servers = ["--database-url", url, "--redis-url", redis_server.url, "--gpus", "1x8192", "--log-level", "warning"]
    ran = gpuorch(tmp_path, "queue", "run", "--drain", "--handlers", "testing_handlers", "--json", *servers)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert told["lane"] == "default" and sum(told["left"].values()) == 0 and told["done"] >= 20
    assert "wait" in ran.stderr and "Traceback" not in ran.stderr
    # Nothing to do is done at once; a job that cannot run yet is waited for, but not for ever.
    orchestrator = Orchestrator(settings)
    later = {"type": "double", "payload": {"n": 1}, "earliest_start_at": "2100-01-01T00:00:00Z"}
    orchestrator.submit([NewJob.prepare(later, max_bytes=1 << 20, max_depth=64)]).result(30)
    orchestrator.close()
    late = gpuorch(tmp_path, "queue", "run", "--drain", "--timeout", "1", "--handlers", "testing_handlers", *servers)
    assert late.returncode == 1 and "is not empty" in late.stderr and "1 not due yet" in late.stderr, late.stderr
    assert late.stdout == "default: 0 done, 0 failed attempts, 1 left\n"
