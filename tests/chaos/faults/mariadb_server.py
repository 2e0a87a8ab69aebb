"""MariaDB: killed, frozen, out of connections, and with locks that others hold."""

from contextlib import closing, suppress
from random import Random

import pymysql

from tests.chaos.faults.table import Pause, fault, stop_server
from tests.chaos.sites import Sites


@fault("F-22", "mariadb", 2)
def kill_mariadb(sites: Sites, rng: Random, pause: Pause) -> str:
    sites.mariadb.kill()
    pause(rng.uniform(0.0, 1.5))
    sites.mariadb.start()
    return "and start it with its data"


@fault("F-30", "mariadb")
def stop_mariadb(sites: Sites, rng: Random, pause: Pause) -> str:
    return stop_server(sites.mariadb.pid, rng.uniform(0.5, 4.0), pause)


@fault("F-23", "mariadb", 3)
def kill_connections(sites: Sites, rng: Random, pause: Pause) -> str:
    share, killed = rng.choice((0.2, 0.5, 1.0)), 0
    with closing(sites.mariadb.connect()) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT id FROM information_schema.processlist WHERE db = 'orchestrator'")
        for (number,) in cursor.fetchall():
            if rng.random() < share:
                with suppress(pymysql.MySQLError):  # it ended meanwhile
                    cursor.execute(f"KILL {number}")
                    killed += 1
    return f"{killed} connections"


@fault("F-32", "mariadb", 3)
def lock_rows(sites: Sites, rng: Random, pause: Pause) -> str:
    """A foreign transaction holds rows, perhaps for longer than anybody waits for a lock."""
    what = rng.choice(
        (
            "orchestrator_jobs WHERE queued IS NOT NULL LIMIT 50",
            "orchestrator_jobs WHERE status IN ('claimed', 'running') LIMIT 50",
            "workers WHERE status = 'active' LIMIT 1",
            "gpus LIMIT 2",
            "leadership",
            "orchestrator_leases LIMIT 20",
        )
    )
    seconds = rng.uniform(0.5, 7.0)
    with closing(sites.mariadb.connect()) as connection, connection.cursor() as cursor:
        connection.select_db("orchestrator")
        connection.begin()
        cursor.execute(f"SELECT * FROM {what} FOR UPDATE")
        pause(seconds)
        connection.rollback()
    return f"{what} for {seconds:.1f} s"


@fault("F-30", "mariadb")
def read_lock(sites: Sites, rng: Random, pause: Pause) -> str:
    """No commit gets through: a disk that does not answer."""
    seconds = rng.uniform(0.5, 4.0)
    with closing(sites.mariadb.connect()) as connection, connection.cursor() as cursor:
        cursor.execute("SET SESSION lock_wait_timeout = 3")  # not while a long transaction runs
        cursor.execute("FLUSH TABLES WITH READ LOCK")
        pause(seconds)
        cursor.execute("UNLOCK TABLES")
    return f"{seconds:.1f} s"


@fault("F-27", "mariadb")
def too_many_connections(sites: Sites, rng: Random, pause: Pause) -> str:
    with closing(sites.mariadb.connect()) as connection, connection.cursor() as cursor:
        cursor.execute("SET GLOBAL max_connections = 10")
        try:
            pause(rng.uniform(0.5, 3.0))
        finally:
            cursor.execute("SET GLOBAL max_connections = 300")
    return "max_connections 10"
