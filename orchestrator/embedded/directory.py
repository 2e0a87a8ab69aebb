"""The data directory of a `gpuorch dev`: who holds it, and where its database and its Redis are."""

from __future__ import annotations

import fcntl
import os
import shlex
import time
from pathlib import Path

from orchestrator.config import Loaded
from orchestrator.errors import ConfigError
from orchestrator.settings import Settings, database_file
from orchestrator.store.dialect import file_of

#: Seconds for which a directory may still be held by the servers of a process that was just killed.
LOCK_WAIT_S = 3.0
CONFIG, LOCK = "valkey.conf", "lock"


class DataDir:
    """A directory that one process holds; the kernel lets go of it when that ends, however it ends."""

    def __init__(self, path: Path) -> None:
        """Create the directory and take it. Raises ConfigError when it cannot be had."""
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.fd = os.open(path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise unusable(path, error) from None
        self._take()

    def _take(self) -> None:
        deadline = time.monotonic() + LOCK_WAIT_S
        while not _locked(self.fd, fcntl.LOCK_EX):
            holder = _named_holder(self.fd)
            if _runs(holder) or time.monotonic() > deadline:
                os.close(self.fd)
                raise _in_use(self.path, holder)
            time.sleep(0.05)
        try:
            os.ftruncate(self.fd, 0)
            os.pwrite(self.fd, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            os.close(self.fd)
            raise unusable(self.path, error) from None

    def close(self) -> None:
        os.close(self.fd)


def unusable(path: Path, error: OSError) -> ConfigError:
    """Told with the file in it that the system refused, where it says which."""
    file = f"{Path(error.filename).name}: " if error.filename and Path(error.filename) != path else ""
    return ConfigError(f"data_dir {path}: {file}{error.strerror}; mend that, or choose another one")


def redis_address(password: str, port: int | str) -> str:
    return f"redis://:{password}@127.0.0.1:{port}/0"


def running_redis(path: Path) -> str | None:
    """The address of the server of a `gpuorch dev` that runs on this directory, and is ours to read; None without."""
    return _address(path) if _holder(path) else None


def beside_holder(loaded: Loaded) -> Settings:
    """With the Redis of the `gpuorch dev` whose data we look at, if one runs: that has another address at each start.

    Whoever names a server means it.
    """
    ours = loaded.nobody_gave("database_url", "redis_url")
    url = running_redis(loaded.settings.data_dir) if ours else None
    return loaded.settings.model_copy(update={"redis_url": url} if url else {})


def require_redis_of_holder(settings: Settings) -> None:
    """Raises ConfigError when the database is that of a `gpuorch dev` that runs, and Redis is not.

    Who publishes to another Redis would announce its jobs where none of its workers listens.
    """
    file = file_of(settings.database_url)
    if file is None or file != database_file(file.parent):
        return
    if (holder := _holder(file.parent)) and settings.redis_url != _address(file.parent):
        instead = "give it your handlers (ORCH_WORKER_HANDLERS=MODULE make run), or choose another database_url here"
        raise _in_use(file.parent, holder, instead)


def _holder(path: Path) -> str | None:
    try:
        with (path / LOCK).open() as lock:
            return None if _locked(lock.fileno(), fcntl.LOCK_SH) else _named_holder(lock.fileno())
    except OSError:  # there is none, or it is not ours to read
        return None


def _named_holder(fd: int) -> str:
    """Who says in the lock that it holds the directory."""
    return os.pread(fd, 20, 0).decode(errors="replace").strip() or "unknown"


def _locked(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _runs(pid: str) -> bool:
    return pid.isdigit() and pid != str(os.getpid()) and Path(f"/proc/{pid}").exists()


def _in_use(path: Path, holder: str, instead: str = "choose another directory and port") -> ConfigError:
    return ConfigError(f"data_dir {path} is in use by process {holder}; stop that one, or {instead}")


def _address(path: Path) -> str | None:
    """Of the server that has its configuration there; None while it has none yet."""
    try:
        lines = (shlex.split(line, comments=True) for line in (path / CONFIG).read_text().splitlines())
        options = {words[0]: words[-1] for words in lines if words}
        return redis_address(options["requirepass"], options["port"])
    except (OSError, ValueError, KeyError):
        return None
