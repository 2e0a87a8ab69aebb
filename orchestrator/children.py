"""Child processes that do not outlive us: however we end, the kernel ends them."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from orchestrator.backoff import doubled

log = logging.getLogger(__name__)

#: Seconds before a child that ended is started again: at first, and at most.
BACKOFF_S, BACKOFF_MAX_S = 1.0, 30.0
#: One that lived for this long begins with the shortest wait again.
STEADY_S = 60.0

_PR_SET_CHILD_SUBREAPER = 36

# PR_SET_PDEATHSIG (1) survives exec, so the child keeps the process id that Popen knows. Not a preexec_fn:
# that is unsafe once there are threads. A parent gone before prctl sends no signal, hence the second look.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


def dying_with_parent(command: Sequence[str]) -> list[str]:
    """The command, to be killed with the *thread* that starts it: choose one that outlives it."""
    return [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]


# As above, and then like a shell: what the interpreter changed for itself is put back, and a program that cannot be
# started is told by the exit code that shells use.
_BECOME = """
import ctypes, os, signal, sys
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent is gone")
for number in (signal.SIGPIPE, signal.SIGXFSZ):
    signal.signal(number, signal.SIG_DFL)
try:
    os.execv(sys.argv[2], sys.argv[3:])
except OSError as error:
    print(f"gpuorch: {sys.argv[3]}: {error.strerror}", file=sys.stderr)
    sys.exit(127 if isinstance(error, FileNotFoundError) else 126)
"""


def becoming(program: str, command: Sequence[str]) -> list[str]:
    """The command, found at `program`, as a person starts it in a shell; it dies with us as above."""
    return [sys.executable, "-I", "-S", "-c", _BECOME, str(os.getpid()), program, *command]


# Nobody's child, so that whoever waits for all of ours does not wait for it; it has nothing of ours but the pipe.
_GUARD = """
import os, signal
if os.fork():
    os._exit(0)
os.setsid()
told = b""
while piece := os.read(0, 64):
    told += piece
if told.endswith(b"!"):
    os.killpg(int(told[:-1]), signal.SIGKILL)
"""


class Guard:
    """A process that kills a group when we are gone without a word: its leader dies with us, its members would not."""

    def __init__(self) -> None:
        self._parent = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._parent.wait()

    def watch(self, group: int) -> None:
        self._tell(f"{group}!")

    def dismiss(self) -> None:
        self._tell(".")
        assert self._parent.stdin is not None
        self._parent.stdin.close()

    def _tell(self, text: str) -> None:
        assert self._parent.stdin is not None
        with suppress(BrokenPipeError):  # somebody killed it
            os.write(self._parent.stdin.fileno(), text.encode())


def adopt_orphans() -> None:
    """From now on, descendants whose parents are gone become our children instead of init's: none gets away."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """SIGTERM, time to leave, SIGKILL to all of its group. A second Ctrl-C cuts the time short."""
    process.terminate()
    try:
        process.wait(grace_s)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        # It leads a session of its own, so its group has its number and none of us in it.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Restarter:
    """Starts a child process, and again whenever it ends unwanted, later and later.

    A thread of its own does: a child dies with the thread it came from, and this one outlives it.
    """

    def __init__(
        self,
        name: str,
        spawn: Callable[[], subprocess.Popen[bytes]],
        grace_s: float,
        refusal: int | None = None,
        on_refused: Callable[[], None] = lambda: None,
    ) -> None:
        """`grace_s`: how long it gets to leave when it is to stop.

        If the first one ends soon with the code `refusal`, so may all that follow: then `on_refused` is called, from
        another thread, for whoever wants to stop it.
        """
        self._name, self._make, self._grace_s = name, spawn, grace_s
        self._refusal, self._on_refused = refusal, on_refused
        #: How it ended when it did last, unless that was wanted.
        self.code: int | None = None
        self.refused = False
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._keep, name=f"{name}-child", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """SIGTERM and its time to leave, SIGKILL at the end of it."""
        with self._lock:
            self._stopping.set()
            process = self._process
        if process is not None:
            end(process, self._grace_s)
        if self._thread.ident is not None:  # it was started
            self._thread.join()

    def _keep(self) -> None:
        doublings, first = 0, True
        while not self._stopping.is_set():
            started = time.monotonic()
            ended = self._live()
            if self._stopping.is_set():
                return
            steady = time.monotonic() - started > STEADY_S
            doublings = 0 if steady or first else doublings + 1
            backoff_s = doubled(BACKOFF_S, doublings, BACKOFF_MAX_S)
            if first and ended == self._refusal and not steady:
                self.refused = True
                self._on_refused()
            else:
                told = {"child": self._name, "error": f"it ended with {ended}", "pause_s": backoff_s}
                log.warning("child process ended, starting it again", extra=told)
            first = False
            self._stopping.wait(backoff_s)

    def _live(self) -> int | OSError:
        """One life of it, from start to end; how it ended, or why it did not begin."""
        try:
            process = self._spawn()
        except OSError as error:  # no process, file or memory is left: perhaps later
            return error
        code = process.wait() if process else 0
        if not self._stopping.is_set():
            self.code = code
        return code

    def _spawn(self) -> subprocess.Popen[bytes] | None:
        with self._lock:  # a stop comes before or after this, never between
            if self._stopping.is_set():
                return None
            self._process = self._make()
            return self._process
