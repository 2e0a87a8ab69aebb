"""The whole system for tests of other projects: real, private, gone without a trace.

    import orchestrator.testing

    def test_my_handlers():
        with orchestrator.testing.running(handlers=["my_handlers"]) as client:
            answer = client.submit({"type": "embed", "payload": {"text": "hello"}})
            assert client.wait(answer["job_id"], timeout_s=30)["status"] == "done"

As a fixture of pytest, one for all tests of a session:

    @pytest.fixture(scope="session")
    def orchestrator_client():
        with orchestrator.testing.running(handlers=[my_handlers]) as client:
            yield client

It is what `gpuorch dev` runs: SQLite and an embedded Valkey in a temporary directory, the API and a leader in threads
of this process, a worker with its slots as child processes, simulated GPUs. Its port is a free one of 127.0.0.1.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from pydantic import ValidationError

from orchestrator.cli.child import WorkerChild
from orchestrator.client import Client
from orchestrator.embedded.directory import DataDir
from orchestrator.embedded.valkey import Valkey
from orchestrator.errors import ConfigError, Unavailable
from orchestrator.modules import require_modules
from orchestrator.settings import Settings
from orchestrator.store.dialect import SCRATCH, scratch_url
from orchestrator.wording import first_wrong

if TYPE_CHECKING:
    from orchestrator.daemon import Orchestrator

#: Seconds until everything answers, also on a machine that does much else; and between two looks whether it does.
START_S, LOOK_S = 60.0, 0.03
#: Seconds that jobs get to end when the system is stopped: whoever tests has seen what it wanted to see.
GRACE_S = 0.5

_OURS: dict[str, object] = {
    "worker_grace_s": GRACE_S,
    "log_level": "warning",
    "port": 0,
}


@contextmanager
def running(
    *, handlers: Sequence[str | ModuleType] = (), gpus: str = "2x24576", workers: int = 2, **settings: object
) -> Iterator[Client]:
    """Start the system, and end it with the block; a client of it, whose `url` others may use.

    handlers: modules with handlers, by name or imported; workers find them along `sys.path` as it is now.
    gpus: simulated ones, as count × MB: "1x8192", "2x24576,1x81920"; "none" for none.
    workers: jobs that run at the same time.
    settings: any other setting by its name, such as job_retry_max=1.

    Raises ConfigError for settings that cannot be used and handlers that are not there, Unavailable when it does not
    start.
    """
    names = tuple(one if isinstance(one, str) else one.__name__ for one in handlers)
    backend = gpus if gpus == "none" else f"sim:{gpus}"
    chosen = _OURS | {"gpu_backend": backend, "worker_slots": workers, "worker_handlers": names} | settings
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpuorch-test-")))
        data = DataDir(folder)
        stack.callback(data.close)
        valkey = Valkey(data)
        ours = {"database_url": scratch_url(str(folder)), "redis_url": valkey.url, "data_dir": folder}
        system = _validated(chosen | ours)
        path = os.pathsep.join(sys.path)
        require_modules(system.worker_handlers, path)
        stack.callback(valkey.stop)
        valkey.start()
        shutil.copyfile(_template(), folder / SCRATCH)
        worker = WorkerChild(system, path=path)
        stack.callback(worker.stop)
        worker.start()
        url = stack.enter_context(_served(system, worker))
        yield stack.enter_context(Client(url))


def _validated(chosen: Mapping[str, object]) -> Settings:
    try:
        return Settings.model_validate(chosen)
    except ValidationError as wrong:
        raise ConfigError(": ".join(filter(None, first_wrong(wrong)))) from None


@cache
def _template() -> Path:
    """A database with all migrations, made once for this process: they take longer than everything else here."""
    from orchestrator.store import migrate
    from orchestrator.store.database import Database

    folder = Path(tempfile.mkdtemp(prefix="gpuorch-test-template-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    db = Database(Settings(database_url=scratch_url(str(folder))))
    try:
        migrate.upgrade(db)
    finally:
        db.close()
    return folder / SCRATCH


@contextmanager
def _served(settings: Settings, worker: WorkerChild) -> Iterator[str]:
    """The API and all behind it, once a worker takes jobs; its URL."""
    from orchestrator.api.app import create_app
    from orchestrator.api.server import HttpServer, listen, url_of
    from orchestrator.daemon import Orchestrator

    with ExitStack() as stack:
        listener = stack.enter_context(listen(settings.host, settings.port))
        orchestrator = Orchestrator(settings)
        stack.callback(orchestrator.close)
        orchestrator.start()
        server = HttpServer(create_app(orchestrator), listener)
        thread = threading.Thread(target=server.run, name="api", daemon=True)
        stack.callback(thread.join, START_S)
        stack.callback(setattr, server, "should_exit", True)
        thread.start()
        deadline = time.monotonic() + START_S
        while not (server.started and _takes_jobs(orchestrator)):
            if worker.refused:
                raise ConfigError("the worker refuses to run; what it wrote to standard error tells why")
            if worker.code is not None:
                raise Unavailable(f"the worker ended with {worker.code}; what it wrote to standard error tells why")
            if time.monotonic() > deadline or not thread.is_alive():
                raise Unavailable(f"the system did not start within {START_S:g} seconds")
            time.sleep(LOOK_S)
        yield url_of(listener)


def _takes_jobs(orchestrator: Orchestrator) -> bool:
    from orchestrator.store import job_reads

    return bool(orchestrator.db.read(job_reads.live_pools))
