"""`gpuorch jobs import` against a real server: everything once, whatever happens on the way."""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from orchestrator import limits
from orchestrator.cancellation import Cancellation
from orchestrator.cli import run
from orchestrator.client import importing, patience
from orchestrator.client.api import Api
from orchestrator.client.errors import ServerUnreachable
from orchestrator.client.steps import Request
from orchestrator.store import schema
from tests.api.conftest import Running
from tests.conftest import empty
from tests.servers import free_port
from tests.waiting import wait_until


@pytest.fixture
def url(started: Running, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    empty(started.db)
    address = str(started.http.base_url).rstrip("/")
    monkeypatch.setenv("GPUORCH_URL", address)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(patience, "RETRY_S", 0.01)
    return address


def write(count: int, name: str = "jobs.jsonl") -> Path:
    file = Path(name)
    file.write_text("".join(json.dumps({"type": "echo", "payload": {"n": n}}) + "\n" for n in range(count)))
    return file


def stored(started: Running) -> dict[str, int]:
    query = select(schema.jobs.c.job_id, schema.jobs.c.payload)
    rows = started.db.read(lambda conn: conn.execute(query).all())
    return {row.job_id: json.loads(row.payload).get("n") for row in rows}


def told(capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    shown = capsys.readouterr()
    return json.loads(shown.out), shown.err


def test_every_line_is_one_job_however_often_it_is_imported(started, url, capsys):
    write(1234)
    assert run(["jobs", "import", "jobs.jsonl", "--json"]) == 0
    first, _ = told(capsys)
    assert first == {
        "lines": 1234,
        "created": 1234,
        "existing": 0,
        "refused": 0,
        "through": 1234,
        "offset": Path("jobs.jsonl").stat().st_size,
        "complete": True,
        "error": None,
    }
    assert sorted(stored(started).values()) == list(range(1234))
    assert run(["jobs", "import", "jobs.jsonl"]) == 0
    assert capsys.readouterr().out == "1,234 lines: 0 created, 1,234 existing, 0 refused\n"
    # Elsewhere, under the same name: the same jobs. Under another: others.
    Path("moved").mkdir()
    Path("jobs.jsonl").rename("moved/jobs.jsonl")
    assert run(["jobs", "import", "moved/jobs.jsonl", "--json"]) == 0
    assert told(capsys)[0]["existing"] == 1234
    assert run(["jobs", "import", "moved/jobs.jsonl", "--name", "again", "--from-line", "1230", "--json"]) == 0
    assert told(capsys)[0]["created"] == 5
    assert len(stored(started)) == 1239


def test_refused_lines_are_told_with_their_numbers_and_kept(started, url, capsys):
    good = '{"type": "echo", "payload": {}}'
    bad = [
        "{oops",
        '{"type": "echo"}',
        '{"type": "echo", "payload": {}, "colour": 1}',
        '{"type": "echo", "payload": {}, "type": "x"}',
    ]
    Path("mixed.jsonl").write_text("\n".join([good, bad[0], "", bad[1], good, bad[2], bad[3], good]))
    assert run(["jobs", "import", "mixed.jsonl", "--rejects", "rejects.jsonl", "--json"]) == 1
    totals, errors = told(capsys)
    assert (totals["created"], totals["refused"], totals["complete"]) == (3, 4, True)
    lines = [line for line in errors.splitlines() if line.startswith("mixed.jsonl:")]
    assert [line.split(":")[1] for line in lines] == ["2", "4", "6", "7"]
    assert "not JSON" in lines[0] and "payload" in lines[1] and "colour" in lines[2] and "same key twice" in lines[3]
    assert Path("rejects.jsonl").read_text().splitlines() == bad


def test_a_crowd_of_refused_lines_is_no_flood_of_messages(started, url, capsys):
    Path("bad.jsonl").write_text("oops\n" * 700)
    assert run(["jobs", "import", "bad.jsonl", "--rejects", "rejects"]) == 1
    shown = capsys.readouterr()
    assert shown.err.count("bad.jsonl:") == 20 and "680 more refused lines" in shown.err
    assert len(Path("rejects").read_text().splitlines()) == 700


def test_a_line_that_was_changed_is_another_job_and_an_id_of_its_own_is_held_to(started, url, capsys):
    write(3)
    assert run(["jobs", "import", "jobs.jsonl"]) == 0
    lines = Path("jobs.jsonl").read_text().splitlines()
    lines[1] = '{"type": "echo", "payload": {"n": 99}}'
    lines.append('{"job_id": "mine", "type": "echo", "payload": {"n": 4}}')
    Path("jobs.jsonl").write_text("\n".join(lines))
    capsys.readouterr()
    assert run(["jobs", "import", "jobs.jsonl", "--json"]) == 0
    assert (totals := told(capsys)[0])["created"] == 2 and totals["existing"] == 2
    Path("jobs.jsonl").write_text('{"job_id": "mine", "type": "echo", "payload": {"n": 5}}')
    assert run(["jobs", "import", "jobs.jsonl"]) == 1
    assert "job_conflict" in capsys.readouterr().err
    assert stored(started)["mine"] == 4


def piped(text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "orchestrator", "jobs", "import", "-", "--json", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, input=text, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_standard_input_needs_a_name_for_lines_without_ids(started, url):
    line = '{"type": "echo", "payload": {}}\n'
    nameless = piped(line)
    assert nameless.returncode == 2 and "--name" in nameless.stderr
    assert stored(started) == {}
    named = piped(line * 3, "--name", "from-pipe")
    assert named.returncode == 0 and json.loads(named.stdout)["created"] == 3
    assert all(job_id.startswith("from-pipe:") for job_id in stored(started))


def test_a_rate_is_obeyed_and_nothing_is_lost(started, url, capsys):
    started.http.put("/policies/agents/polite", json={"rate": 200, "burst": 50}).raise_for_status()
    lines = [json.dumps({"type": "echo", "payload": {"n": n}, "agent": "polite"}) for n in range(150)]
    Path("polite.jsonl").write_text("\n".join(lines))
    try:
        assert run(["jobs", "import", "polite.jsonl", "--json"]) == 0
    finally:
        started.http.delete("/policies/agents/polite").raise_for_status()
    totals, errors = told(capsys)
    assert totals["created"] == 150 and "waiting" in errors
    assert sorted(stored(started).values()) == list(range(150))


@pytest.fixture
def lose(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`lose(n)`: every n-th answer gets lost on its way."""
    send, count, every = Api.send, 0, 0
    lock = threading.Lock()

    def lossy(self: Api, request: Request) -> Any:
        nonlocal count
        answer = send(self, request)
        with lock:
            count += 1
            if every and count % every == 0:
                raise ServerUnreachable(self.url, "lost")
        return answer

    def arm(number: int) -> None:
        nonlocal every
        every = number

    monkeypatch.setattr(Api, "send", lossy)
    return arm


def test_answers_that_get_lost_cost_no_job_and_make_none_twice(started, url, capsys, lose, monkeypatch):
    monkeypatch.setattr(importing, "BATCH", 20)
    write(500)
    lose(2)
    assert run(["jobs", "import", "jobs.jsonl", "--json"]) == 0
    totals, _ = told(capsys)
    assert totals["created"] + totals["existing"] == 500
    assert sorted(stored(started).values()) == list(range(500))


def test_a_server_that_stays_away_ends_it_with_3_and_says_how_far_it_came(started, url, capsys, monkeypatch):
    monkeypatch.setattr(importing, "BATCH", 10)
    send, answered = Api.send, 0

    def leaving(self: Api, request: Request) -> Any:
        nonlocal answered
        answered += 1
        if answered > 3:
            raise ServerUnreachable(self.url, "gone", sent=False)
        return send(self, request)

    monkeypatch.setattr(Api, "send", leaving)
    write(100)
    assert run(["jobs", "import", "jobs.jsonl", "--threads", "1", "--patience", "0.1", "--json"]) == 3
    totals, errors = told(capsys)
    assert (totals["created"], totals["through"], totals["complete"]) == (30, 30, False)
    assert "up to line 30 everything is settled" in errors and "--from-line 31" in errors
    monkeypatch.setattr(Api, "send", send)
    assert run(["jobs", "import", "jobs.jsonl", "--from-line", "31"]) == 0
    assert sorted(stored(started).values()) == list(range(100))


def test_behind_a_batch_that_failed_nothing_counts_as_settled(started, url, capsys, monkeypatch):
    """Four are on their way; the second fails, the third and the fourth do not."""
    monkeypatch.setattr(importing, "BATCH", 10)
    send, others = Api.send, threading.Event()

    def failing(self: Api, request: Request) -> Any:
        body = request.body
        assert isinstance(body, bytes)
        if b'"n": 10}' in body:
            others.wait(10)
            raise ServerUnreachable(self.url, "gone", sent=False)
        answer = send(self, request)
        if b'"n": 20}' in body:
            others.set()
        return answer

    monkeypatch.setattr(Api, "send", failing)
    write(40)
    assert run(["jobs", "import", "jobs.jsonl", "--patience", "0", "--json"]) == 3
    totals, _ = told(capsys)
    assert totals["through"] == 10 and totals["created"] >= 20


def test_ctrl_c_lets_what_is_on_its_way_settle_and_says_how_to_go_on(started, url, tmp_path):
    lines = "".join(json.dumps({"job_id": f"n-{n}", "type": "echo", "payload": {"n": n}}) + "\n" for n in range(2000))
    command = [sys.executable, "-m", "orchestrator", "jobs", "import", "-", "--json"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        process.stdin.write(lines)
        process.stdin.flush()
        # It waits for more lines, which do not come.
        wait_until(lambda: len(stored(started)) >= 1500, what="what it read is stored")
        process.send_signal(signal.SIGINT)
        process.wait(30)  # while its input is open
        out, errors = process.communicate()
    assert process.returncode == 130, errors
    totals = json.loads(out)
    assert totals["through"] <= len(stored(started)) and totals["through"] >= 1500 and not totals["complete"]
    assert f"--from-line {totals['through'] + 1}" in errors and "Traceback" not in errors
    again = piped(lines)
    assert again.returncode == 0, again.stderr
    assert sorted(stored(started).values()) == list(range(2000))


def test_whoever_stops_it_waits_for_no_more_lines(started, url, monkeypatch):
    monkeypatch.setattr(importing, "BATCH", 20)
    stop = Cancellation()
    endless = (importing.Line(n, b'{"type": "echo", "payload": {}}', n) for n in itertools.count(1))
    with Api(url) as api:
        settled = importing.Importing(api, 10.0, stop).settled(endless, "endless")
        first = next(settled)
        stop.cancel()
        rest = list(settled)
    assert first.created == 20 and len(rest) <= limits.of_this_process(importing.THREADS).io.pending + 1
    assert len(stored(started)) == first.created + sum(one.created for one in rest)


@pytest.mark.parametrize(
    "arguments",
    [
        ["missing.jsonl"],
        ["jobs.jsonl", "--name", "no spaces"],
        ["jobs.jsonl", "--name", "x" * 128],
        ["jobs.jsonl", "--threads", "-1"],
        ["jobs.jsonl", "--from-line", "0"],
        ["jobs.jsonl", "--rejects", "no/such/folder"],
    ],
)
def test_wrong_usage_is_2_and_sends_nothing(started, url, capsys, arguments):
    write(3)
    assert run(["jobs", "import", *arguments]) == 2
    assert "Error" in capsys.readouterr().err
    assert stored(started) == {}


def test_on_a_terminal_there_is_a_bar_with_rate_and_time_left(started, url, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("orchestrator.cli.importing.DRAW_EVERY_S", 0.0)
    monkeypatch.setattr(importing, "BATCH", 100)
    write(1000)
    assert run(["jobs", "import", "jobs.jsonl"]) == 0
    frames = capsys.readouterr().err.split("\r")[1:]
    assert all(len(frame.rstrip("\n")) <= 119 for frame in frames)
    assert "lines/s" in frames[3] and "left" in frames[3] and "%" in frames[3]
    assert "[####################] 100 %, 1,000 lines" in frames[-1] and "left" not in frames[-1]


def test_a_server_that_was_never_there_is_3_at_once(url, capsys):
    write(3)
    assert run(["jobs", "import", "jobs.jsonl", "--url", f"http://127.0.0.1:{free_port()}"]) == 3
    assert "gpuorch dev" in capsys.readouterr().err
