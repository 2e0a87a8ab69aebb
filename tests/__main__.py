"""`python -m tests`: all tests, in parts side by side. What it is told besides goes to pytest, as one run.

Each part is a pytest with servers of its own. It takes one file of tests after the other from those that nobody took
yet: some parts begin with the folders that run whole clusters, the others with those that write many statements, so
that both kinds are always under way; all of them end with the smallest, and so at about the same time. The output of
the first is seen as it comes, that of the others when it is done.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
#: Folders by what their files do: whole clusters that are killed and frozen, many statements, sums. Others are first.
CLUSTERS = ("chaos", "worker", "e2e", "scaler", "client", "leader", "gpu", "stream")
STATEMENTS = ("api", "store")
SUMS = ("unit", "sim", "contracts")
#: More than there are processors: half of the tests mostly wait. On a large machine the servers are the limit.
PARTS = max(4, min(os.cpu_count() or 1, 8))


def main() -> int:
    if sys.argv[1:]:
        return subprocess.call([sys.executable, "-m", "pytest", *sys.argv[1:]])
    begun = time.monotonic()
    with ExitStack() as stack:
        claims = stack.enter_context(tempfile.TemporaryDirectory(prefix="orch-tests-"))
        parts = [Part(number, claims, stack) for number in range(PARTS)]
        codes = [part.finish() for part in parts]
    failed = [number for number, code in enumerate(codes) if code]
    print(f"{len(codes)} parts in {time.monotonic() - begun:.0f} s; failed: {failed or 'none'}", flush=True)
    return int(any(codes))


class Part:
    """One pytest beside others; the output of all but the first is kept until it is done."""

    def __init__(self, number: int, claims: str, stack: ExitStack) -> None:
        self._number = number
        self._output = stack.enter_context(tempfile.TemporaryFile()) if number else None  # noqa: SIM115 - the stack closes it
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.__main__"]
        options = [f"--part={number}", f"--claims={claims}", "-o", "console_output_style=classic"]
        self._process = subprocess.Popen([*command, *options], stdout=self._output, stderr=self._output)
        stack.callback(self._process.kill)

    def finish(self) -> int:
        """Wait for its end and show what it said."""
        code = self._process.wait()
        if self._output is not None:
            print(f"what part {self._number} said, which ran beside:", flush=True)
            self._output.seek(0)
            sys.stdout.buffer.write(self._output.read())
        print(f"part {self._number} ended with {code}", flush=True)
        return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else code  # others had taken everything


# --- inside of a part ---


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", type=int, help="number of this part of `python -m tests`")
    parser.addoption("--claims", type=Path, help="folder in which the parts say which files they took")


def pytest_runtestloop(session: pytest.Session) -> bool:
    """As pytest's own, of the tests that this part takes. Every part has collected all of them."""
    if session.testsfailed:
        raise session.Interrupted(f"{session.testsfailed} errors during collection")
    items = taken(session)
    item = next(items, None)
    while item is not None:
        following = next(items, None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        item = following
    return True


def taken(session: pytest.Session) -> Iterator[pytest.Item]:
    """The tests of all files that this part could take."""
    part, claims = session.config.option.part, session.config.option.claims
    found: dict[Path, list[pytest.Item]] = {}
    for item in session.items:
        found.setdefault(item.path, []).append(item)
    folders = (STATEMENTS + CLUSTERS if part % 2 else CLUSTERS + STATEMENTS) + SUMS
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
