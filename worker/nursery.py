"""Where slots are born: a process that has loaded what all slots need, and forks one whenever it is asked.

    supervisor ──Nursery──▶ python -m worker.nursery FD PARENT_PID [MODULE …] ──fork──▶ slot, slot, slot …

A forked slot is there in milliseconds, and shares its memory with the others: the processor's caches hold the
interpreter's own data once, not once for each slot, which is most of what a small job costs. A MODULE is one that not
every supervisor's slots need. The nursery has nothing that a slot must not have: no settings, no connection, no thread,
no handler.

It is the parent of the slots: they die with it, and it ends when the supervisor's end of its socket is closed; one that
the supervisor's main thread started is also killed with it, frozen or not. Only the supervisor knows when a slot may be
reaped, and its number so given to another process: when nobody will signal it.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.gpu.processes import MARK
from worker import builtin as _builtin  # noqa: F401 - loaded once, for all slots
from worker import slot, wire

#: Seconds in which it forks or reaps; it does nothing else.
PATIENCE_S = 10.0
#: Characters of a mark, all of which are kept free in the environment that the kernel shows of the slots.
MARK_ROOM = 200
#: Bytes of a question.
MAX_QUESTION = 1 << 20
#: What the kernel says when it has no memory for a message.
SHORT = (errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS)
#: What became of a slot whose nursery died: the kernel killed it.
KILLED = -signal.SIGKILL


class NotBorn(OSError):
    """There is no process, or no file, to be had for another slot. Its nursery and those that live are well."""


class Child:
    """A slot's process, of which the nursery is the parent."""

    def __init__(self, pid: int, pidfd: int, nursery: _Process) -> None:
        self.pid, self.pidfd = pid, pidfd
        self._nursery = nursery

    def reap(self) -> int:
        """Its exit code, once it has ended. Its number may be another's after that."""
        try:
            return int(self._nursery.ask({"reap": self.pid})[0]["code"])
        except OSError:
            return KILLED


class Nursery:
    """The supervisor's side. Any thread may ask; who does first starts the process, unless `start` did, or it died."""

    def __init__(self, preloaded: Sequence[str] = ()) -> None:
        """`preloaded` are modules that it loads beside those that all slots need."""
        self._preloaded = preloaded
        self._lock = threading.Lock()
        self._process: _Process | None = None

    def start(self) -> None:
        self._living()

    def bear(self, arguments: Sequence[str], fds: Sequence[int], environment: Mapping[str, str], mark: str) -> Child:
        """A new slot with these files (whose numbers come before its arguments). Raises OSError."""
        order = {"arguments": list(arguments), "environment": dict(environment), "mark": mark}
        try:
            return _child(self._living(), order, fds)
        except NotBorn:
            raise  # another nursery would get no more, and with this one all its slots would end
        except OSError:
            return _child(self._living(), order, fds)  # by another nursery

    def _living(self) -> _Process:
        with self._lock:
            if self._process is None or self._process.closed:
                self._process = _Process(self._preloaded)
            return self._process

    def close(self) -> None:
        """After the last slot has ended."""
        with self._lock:
            if self._process is not None:
                self._process.close()


class _Process:
    """One nursery process: a question, an answer."""

    def __init__(self, preloaded: Sequence[str]) -> None:
        self._end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._end.settimeout(PATIENCE_S)
        self._lock = threading.Lock()
        self.closed = False
        # The kernel's signal at a parent's death means the thread that started the child.
        lasting = threading.current_thread() is threading.main_thread()
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "worker.nursery",
                    str(theirs.fileno()),
                    str(os.getpid() if lasting else 0),
                    *preloaded,
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # signals from a terminal are for the supervisor
                # The last keeps programs that name their processes from writing over the mark.
                env={**_without_settings(os.environ), MARK: " " * MARK_ROOM, "SPT_NOENV": "1"},
            )

    def ask(self, question: dict[str, Any], fds: Sequence[int] = ()) -> tuple[dict[str, Any], list[int]]:
        """Raises OSError when it does not answer; then it is ended, since a late answer would pass for the next."""
        with self._lock:
            if self.closed:
                raise BrokenPipeError("the nursery is gone")
            try:
                self._send(question, fds)
                answer, answered, _, _ = socket.recv_fds(self._end, MAX_QUESTION, 1)
                if not answer:
                    raise BrokenPipeError("the nursery ended")
            except NotBorn:
                raise
            except OSError:
                self._end_it()
                raise
        return json.loads(answer), answered

    def _send(self, question: dict[str, Any], fds: Sequence[int]) -> None:
        try:
            socket.send_fds(self._end, [json.dumps(question).encode()], fds)
        except OSError as error:
            if error.errno in SHORT:
                raise NotBorn(error.errno, error.strerror) from error  # nothing was sent, so no answer will come late
            raise

    def close(self) -> None:
        with self._lock:
            if not self.closed:
                self._end_it()

    def _end_it(self) -> None:
        """All its slots die with it."""
        self.closed = True
        self._end.close()
        self._process.kill()
        self._process.wait()


def _child(process: _Process, order: dict[str, Any], fds: Sequence[int]) -> Child:
    answer, answered = process.ask(order, fds)
    if "failed" in answer:
        raise NotBorn(*answer["failed"])
    child = Child(answer["pid"], answered[0] if answered else -1, process)
    if not answered:  # the kernel drops what we have no number for
        os.killpg(child.pid, signal.SIGKILL)
        child.reap()
        raise NotBorn(errno.EMFILE, os.strerror(errno.EMFILE))
    return child


def _without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Handlers get no database password: what they need comes with the job."""
    return {name: value for name, value in environ.items() if not name.startswith("ORCH_")}


# ── the process itself ──────────────────────────────────────────────────────────────────────────────────────────


def main() -> None:
    """Answer until the supervisor is gone. In a slot, it returns when the slot's life is over."""
    number, parent, *modules = sys.argv[1:]
    if parent != "0":
        wire.die_with_parent(int(parent))
    end = socket.socket(fileno=int(number))
    os.set_inheritable(end.fileno(), False)
    for stop in (signal.SIGINT, signal.SIGTERM):  # those who stop whole groups mean the supervisor, which drains
        signal.signal(stop, signal.SIG_IGN)
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection would write to, and so copy, memory that all slots share
    while True:
        question, fds, _, _ = socket.recv_fds(end, MAX_QUESTION, 8)
        if not question:
            return
        order = json.loads(question)
        if "reap" in order:
            _, status = os.waitpid(order["reap"], 0)
            end.send(json.dumps({"code": os.waitstatus_to_exitcode(status)}).encode())
            continue
        nursery = os.getpid()
        try:
            pid, pidfd = _fork()
        except OSError as error:
            # One slot less is no reason to end, which would end all others.
            _close(fds)
            end.send(json.dumps({"failed": [error.errno, error.strerror]}).encode())
            continue
        if pid == 0:
            end.close()
            _be_a_slot(order, fds, nursery)
            return
        _close(fds)
        _tell_of(end, pid, pidfd)


def _tell_of(end: socket.socket, pid: int, pidfd: int) -> None:
    """A slot that cannot be told of, for want of memory for the message, would live unknown."""
    try:
        socket.send_fds(end, [json.dumps({"pid": pid}).encode()], [pidfd])
    except OSError as error:
        if error.errno not in SHORT:
            raise
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        end.send(json.dumps({"failed": [error.errno, error.strerror]}).encode())
    finally:
        os.close(pidfd)


def _fork() -> tuple[int, int]:
    """A child, and the file that tells its end; in the child, 0. Raises OSError when there is none to be had.

    If not all files of the slot arrived, we are out of numbers for them: then this fails too, and no half-equipped slot
    lives.
    """
    pid = os.fork()
    if pid == 0:
        return 0, -1
    _lead_its_group(pid)
    try:
        return pid, os.pidfd_open(pid)
    except OSError:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _be_a_slot(order: dict[str, Any], fds: Sequence[int], nursery: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _lead_its_group(0)
    _wear(order["mark"])
    os.environ.update(order["environment"])
    sys.argv[1:] = [*map(str, fds), str(nursery), *order["arguments"]]
    slot.main()


def _lead_its_group(pid: int) -> None:
    """A process group of its own, to be killed as one. Both sides say so: whoever comes first, nobody is too early."""
    os.setpgid(pid, 0)


def _wear(mark: str) -> None:
    """Be recognised by this mark: in the environment of all descendants, and in what the kernel shows of this process.

    That is the environment which its nursery was started with: its room for a mark is written over.
    """
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    ctypes.memmove(libc.getenv(MARK.encode()), mark.encode().ljust(MARK_ROOM, b"\0"), MARK_ROOM)
    os.environ[MARK] = mark


if __name__ == "__main__":
    main()
