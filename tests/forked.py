"""Processes of the orchestrator without the second of processor time that importing it takes.

They are forked by a *nest* (`tests.nest`), a program that has loaded the modules: real processes, with settings, output
and a life of their own. There is a nest for each build, each list of modules, and whatever else a program reads only
when it starts (AT_START). Whoever needs a program as a user starts it starts one instead.
"""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: What most members of a cluster need.
LOADED = (
    "orchestrator.cli.servers",
    "orchestrator.api.server",
    "orchestrator.telemetry.exporting",
    "worker.supervisor",
)
#: Seconds for a nest to load the modules and fork, on a busy machine.
START_S = 60.0
#: Read when a program starts, and not again.
AT_START = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH")


class Forked:
    """One such process, with what tests use of `subprocess.Popen`."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        *,
        path: str = "",
        build: Path = ROOT,
        at_start: Mapping[str, str] | None = None,
        loaded: Sequence[str] = LOADED,
    ) -> None:
        """What `python -m orchestrator ARGUMENTS` does, with its output in a file.

        `at_start` is an environment of which those words count that a program reads when it starts: see AT_START.
        """
        words = tuple(sorted((name, value) for name, value in (at_start or {}).items() if name in AT_START))
        order = {
            "arguments": list(arguments),
            "environment": dict(environment),
            "path": path,
            "folder": str(build),
        }
        with log.open("wb") as output, Path(os.devnull).open("rb") as nothing:
            streams = [nothing.fileno(), output.fileno(), output.fileno()]
            self._hatch(nest(str(build), words, tuple(loaded)), order, streams)

    def poll(self) -> int | None:
        return self._end(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._end(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("forked", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _hatch(self, where: socket.socket, order: Mapping[str, object], streams: Sequence[int]) -> None:
        """Be forked by this nest, with these for input, output and errors."""
        self._report, theirs = os.pipe()
        try:
            socket.send_fds(where, [json.dumps(order).encode()], [theirs, *streams])
        finally:
            os.close(theirs)
        self.returncode: int | None = None
        self.pid = self._told(START_S) or 0
        if not self.pid:
            raise AssertionError("the nest did not fork; what it says above tells why")

    def _end(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            self.returncode = self._told(timeout)
            if self.returncode is not None:
                os.close(self._report)
        return self.returncode

    def _told(self, timeout: float | None) -> int | None:
        """The next number that the nest tells; None when none came in time. Those whose nest died died with it."""
        if not select.select([self._report], [], [], timeout)[0]:
            return None
        text = b""
        while not text.endswith(b"\n"):  # one number of perhaps two
            text += os.read(self._report, 1) or b"%d\n" % -signal.SIGKILL
        return int(text)


@cache
def nest(build: str, at_start: tuple[tuple[str, str], ...], loaded: tuple[str, ...]) -> socket.socket:
    """Starts it; it ends when no process has this end of its socket any more."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ORCH_")}
    path = os.pathsep.join([build, str(ROOT)])
    with theirs:
        started = subprocess.Popen(
            [sys.executable, "-m", "tests.nest", str(theirs.fileno()), *loaded],
            cwd=build,
            env=inherited | {"PYTHONPATH": path} | dict(at_start),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            # A Ctrl-C is for pytest, which ends it when all is done.
            start_new_session=True,
        )
    atexit.register(started.wait)
    atexit.register(ours.close)  # first, being the last
    return ours
