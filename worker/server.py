"""A model server's process: started, watched, ended; and what it said last, for the error when it dies.

ServerError            an attempt failed because of its server; it is tried again, with the usual pauses
├─ ServerMissing       there is no such program here
├─ ServerExited        its process ended
│  ├─ ServerOutOfMemory
│  └─ PortTaken        another process has the port that was meant for it
├─ ServerNotReady      it was not healthy in time
├─ ServerSilent        it did not answer in time
├─ ServerBusy          it says so; it may say until when
└─ ServerFailed        it answered with an error of its own, or not at all
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Sequence

from orchestrator.children import becoming
from worker.handlers import Retry

#: What is kept of its output: so many lines, of so many bytes each. Tracebacks of several processes fit.
LINES_KEPT = 400
LINE_BYTES = 1000
#: Characters of it that an error shows.
SHOWN = 2000
#: Seconds from SIGTERM to SIGKILL, less than the worker waits for the whole slot to leave.
STOP_S = 3.0
#: Seconds that the last lines of a dead server may take; its children may hold the pipe open for ever.
LAST_WORDS_S = 0.5

_OUT_OF_MEMORY = re.compile(r"out.?of.?(device.?)?memory|bad_alloc|cannot allocate memory|ALLOC_FAILED", re.IGNORECASE)
_PORT_TAKEN = re.compile(r"address (already )?in use|EADDRINUSE", re.IGNORECASE)
#: Exit codes of a process that got SIGKILL, and of a shell whose command did.
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)


class ServerError(Retry):
    """The model server did not do its part."""


class ServerMissing(ServerError):
    pass


class ServerExited(ServerError):
    pass


class ServerOutOfMemory(ServerExited):
    pass


class PortTaken(ServerExited):
    pass


class ServerNotReady(ServerError):
    pass


class ServerSilent(ServerError):
    pass


class ServerBusy(ServerError):
    pass


class ServerFailed(ServerError):
    pass


class Server:
    """Started in the slot's process group, with its environment; killed with the *thread* that starts it."""

    def __init__(self, command: Sequence[str]) -> None:
        program = shutil.which(command[0])
        if program is None:
            raise ServerMissing(f"there is no program {command[0]!r} on this machine")
        self._output: deque[str] = deque(maxlen=LINES_KEPT)
        self._process = subprocess.Popen(
            becoming(program, command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._reader = threading.Thread(target=self._read, name="server-output", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exited(self) -> bool:
        return self._process.poll() is not None

    def _read(self) -> None:
        """Take all it says, so that it never waits for a reader, and keep the last lines."""
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            while piece := pipe.readline(LINE_BYTES):  # a "line" may be a gigabyte
                self._output.append(piece.decode(errors="replace").rstrip().rpartition("\r")[2])

    def check(self, wait_s: float = 0.0) -> None:
        """Raise why it ended, if it did, or does within `wait_s`."""
        try:
            code = self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return
        self._reader.join(LAST_WORDS_S)
        raise exit_error(code, self._output.copy())

    def last_words(self) -> str:
        return last_words(self._output.copy())

    def stop(self) -> None:
        """SIGTERM, time to leave, SIGKILL. What it leaves behind is the slot's: whoever looks at the GPU ends it."""
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(LAST_WORDS_S)


def exit_error(code: int, output: Sequence[str]) -> ServerExited:
    """What to call it that a server ended this way, having said this."""
    told = next((line for line in reversed(output) if _OUT_OF_MEMORY.search(line)), None)
    ended = f"{_ending(code)}; {last_words(output)}"
    if told is not None:
        return ServerOutOfMemory(f"the model server ran out of memory ({told[:200].strip()}): it {ended}")
    if code in _KILLED:
        return ServerOutOfMemory(f"the model server {ended}\n(SIGKILL is what the kernel sends when memory runs out)")
    if any(_PORT_TAKEN.search(line) for line in output):
        return PortTaken(f"the model server did not get its port: it {ended}")
    return ServerExited(f"the model server {ended}")


def _ending(code: int) -> str:
    if code == 0:
        return "exited with code 0, but must stay in the foreground"
    return f"exited with code {code}" if code > 0 else f"was ended by signal {-code} ({signal.strsignal(-code)})"


def last_words(output: Sequence[str]) -> str:
    text = "\n".join(output).strip()
    return f"its last output:\n{text[-SHOWN:]}" if text else "it printed nothing"
