"""Files that a job leaves behind: written aside, moved into place at once, and only by the attempt that owns the job.

A handler may be frozen between the question whether it owns its job and the move, and wake when a later attempt has
long finished. So the file itself is fenced: a small neighbour remembers which attempt wrote it last, and no earlier
one replaces it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO

#: Seconds to wait for another attempt that is putting its file in place.
FENCE_WAIT_S = 10.0


class Superseded(Exception):
    """This attempt does not own its job any more; its file was not put in place."""


@contextmanager
def writing(path: Path, job_id: str, attempt: int, owns: Callable[[], bool]) -> Iterator[BinaryIO]:
    """A file to write to; it takes its place at `path` when the block ends well and `owns()` is still true."""
    job = hashlib.sha256(job_id.encode()).hexdigest()[:16]
    _sweep(path, job, attempt)
    part = _part(path, job, attempt)
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if not owns():
            raise Superseded(f"attempt {attempt} does not own job {job_id} any more; {path} stays as it was")
        with _fence(path, job, attempt):
            part.replace(path)
            _sync(path.parent)
    finally:
        part.unlink(missing_ok=True)


def _part(path: Path, job: str, attempt: int) -> Path:
    return path.with_name(f".{path.name}.{job}.{attempt}.part")


def _sweep(path: Path, job: str, attempt: int) -> None:
    """Remove what earlier attempts left when they were killed."""
    start = f".{path.name}.{job}."
    for entry in os.scandir(path.parent):
        earlier = entry.name.removeprefix(start).removesuffix(".part")
        if entry.name == f"{start}{earlier}.part" and earlier.isdigit() and int(earlier) < attempt:
            Path(entry.path).unlink(missing_ok=True)


@contextmanager
def _fence(path: Path, job: str, attempt: int) -> Iterator[None]:
    """Hold the file's fence, and pass it only if no later attempt of this job has; remember that we did."""
    with path.with_name(f".{path.name}.attempt").open("a+") as fence:
        _lock(fence)
        fence.seek(0)
        last_job, _, last_attempt = fence.read().partition(" ")
        if last_job == job and int(last_attempt) > attempt:
            raise Superseded(f"attempt {last_attempt} has written {path} since; attempt {attempt} must not")
        yield
        fence.seek(0)
        fence.truncate()
        fence.write(f"{job} {attempt}")


def _lock(fence: TextIO) -> None:
    """Raises TimeoutError: the holder may be frozen, and nobody should wait for that."""
    deadline = time.monotonic() + FENCE_WAIT_S
    while True:
        try:
            return fcntl.flock(fence, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{fence.name} is held by somebody else") from None
            time.sleep(0.05)


def _sync(folder: Path) -> None:
    """Until the folder is on disk, a power cut may undo the move."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
