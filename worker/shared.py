"""Memory that the supervisor and its slots share."""

from __future__ import annotations

import mmap
import os


def memory(name: str, size: int, fd: int | None = None) -> tuple[int, mmap.mmap]:
    """The memory behind this file, or behind a new one. Raises OSError when there is no file to be had."""
    if fd is not None:
        return fd, mmap.mmap(fd, size)
    fd = os.memfd_create(name, 0)
    try:
        os.ftruncate(fd, size)
        return fd, mmap.mmap(fd, size)  # which takes another file
    except BaseException:
        os.close(fd)
        raise
