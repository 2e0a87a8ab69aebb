"""A terminal that shows frames: the alternate screen, one write for each frame, and everything as before at the end."""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

#: Seconds between two looks at the keys and at the window's size.
TICK_S = 0.1

_ENTER = "\x1b[?1049h\x1b[?25l"
_LEAVE = "\x1b[?25h\x1b[?1049l"
#: Terminals that know these show a frame only when all of it has arrived; others ignore them.
_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"
_HOME, _TO_LINE_END, _TO_SCREEN_END = "\x1b[H", "\x1b[K", "\x1b[J"


class Screen:
    """Standard output and input, both of them a terminal. `with opened() as screen`."""

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines, as they are now."""
        found = shutil.get_terminal_size()
        return found.columns, found.lines

    def draw(self, lines: Sequence[str]) -> None:
        """Over the last frame, without clearing it first: what does not change does not flicker."""
        _columns, height = self.size
        shown = f"{_TO_LINE_END}\r\n".join(lines[:height])
        _write(f"{_BEGIN}{_HOME}{shown}{_TO_LINE_END}{_TO_SCREEN_END}{_END}")

    def wait(self, seconds: float) -> str | None:
        """The next key; "resize" when the window has another size; None when the time is over."""
        before, until = self.size, time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            ready, _, _ = select.select([sys.stdin], [], [], min(left, TICK_S))
            if ready:
                # The end of the input is the end of the wish to look.
                return os.read(sys.stdin.fileno(), 16).decode(errors="replace")[:1] or "q"
            if self.size != before:
                return "resize"
        return None


@contextmanager
def opened() -> Iterator[Screen]:
    """However it ends (an error, Ctrl-C, SIGTERM, Ctrl-Z in between), the terminal is as it was."""
    keys = termios.tcgetattr(sys.stdin)

    def enter() -> None:
        tty.setcbreak(sys.stdin)
        _write(_ENTER)

    def leave() -> None:
        _write(_LEAVE)
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, keys)

    def pause(number: int, _frame: FrameType | None) -> None:
        leave()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
        # Here again: somebody brought us to the foreground.
        signal.signal(number, pause)
        enter()

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    handlers = {signal.SIGTSTP: pause, signal.SIGTERM: end, signal.SIGHUP: end}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    enter()
    try:
        yield Screen()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        with suppress(OSError, termios.error):  # the terminal may be what is gone
            leave()


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
