"""`python -m tests.nest SOCKET MODULE …` loads modules and forks whoever is ordered over its socket (`tests.forked`).

One thread, so that forking is safe. Those that it forked die with it, and it ends with the tests: then its socket does.
"""

import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
from contextlib import suppress
from typing import NamedTuple

#: Bytes of an order, most of which are an environment; and files that come with it.
MAX_ORDER = 200_000
FILES = 4

_PR_SET_PDEATHSIG = 1


class Order(NamedTuple):
    arguments: list[str]
    environment: dict[str, str]
    path: str
    folder: str
    #: Where its process id and its exit code are told.
    report: int
    stdio: tuple[int, ...]


class Child(NamedTuple):
    pid: int
    pidfd: int
    report: int

    def bury(self) -> None:
        self.tell(os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]))
        self.close()

    def tell(self, number: int) -> None:
        with suppress(BrokenPipeError):  # whoever started it does not ask any more
            os.write(self.report, b"%d\n" % number)

    def close(self) -> None:
        os.close(self.pidfd)
        os.close(self.report)


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.freeze()  # what is there now is shared with all children, until a collector writes to it
    if order := _serve(control):
        _become(order)


def _serve(control: socket.socket) -> Order | None:
    """Returns in every process that was ordered; in this one, None when the tests are gone."""
    with selectors.DefaultSelector() as events:
        events.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in events.select():
                if key.data is not None:
                    if events.get_map().get(key.fd) == key:  # not if it was buried a moment ago
                        _look_after(key.data, key.fd, events)
                    continue
                order = _received(control)
                child = _bear(order) if order else None
                if child is None:
                    control.close()
                    for sibling in {other.data for other in events.get_map().values() if other.data}:
                        sibling.close()
                    return order
                # Of a pipe that nobody reads any more, the kernel tells whoever waits for anything there.
                for file in (child.pidfd, child.report):
                    events.register(file, selectors.EVENT_READ, child)


def _look_after(child: Child, file: int, events: selectors.BaseSelector) -> None:
    """It has ended, or whoever started it has."""
    events.unregister(file)
    if file == child.report:
        os.kill(child.pid, signal.SIGKILL)
        return
    if child.report in events.get_map():
        events.unregister(child.report)
    child.bury()


def _received(control: socket.socket) -> Order | None:
    text, files, _, _ = socket.recv_fds(control, MAX_ORDER, FILES)
    return Order(**json.loads(text), report=files[0], stdio=tuple(files[1:])) if text else None


def _bear(order: Order) -> Child | None:
    """None in the new process."""
    nest = os.getpid()
    pid = os.fork()
    if not pid:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != nest:
            os._exit(1)
        return None
    for file in order.stdio:
        os.close(file)
    child = Child(pid, os.pidfd_open(pid), order.report)
    child.tell(pid)
    return child


def _become(order: Order) -> None:
    """What `python -m orchestrator ARGUMENTS` does."""
    os.close(order.report)
    for source, target in zip(order.stdio, (0, 1, 2), strict=True):
        os.dup2(source, target)
        os.close(source)
    os.environ.clear()
    os.environ.update(order.environment)
    os.chdir(order.folder)
    sys.path[:0] = [part for part in order.path.split(os.pathsep) if part]
    sys.argv = ["gpuorch", *order.arguments]
    from orchestrator.__main__ import main as gpuorch

    gpuorch()


if __name__ == "__main__":
    main()
