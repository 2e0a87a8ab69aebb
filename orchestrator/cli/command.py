"""Running somebody's command as if they had started it themselves, and leaving nothing of it behind.

It leads a process group of its own, which gets the terminal if we have it: Ctrl-C and Ctrl-Z are for the command, and a
shell sees us stop and end with it. All signals that are for us are blocked and taken one by one, so that nothing here
runs in the middle of something else; those that a person may send are passed on.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import click

from orchestrator.children import Guard, adopt_orphans, becoming

#: Signals that are passed on.
PASSED = frozenset(
    {
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGWINCH,
        signal.SIGTSTP,
        signal.SIGCONT,
    }
)
#: Those that cut short what we wait for when the command is gone already.
URGENT = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
#: A background process that changes who has the terminal, or uses it, gets these.
TERMINAL = frozenset({signal.SIGTTIN, signal.SIGTTOU})
TAKEN = PASSED | TERMINAL | {signal.SIGCHLD}
#: Seconds between two looks at processes that were killed and are not gone, and for all of them.
KILLED_LOOK_S, KILLED_S = 0.05, 30.0


class NotGone(Exception):
    """Processes of the command are left that even SIGKILL does not end: they are stuck in the kernel."""


def find(name: str) -> str | int:
    """The program's path; 127 when there is none, 126 when it is not to be executed, as shells say."""
    folders = [""] if "/" in name else os.environ.get("PATH", os.defpath).split(os.pathsep)
    found = [path for folder in folders if (path := Path(folder or ".", name)).exists()]
    for path in found:
        if path.is_file() and os.access(path, os.X_OK):
            return str(path)
    return 126 if found else 127


@contextmanager
def signals_taken() -> Iterator[set[int]]:
    """Block what we take one by one; gives what was blocked before, for the command to start with."""
    # A parent may have left it ignored, and then nobody would be told of a child's end.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, TAKEN)
    try:
        yield {int(number) for number in before}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Terminal:
    """The terminal of our session, if there is one, and who may read from it."""

    def __init__(self) -> None:
        try:
            self._fd: int | None = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:
            self._fd = None

    def pass_on(self, giver: int, taker: int) -> bool:
        """From one process group to the other; whether the first one had it."""
        with suppress(OSError):  # it was closed: nobody has it any more
            if self._fd is not None and os.tcgetpgrp(self._fd) == giver:
                os.tcsetpgrp(self._fd, taker)
                return True
        return False

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)


class Command:
    """One run of a command. `lost` tells that it must end now; send us SIGCHLD when that changes."""

    def __init__(self, program: str, command: Sequence[str], lost: Callable[[], bool], grace_s: float) -> None:
        self._program, self._command = program, command
        self._lost, self._grace_s = lost, grace_s
        self._group = 0
        self._code: int | None = None
        #: When patience with what was asked to end, or was killed then, is over; None while nothing was.
        self._patient_until: float | None = None
        self._killed = False
        #: Whether it was ended because of `lost`.
        self.was_ended = False

    def run(self) -> int:
        """Its exit code, 128 + number after a signal. It and all it started are gone then. Raises NotGone."""
        guard = Guard()
        adopt_orphans()
        self._terminal = Terminal()
        try:
            with signals_taken() as blocked:
                arguments = becoming(self._program, self._command)
                self._group = os.posix_spawn(arguments[0], arguments, os.environ, setpgroup=0, setsigmask=blocked)
                guard.watch(self._group)
                self._lend_terminal()
                code = self._wait()
                self._end_rest()
                guard.dismiss()
                self._terminal.pass_on(self._group, os.getpgrp())
                return code
        finally:
            self._terminal.close()

    # ── while it runs ───────────────────────────────────────────────────────────────────────────────────────

    def _wait(self) -> int:
        while True:
            self._reap()
            if self._code is not None:
                return self._code
            if self._lost() and self._patient_until is None:
                self.was_ended = True
                self._ask_to_end()
            taken = self._next_signal()
            if taken is None:
                self._kill()
            elif taken in PASSED:
                self._pass_on(taken)

    def _next_signal(self) -> int | None:
        """The next one that is for us; None when patience is over."""
        if self._patient_until is None:
            return signal.sigwait(TAKEN)
        taken = signal.sigtimedwait(TAKEN, max(0.0, self._patient_until - time.monotonic()))
        return None if taken is None else taken.si_signo

    def _kill(self) -> None:
        if self._killed:
            raise NotGone
        self._killed = True
        self._patient_until = time.monotonic() + KILLED_S
        self._send(signal.SIGKILL)

    def _pass_on(self, number: int) -> None:
        if number == signal.SIGCONT:  # we may be in the foreground now
            self._lend_terminal()
        self._send(number)

    def _ask_to_end(self) -> None:
        self._patient_until = time.monotonic() + self._grace_s
        self._send(signal.SIGTERM)
        self._send(signal.SIGCONT)  # one that is stopped hears nothing

    def _send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._group, number)

    def _reap(self) -> bool:
        """Hear of everybody who ended or stopped; whether anybody is left."""
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
                if pid == 0:
                    return True
                if pid != self._group:
                    continue  # an orphan that we adopted
                if os.WIFSTOPPED(status):
                    self._stopped(os.WSTOPSIG(status))
                else:
                    code = os.waitstatus_to_exitcode(status)
                    self._code = code if code >= 0 else 128 - code
        return False

    def _stopped(self, number: int) -> None:
        """Stop with it, so that the shell takes over; go on with it later. A stop that is no one's key is not ours."""
        if number not in TERMINAL | {signal.SIGTSTP}:
            return
        # Reading without having the terminal while we have it: somebody brought us to the foreground.
        if not (number in TERMINAL and self._lend_terminal()):
            self._terminal.pass_on(self._group, os.getpgrp())
            _stop_our_group()
            self._lend_terminal()
        self._send(signal.SIGCONT)

    def _lend_terminal(self) -> bool:
        return self._terminal.pass_on(os.getpgrp(), self._group)

    # ── when it is gone ─────────────────────────────────────────────────────────────────────────────────────

    def _end_rest(self) -> None:
        """End whatever it left behind: it would go on using the GPU."""
        if not self._reap():
            return
        click.echo("gpuorch run: the command left processes behind; ending them", err=True)
        if self._patient_until is None:
            self._ask_to_end()
            # Once each: those of the group were asked, and a second signal would come in the middle of their end.
            _send_all((pid for pid in _children() if not _is_in(pid, self._group)), signal.SIGTERM)
        while self._reap() and not self._killed:
            taken = self._next_signal()
            if taken is None or taken in URGENT:
                self._kill()
        self._kill_rest()

    def _kill_rest(self) -> None:
        deadline = time.monotonic() + KILLED_S
        while self._reap():
            # Those that we kill leave their children to us: again until none is left.
            self._send(signal.SIGKILL)
            _send_all(_children(), signal.SIGKILL)
            signal.sigtimedwait({signal.SIGCHLD}, KILLED_LOOK_S)
            if time.monotonic() > deadline:
                raise NotGone


def _stop_our_group() -> None:
    """Like Ctrl-Z, for all of a pipeline. Returns when we go on, or at once where nobody could let us."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTSTP})
    os.kill(0, signal.SIGTSTP)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTSTP})


def _children() -> list[int]:
    """Pids of our children."""
    found: list[int] = []
    for thread in Path("/proc/self/task").glob("*/children") if sys.platform == "linux" else []:
        with suppress(OSError):
            found += map(int, thread.read_text().split())
    return found


def _is_in(pid: int, group: int) -> bool:
    try:
        return os.getpgid(pid) == group
    except ProcessLookupError:
        return False


def _send_all(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
