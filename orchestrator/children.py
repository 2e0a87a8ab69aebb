"""Child processes that do not outlive us: however we end, the kernel ends them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

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
