"""The examples of docs/client.md run as they stand there."""

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import select

from orchestrator.jobs import Status
from orchestrator.store import schema
from tests.api.conftest import Running
from tests.client.conftest import Orchestrator
from tests.factories import done, hire

PAGE = Path(__file__).parents[2] / "docs" / "client.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def at_work(started: Running, server: Orchestrator) -> Iterator[None]:
    """Somebody does every job that waits."""
    stop, hand = threading.Event(), hire(started.db)
    waiting = select(schema.jobs.c.job_id).where(schema.jobs.c.status == Status.PENDING).limit(100)

    def work() -> None:
        while not stop.wait(0.05):
            ids = started.db.read(lambda conn: list(conn.execute(waiting).scalars()))
            hand.record(ends=[done(claim, '{"vector":[1]}') for claim in hand.claim(*ids)] if ids else [])

    thread = threading.Thread(target=work, name="works")
    thread.start()
    yield
    stop.set()
    thread.join(20)
    with started.db.engine.begin() as connection:
        for table in (schema.results, schema.jobs):
            connection.execute(table.delete())


@pytest.mark.parametrize(
    "example", EXAMPLES, ids=[example.split("\n")[0] + f" {n}" for n, example in enumerate(EXAMPLES)]
)
def test_an_example_runs(
    example: str, at_work: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs.txt").write_text("one\ntwo\nthree\n")
    exec(compile(example, str(PAGE), "exec"), {"texts": ["a", "bc", "7"], "__name__": "example"})  # noqa: S102
    printed = capsys.readouterr().out
    assert "error" not in printed and "Traceback" not in printed


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 5
