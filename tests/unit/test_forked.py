"""Processes that a nest forks are what a user starts: output, exit codes, signals; and they end with their nest."""

import os
import signal
import subprocess
import sys

import pytest

from tests.forked import Forked
from tests.processes import gone, parent
from tests.waiting import wait_until

#: A command that goes on, and needs no server.
ENDLESS = ["scaler", "--port", "0", "--url", "http://127.0.0.1:1"]


@pytest.fixture
def fork(tmp_path):
    return lambda *arguments, **given: Forked(arguments, dict(os.environ), tmp_path / "log", **given)


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--version"], 0), (["no-such-command"], 2), (["jobs", "get", "x"], 3)]
)
def test_output_and_exit_code_are_those_of_the_program(fork, tmp_path, arguments, code):
    unreachable = {"GPUORCH_URL": "http://127.0.0.1:1"}
    program = [sys.executable, "-m", "orchestrator", *arguments]
    expected = subprocess.run(program, env={**os.environ, **unreachable}, capture_output=True, check=False)
    forked = Forked(arguments, {**os.environ, **unreachable}, tmp_path / "log")
    assert (forked.wait(30), expected.returncode) == (code, code)
    assert (tmp_path / "log").read_bytes() == expected.stdout + expected.stderr


def test_a_signal_reaches_it_and_its_end_is_told(fork):
    forked = fork(*ENDLESS)
    assert forked.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        forked.wait(0.0)
    forked.kill()
    assert forked.wait(30) == forked.poll() == -signal.SIGKILL


def test_it_dies_with_whoever_started_it(fork):
    """A part of the tests that was killed must not leave its processes to the others."""
    forked = fork(*ENDLESS)
    os.close(forked._report)
    wait_until(lambda: gone(forked.pid), what="its end")


def test_it_dies_with_its_nest(fork, tmp_path):
    """A nest of its own: it is told a path that no other is."""
    forked = fork(*ENDLESS, at_start={"LD_LIBRARY_PATH": str(tmp_path)}, loaded=["orchestrator.cli"])
    os.kill(parent(forked.pid), signal.SIGKILL)
    wait_until(lambda: gone(forked.pid), what="its end")
    assert forked.wait(30) == -signal.SIGKILL
