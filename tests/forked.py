"""Processes of the orchestrator without the second of processor time that importing it takes.

They are forked by the forkserver of the standard library, which has loaded the modules once: real processes, with
settings, output and a life of their own. Whoever needs a program as a user starts it (another build, another driver,
a program around it) starts one instead.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path

LOADED = ["orchestrator.cli", "orchestrator.api.server", "worker.supervisor"]


class Forked:
    """One such process, with what tests use of `subprocess.Popen`."""

    def __init__(self, command: str, environment: Mapping[str, str], path: str, log: Path) -> None:
        self._process = _server().Process(target=_become, args=(command, dict(environment), path, str(log)))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("forked", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@cache
def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    return context


def _become(command: str, environment: Mapping[str, str], path: str, log: str) -> None:
    """What `python -m orchestrator COMMAND` does, with its output in a file."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [part for part in path.split(os.pathsep) if part]
    sys.argv = ["gpuorch", command]
    from orchestrator.__main__ import main

    main()
