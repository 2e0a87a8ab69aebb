"""What the kernel says about a process."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count, islice
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    state: str
    parent: int


def status(pid: int) -> Process | None:
    """None when there is none."""
    try:
        # The name in parentheses may hold anything, also parentheses and spaces.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Process(fields[0], int(fields[1]))


def alive(pid: int) -> bool:
    """Whether it runs; a zombie that its parent has not collected yet does not."""
    known = status(pid)
    return known is not None and known.state != "Z"


def gone(pid: int) -> bool:
    return not alive(pid)


def parent(pid: int) -> int:
    known = status(pid)
    assert known is not None, f"process {pid} is gone"
    return known.parent


def children(pid: int) -> set[int]:
    """Those of all its threads."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        return {int(child) for thread in threads for child in (thread / "children").read_text().split()}
    except FileNotFoundError:  # it is gone
        return set()


def files(pid: int) -> dict[str, str]:
    """What it has open, by number."""
    found = {}
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found[file.name] = str(file.readlink())
    return found


@contextmanager
def few_files(pid: int, free: int) -> Iterator[None]:
    """Meanwhile this process can open so many files more, and no others."""
    numbers = (number for number in count() if not Path(f"/proc/{pid}/fd/{number}").is_symlink())
    limit = next(islice(numbers, free, None))
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
