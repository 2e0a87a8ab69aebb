"""`gpuorch top`: frames as text at fixed sizes, and the terminal it takes and gives back."""

import dataclasses
import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from orchestrator.cli import run
from orchestrator.cli.frame import Look, frame, shares
from orchestrator.cli.progress import Pace, duration
from orchestrator.cli.style import cut, fit, width_of
from orchestrator.cli.top import Ends
from tests.waiting import wait_until


def worker(n: int, **fields: Any) -> dict[str, Any]:
    base = {"worker_id": f"host-{n}:1234:abcdef", "pool_id": "default", "status": "active", "slots": 8, "busy": 5}
    return base | {"jobs_done": 1200, "jobs_failed": 3, "heartbeat_age_seconds": 1.2} | fields


def gpu(n: int) -> dict[str, Any]:
    memory = {"total_mb": 24576, "usable_mb": 22118, "leased_mb": 9000, "foreign_mb": 0}
    return {"node_id": f"node-{n // 2}", "gpu_index": n % 2, "name": "simulated GPU", "utilization": 0.5} | memory


def lane(pending: int, oldest: float | None) -> dict[str, Any]:
    return {"pending": pending, "claimed": 1, "running": 2, "oldest_pending_seconds": oldest}


def look(lanes: int = 2, workers: int = 2, gpus: int = 2, **fields: Any) -> Look:
    status = {"pending": 1234, "claimed": 5, "running": 8, "done": 10000, "skipped": 0, "failed": 3, "dead_letter": 0}
    stats = {
        "status": status | {"cancelled": 0},
        "at_least": ["done"],
        "pools": {f"lane-{n}": lane(100 * n, 80.0 * n or None) for n in range(lanes)},
    }
    given: dict[str, Any] = {
        "url": "http://127.0.0.1:8008",
        "stats": stats,
        "workers": [worker(n) for n in range(workers)],
        "gpus": [gpu(n) for n in range(gpus)],
        "leader": {"alive": True, "holder": "host-1:77:beef", "epoch": 4},
        "done_rate": 124.04,
        "clock": "07:12:30 UTC",
    }
    return Look(**(given | fields))


def test_a_frame_in_80_by_24():
    assert frame(look(), 80, 24, hint="q ends") == [
        "gpuorch top  http://127.0.0.1:8008                                  07:12:30 UTC",
        "leader  host-1:77:beef, epoch 4",
        "jobs    pending 1234  claimed 5  running 8  done 10000+  failed 3",
        "workers 2 alive, 10 of 16 slots busy, 124.0 done/s",
        "",
        "LANE                                   PENDING   CLAIMED   RUNNING   OLDEST WAIT",
        "lane-1                                     100         1         2      1 m 20 s",
        "lane-0                                       0         1         2             -",
        "",
        "WORKER                   POOL       STATUS   BUSY              DONE FAILED  SEEN",
        "host-0:1234:abcdef       default    active   #####...   5/8    1200      3   1 s",
        "host-1:1234:abcdef       default    active   #####...   5/8    1200      3   1 s",
        "",
        "GPUS",
        "node-0",
        "  0 simulated GPU █████░░░░░░░░·· 13118 of 22118 MB free, 9000 leased, 50 % busy",
        "  1 simulated GPU █████░░░░░░░░·· 13118 of 22118 MB free, 9000 leased, 50 % busy",
        *[""] * 6,
        "q ends",
    ]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 16), (40, 12), (200, 50), (20, 5), (80, 2)])
@pytest.mark.parametrize("many", [0, 1, 40])
def test_a_frame_fits_whatever_there_is_to_show(width, height, many):
    shown = frame(look(many, many, many), width, height, hint="q ends")
    assert len(shown) <= height and all(width_of(line) <= width for line in shown)
    assert shown[-1] == "q ends"[:width]


def test_what_does_not_fit_is_counted():
    shown = frame(look(lanes=40, workers=30, gpus=16), 80, 24)
    lanes = [line for line in shown if line.startswith("lane-")]
    (more, *_) = [line for line in shown if "more" in line]
    assert lanes[0].startswith("lane-39") and more == f"… {40 - len(lanes)} more"
    assert any(line.startswith("host-") for line in shown) and any("simulated" in line for line in shown)


def test_nothing_at_all():
    empty = look(0, 0, 0, leader={"alive": False, "epoch": 7, "holder": None})
    text = "\n".join(frame(empty, 80, 24))
    assert "nobody leads (last epoch 7)" in text
    assert "no jobs wait or run" in text and "no workers" in text and "no gpus" in text


def test_a_server_that_went_away_and_pauses_are_told():
    text = "\n".join(frame(look(error="cannot reach it", paused=[{"key": "pool:chat"}]), 80, 24))
    assert "no answer: cannot reach it" in text and "paused  pool:chat" in text


def test_what_troubles_workers_that_live_is_told():
    some = [worker(1), worker(2, trouble="cannot read\x1b jobs"), worker(3, status="lost", trouble="gone")]
    (told,) = [line for line in frame(dataclasses.replace(look(), workers=some), 80, 24) if line.startswith("trouble")]
    assert told.startswith("trouble 1 of 2 workers: cannot read") and "\x1b" not in told
    assert not any("trouble" in line for line in frame(look(), 80, 24))


def test_workers_that_ended_are_left_out():
    gone = [worker(1), worker(2, status="lost"), worker(3, status="stopped")]
    base = look()
    text = "\n".join(frame(Look(base.url, base.stats, gone, base.gpus, base.leader), 80, 24))
    assert "workers 1 alive, 5 of 8 slots busy" in text and "host-2" not in text


def test_names_cannot_write_to_the_terminal():
    base = look()
    evil = {"status": base.stats["status"], "at_least": [], "pools": {"\x1b[31mred\n": lane(1, 1.0)}}
    assert not any("\x1b" in line or "\n" in line for line in frame(Look(base.url, evil, [], [], base.leader), 80, 24))


@pytest.mark.parametrize(
    ("wanted", "room", "given"),
    [([3, 3, 3], 20, [3, 3, 3]), ([30, 3, 3], 12, [6, 3, 3]), ([30, 30, 30], 9, [3, 3, 3]), ([5], 0, [0]), ([], 9, [])],
)
def test_small_tables_are_whole_before_large_ones_grow(wanted, room, given):
    assert shares(wanted, room) == given


def test_rates_of_ends_survive_workers_that_come_and_go():
    ends = Ends()
    assert ends.rates([worker(1, jobs_done=100), worker(2, jobs_done=50)], now=0.0) == (0.0, 0.0)
    assert ends.rates([worker(1, jobs_done=120, jobs_failed=4)], now=2.0) == (10.0, 0.5)
    # A new one has ended 1000 before we saw it first.
    assert ends.rates([worker(1, jobs_done=120, jobs_failed=4), worker(3, jobs_done=1000)], now=4.0) == (5.0, 0.25)


def test_pace_looks_at_the_last_seconds():
    pace = Pace(window_s=10)
    assert pace.of(0, now=0.0) == 0.0
    assert pace.of(100, now=10.0) == 10.0
    assert pace.of(100, now=20.0) == 0.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (45.4, "45 s"),
        (60, "1 m 0 s"),
        (200, "3 m 20 s"),
        (7500, "2 h 5 m"),
        (273600, "3 d 4 h"),
        (-1, "0 s"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_wide_characters_count_as_two():
    assert (width_of("作業"), width_of("e\u0301"), width_of("abc")) == (4, 1, 3)
    assert cut("作業作業", 5) == "作業…" and cut("作業作業", 4) == "作…" and width_of(fit("作業作業", 4)) == 4
    assert (cut("abcdef", 3), fit("ab", 4), cut("abc", 0)) == ("ab…", "ab  ", "")


# --- on a terminal ---


class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        base = look()
        known: dict[str, Any] = {
            "/jobs/stats": base.stats,
            "/workers": self.workers(list(base.workers)),
            "/gpus": {"gpus": list(base.gpus)},
            "/control/leader": dict(base.leader),
            "/control/paused": {"paused": []},
        }
        text = json.dumps(known[self.path.partition("?")[0]]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def workers(self, known):
        """The first of them, and then the rest."""
        if "cursor=rest" in self.path:
            return {"workers": known[1:], "next_cursor": None}
        return {"workers": known[:1], "next_cursor": "rest"}

    def log_message(self, *args):
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01], name="answers")
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class Terminal:
    """`gpuorch top` as the foreground of a terminal of its own."""

    def __init__(self, url: str, **environment: str) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.slave = slave
        self.before = termios.tcgetattr(slave)
        self.text = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "orchestrator", "top", "--interval", "0.2", "--url", url],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm", **environment},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        self.reader = threading.Thread(target=self._read, name="terminal", daemon=True)
        self.reader.start()

    def _read(self) -> None:
        while True:
            try:
                chunk = os.read(self.master, 65536)
            except OSError:
                return
            self.text += chunk

    def shows(self, text: str) -> None:
        wait_until(lambda: text.encode() in self.text, what=f"{text!r} on the screen")

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        os.close(self.slave)
        self.reader.join(10)
        os.close(self.master)


@pytest.fixture
def terminal(url) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(**environment: str) -> Terminal:
        opened.append(Terminal(url, **environment))
        opened[-1].shows("q ends")
        return opened[-1]

    yield start
    for one in opened:
        one.close()


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (lambda t: os.write(t.master, b"q"), 0),
        (lambda t: t.process.send_signal(signal.SIGINT), 0),
        (lambda t: t.process.send_signal(signal.SIGTERM), 143),
    ],
    ids=["q", "ctrl-c", "sigterm"],
)
def test_however_it_ends_the_terminal_is_as_it_was(terminal, end, code):
    top = terminal()
    assert termios.tcgetattr(top.slave) != top.before  # keys arrive one by one, and are not shown
    end(top)
    assert top.process.wait(20) == code
    wait_until(lambda: top.text.rstrip().endswith(b"\x1b[?25h\x1b[?1049l"), what="the old screen is back")
    assert termios.tcgetattr(top.slave) == top.before
    assert top.text.startswith(b"\x1b[?1049h\x1b[?25l") and b"Traceback" not in top.text


def test_frames_are_drawn_over_each_other_without_clearing(terminal):
    top = terminal(NO_COLOR="1")
    wait_until(lambda: top.text.count(b"\x1b[H") > 2, what="some frames")
    assert b"\x1b[2J" not in top.text
    assert b"\x1b[1m" not in top.text and b"\x1b[36m" not in top.text  # NO_COLOR


def test_another_size_is_drawn_at_once(terminal):
    top = terminal()
    fcntl.ioctl(top.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 10, 50, 0, 0))
    wait_until(lambda: top.text.rpartition(b"\x1b[H")[2].count(b"\r\n") == 9, what="a frame of ten lines")


def test_without_a_terminal_it_is_one_frame(url, capsys):
    assert run(["top", "--url", url]) == 0
    shown = capsys.readouterr().out
    assert "LANE" in shown and "WORKER" in shown and "GPUS" in shown and "\x1b" not in shown
    assert "workers 2 alive" in shown  # of all pages
    assert run(["top", "--json", "--url", url]) == 0
    assert json.loads(capsys.readouterr().out)["leader"]["epoch"] == 4
