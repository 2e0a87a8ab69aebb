"""The servers that other tests stand on start, keep their data, and go when told or orphaned."""

import os
import signal
import socket
import subprocess
import sys
import threading

import pymysql
import pytest
import redis

from tests import servers
from tests.processes import alive
from tests.servers import (
    PORTS,
    MariaDB,
    MissingBinaryError,
    Prometheus,
    Redis,
    ServerError,
    Valkey,
    find_binary,
    free_port,
)
from tests.waiting import wait_until

STREAM_SERVERS = pytest.mark.parametrize("kind", [Redis, Valkey])


def execute(server: MariaDB, statement: str) -> tuple:
    with server.connect() as connection, connection.cursor() as cursor:
        cursor.execute(statement)
        connection.commit()
        return cursor.fetchall()


@STREAM_SERVERS
def test_stream_server_is_configured_as_in_production(private_server, kind):
    with private_server(kind).client() as client:
        settings = client.config_get("append*", "maxmemory-policy")
    assert settings["appendonly"] == "yes"
    assert settings["appendfsync"] == "everysec"
    assert settings["maxmemory-policy"] == "noeviction"


@STREAM_SERVERS
@pytest.mark.parametrize("ending", ["stop", "kill"])
def test_stream_server_comes_back_with_its_data_on_its_port(private_server, kind, ending):
    server = private_server(kind)
    url, pid = server.url, server.pid
    with server.client() as client:
        client.xadd("stream", {"job_id": "a"})
    getattr(server, ending)()
    assert not alive(pid)
    with server.client() as client, pytest.raises(redis.ConnectionError):
        client.ping()

    server.start()

    assert server.url == url and server.pid != pid
    with redis.Redis.from_url(url) as client:
        assert client.xlen("stream") == 1


def test_mariadb_is_configured_as_in_production(private_server):
    server = private_server(MariaDB)
    ((durable, connections, charset),) = execute(
        server, "SELECT @@innodb_flush_log_at_trx_commit, @@max_connections, @@character_set_server"
    )
    assert (durable, connections, charset) == (1, 300, "utf8mb4")
    assert server.socket.is_socket()


def test_mariadb_keeps_committed_rows_through_restart_and_kill(private_server):
    server = private_server(MariaDB)
    assert server.create_database("other") == server.create_database("other") == server.url_of("other")
    execute(server, "CREATE TABLE other.t (n INT PRIMARY KEY)")
    execute(server, "INSERT INTO other.t VALUES (1)")

    server.restart()
    execute(server, "INSERT INTO other.t VALUES (2)")
    pid = server.pid
    server.kill()
    assert not alive(pid)
    with pytest.raises(pymysql.err.OperationalError):
        server.connect()
    server.start()

    assert execute(server, "SELECT n FROM other.t ORDER BY n") == ((1,), (2,))


def test_leaving_stops_the_server_and_removes_its_directory():
    with Valkey() as server:
        pid, directory = server.pid, server.directory
        assert server.running and directory.is_dir()
    assert not server.running and not alive(pid) and not directory.exists()


def test_stopping_a_frozen_server_ends_by_force(private_server, monkeypatch):
    monkeypatch.setattr("tests.servers.STOP_TIMEOUT_S", 0.1)
    server = private_server(Valkey)
    pid = server.pid
    os.kill(pid, signal.SIGSTOP)
    server.stop()
    assert not alive(pid)


def test_server_outlives_the_thread_that_started_it(private_server):
    server = private_server(Valkey)
    thread = threading.Thread(target=server.restart)
    thread.start()
    thread.join()
    assert server.answers()


def test_servers_die_with_a_test_process_that_is_killed(tmp_path):
    program = "from tests.servers import Valkey; s = Valkey(); s.start(); print(s.pid, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "TMPDIR": str(tmp_path)},  # nobody is left to remove the server's directory
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
    wait_until(lambda: not alive(pid), what="the orphaned server is gone")


def test_a_server_that_cannot_start_shows_its_log(private_server):
    server = private_server(Valkey)
    server.stop()
    (server.directory / "appendonlydir").rename(server.directory / "elsewhere")
    (server.directory / "appendonlydir").write_text("not a directory")
    with pytest.raises(ServerError, match=r"ended with 1 while starting(?s:.)*appendonlydir"):
        server.start()
    assert not server.running


def test_starting_twice_is_refused(private_server):
    server = private_server(Valkey)
    with pytest.raises(ServerError, match="running already"):
        server.start()


def test_missing_binary_is_named():
    with pytest.raises(MissingBinaryError, match="no-such-server is not installed"):
        find_binary("no-such-server")


def test_ports_are_not_those_of_outgoing_connections():
    assert free_port() in PORTS


def test_shared_addresses_answer(database_url, redis_url):
    assert database_url.startswith(("mysql+pymysql://root@127.0.0.1:", "sqlite:///"))
    with redis.Redis.from_url(redis_url) as client:
        assert client.dbsize() == 0
        client.set("left", "behind")


def test_wait_until_returns_the_value_or_says_what_was_missing():
    values = iter([0, 0, 7])
    assert wait_until(lambda: next(values)) == 7
    with pytest.raises(AssertionError, match=r"the lease: not within 0\.05 s; last value: \[\]"):
        wait_until(list, timeout=0.05, what="the lease")


def test_environment_is_scrubbed():
    assert not [name for name in os.environ if name.startswith("ORCH_")]


def test_prometheus_answers_with_the_rules_of_deploy_and_says_what_it_refuses(private_server):
    server = private_server(Prometheus)
    assert [one["value"][1] for one in server.query("vector(7)")] == ["7"]
    assert len(server.ask("rules")["groups"]) > 5
    with pytest.raises(ServerError, match="parse error"):
        server.query("sum(")


@pytest.mark.parametrize("kind", [MariaDB, Redis])
def test_a_port_that_somebody_took_meanwhile_is_not_insisted_on(private_server, kind):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        taken = other.getsockname()[1]

        def unlucky():
            server = kind()
            server.port = taken
            return server

        assert private_server(unlucky).port != taken


def test_what_killed_tests_left_in_memory_is_removed_and_nothing_else(tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    names = [f"orch-redis-{gone.pid}-a", f"orch-redis-{os.getpid()}-b", "somebody-s"]
    for name in names:
        (tmp_path / name / "data").mkdir(parents=True)
    servers._tidy(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])
