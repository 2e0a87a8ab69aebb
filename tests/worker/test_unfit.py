"""Modules of handlers that are not there, or do not load: it is told why, and nobody waits for ever."""

import os
import signal

import pytest

from orchestrator.store import worker_reads
from tests.waiting import wait_until
from tests.worker.test_worker import submit

HANDLERS = """
from worker import handler

@handler("hello")
def hello(ctx, payload):
    return "hello"
"""


@pytest.mark.parametrize(
    "modules", [("tests.no_such_module",), ("tests.worker.gated_handlers", "no_such_module")], ids=["below", "second"]
)
def test_a_module_that_is_not_there_ends_the_worker_and_is_named(cluster, modules):
    worker = cluster._start("worker", {"worker_handlers": modules, "worker_slots": 1})
    assert worker.process.wait(30) == 1
    said = f"gpuorch: worker_handlers = {modules[-1]!r}: there is no module {modules[-1]!r}; correct the name, or"
    assert worker.log.read_text().count(said) == 1
    assert "Traceback" not in worker.log.read_text()


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("raise ValueError('not\\nyet')", "ValueError: not yet"),
        ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("raise SystemExit('no GPU here')", "SystemExit: no GPU here"),
    ],
)
def test_a_module_that_does_not_load_is_tried_until_it_does(cluster, tmp_path, code, why):
    module = tmp_path / "broken_handlers.py"
    module.write_text(code)
    given = {"worker_handlers": ("broken_handlers",), "worker_slots": 1}
    worker = cluster._start("worker", given, path=str(tmp_path))
    worker.says(f"slot does not start.*worker_handlers = 'broken_handlers' does not load: {why}")
    wait_until(lambda: worker.log.read_text().count("slot does not start") > 1, what="that it is tried again")
    told = worker.log.read_text()
    assert told.count("Traceback (most recent") == 1 and "broken_handlers.py" in told
    module.write_text(HANDLERS)
    worker.says("worker ready")


def test_a_module_that_registers_no_handler_is_named_and_the_types_are_told(cluster, tmp_path):
    """Once for all slots; not one whose handlers came when another imported it."""
    (tmp_path / "forgetful_handlers.py").write_text("def hello(ctx, payload):\n    return 1\n")
    (tmp_path / "inner_handlers.py").write_text(HANDLERS)
    (tmp_path / "outer_handlers.py").write_text("import inner_handlers")
    modules = ("forgetful_handlers", "outer_handlers", "inner_handlers")
    worker = cluster.worker(path=str(tmp_path), worker_handlers=modules, worker_slots=2)
    ready = worker.says(r"worker ready.*")[0]
    assert "echo, " in ready and "hello" in ready
    told = [line for line in worker.log.read_text().splitlines() if "registers no handler" in line]
    assert len(told) == 1 and "worker_handlers = 'forgetful_handlers' registers no handler" in told[0]


def test_a_module_that_went_away_is_named_and_found_again(cluster, orchestrator, tmp_path):
    """Where slots came up before, whoever took it away may bring it back."""
    module = tmp_path / "moving_handlers.py"
    module.write_text(HANDLERS)
    worker = cluster.worker(path=str(tmp_path), worker_handlers=("moving_handlers",), worker_slots=1)
    module.unlink()
    (slot,) = worker.slots()
    os.kill(slot, signal.SIGKILL)

    def trouble():
        (shown,) = cluster.db.read(lambda conn: worker_reads.page(conn)[0])
        return shown["trouble"]

    said = wait_until(trouble, what="that it is told")
    assert said.startswith("worker_handlers = 'moving_handlers': there is no module 'moving_handlers'; ")
    module.write_text(HANDLERS)
    assert cluster.wait_for(submit(orchestrator, "hello", {}), "done")["result"] == "hello"
    wait_until(lambda: trouble() is None, what="that it is well")
