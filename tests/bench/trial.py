"""The yardstick: the hot path with no framework around it.

Rows and audit rows are inserted in batches of 500; one parent feeds slot processes over pipes; claim and settle
take whatever is free or finished; XACK + XDEL are pipelined; every job is durable and has three audit rows. There
are no leases, no retries, no heartbeats, no publisher and no fencing: it shows what the machine could do.
"""

import json
import multiprocessing as mp
import time
from multiprocessing.connection import wait
from typing import Any
from urllib.parse import urlsplit

import pymysql
import redis

STREAM, GROUP = "trial:jobs", "cg:trial"
DDL = (
    "DROP TABLE IF EXISTS trial_jobs, trial_audit",
    """CREATE TABLE trial_jobs (job_id VARCHAR(128) PRIMARY KEY, type VARCHAR(64) NOT NULL, payload JSON NOT NULL,
       status VARCHAR(16) NOT NULL DEFAULT 'pending', attempt INT NOT NULL DEFAULT 0, worker_id VARCHAR(128),
       created_at DATETIME(6) NOT NULL DEFAULT UTC_TIMESTAMP(6), claimed_at DATETIME(6), finished_at DATETIME(6),
       result LONGTEXT, KEY (status, created_at)) ENGINE=InnoDB""",
    """CREATE TABLE trial_audit (id BIGINT AUTO_INCREMENT PRIMARY KEY, ts DATETIME(6) NOT NULL DEFAULT
       UTC_TIMESTAMP(6), event_type VARCHAR(128), job_id VARCHAR(128), KEY (job_id)) ENGINE=InnoDB""",
)


def connect(url: str) -> pymysql.Connection:
    parts = urlsplit(url)
    connection = pymysql.connect(
        host=parts.hostname,
        port=parts.port,
        user=parts.username,
        database=parts.path[1:],
        client_flag=pymysql.constants.CLIENT.FOUND_ROWS,
    )
    with connection.cursor() as cursor:
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
    return connection


def marks(count: int, row: str = "%s") -> str:
    return ",".join([row] * count)


class Trial:
    def __init__(self, database_url: str, redis_url: str) -> None:
        self.db = connect(database_url)
        self.cursor = self.db.cursor()
        for statement in DDL:
            self.cursor.execute(statement)
        self.redis = redis.Redis.from_url(redis_url)
        self.redis.delete(STREAM)
        self.redis.xgroup_create(STREAM, GROUP, id="0", mkstream=True)

    def audit(self, event: str, ids: list[str]) -> None:
        values = [value for job_id in ids for value in (event, job_id)]
        self.cursor.execute(f"INSERT INTO trial_audit (event_type, job_id) VALUES {marks(len(ids), '(%s,%s)')}", values)

    def submit(self, count: int, batch: int = 500) -> float:
        """Seconds to make `count` jobs durable and announce them."""
        started = time.perf_counter()
        for first in range(0, count, batch):
            ids = [f"trial-{n:08d}" for n in range(first, first + batch)]
            values = [v for n, job_id in enumerate(ids) for v in (job_id, "echo", json.dumps({"n": n}))]
            self.cursor.execute(
                f"INSERT INTO trial_jobs (job_id, type, payload) VALUES {marks(batch, '(%s,%s,%s)')}", values
            )
            self.audit("submitted", ids)
            self.db.commit()
            with self.redis.pipeline(transaction=False) as pipe:
                for job_id in ids:
                    pipe.xadd(STREAM, {"job_id": job_id, "type": "echo"})
                pipe.execute()
        return time.perf_counter() - started

    def drain(self, count: int, slots: int) -> float:
        """Seconds until `count` jobs are done, with `slots` processes."""
        pipes = [self._spawn() for _ in range(slots)]
        free, done = list(pipes), 0
        running: dict[Any, tuple[str, Any]] = {}
        started = time.perf_counter()
        while done < count:
            if free:
                self._take(free, running, block=not running)
            finished = []
            ready: list[Any] = wait(list(running), timeout=None if running and not free else 0)
            for pipe in ready:
                finished.append((running.pop(pipe), pipe.recv()))
                free.append(pipe)
            if finished:
                self._settle(finished)
                done += len(finished)
        seconds = time.perf_counter() - started
        for pipe in pipes:
            pipe.send(None)
        return seconds

    def _spawn(self):
        ours, theirs = mp.Pipe()
        mp.get_context("fork").Process(target=_slot, args=(theirs,), daemon=True).start()
        return ours

    def _take(self, free, running, *, block: bool) -> None:
        answer: Any = self.redis.xreadgroup(
            GROUP, "trial", {STREAM: ">"}, count=len(free), block=1000 if block else None
        )
        entries = {fields[b"job_id"].decode(): entry for _, rows in answer for entry, fields in rows}
        if not entries:
            return
        ids = list(entries)
        self.cursor.execute(
            "SELECT job_id, payload FROM trial_jobs WHERE status = 'pending' AND job_id IN "
            f"({marks(len(ids))}) FOR UPDATE",
            ids,
        )
        jobs = self.cursor.fetchall()
        self.cursor.execute(
            "UPDATE trial_jobs SET status = 'claimed', attempt = attempt + 1, worker_id = 'trial', "
            f"claimed_at = UTC_TIMESTAMP(6) WHERE job_id IN ({marks(len(ids))}) AND status = 'pending'",
            ids,
        )
        self.audit("claimed", ids)
        self.db.commit()
        for job_id, payload in jobs:
            pipe = free.pop()
            running[pipe] = (job_id, entries[job_id])
            pipe.send((job_id, payload))

    def _settle(self, finished) -> None:
        ids = [job_id for (job_id, _), _ in finished]
        choice = " ".join(["WHEN %s THEN %s"] * len(ids))
        results = [value for (job_id, _), result in finished for value in (job_id, result)]
        self.cursor.execute(
            f"UPDATE trial_jobs SET status = 'done', finished_at = UTC_TIMESTAMP(6), result = CASE job_id {choice} "
            f"END WHERE job_id IN ({marks(len(ids))}) AND status = 'claimed' AND attempt = 1",
            [*results, *ids],
        )
        self.audit("done", ids)
        self.db.commit()
        entries = [entry for (_, entry), _ in finished]
        with self.redis.pipeline(transaction=True) as pipe:
            pipe.xack(STREAM, GROUP, *entries)
            pipe.xdel(STREAM, *entries)
            pipe.execute()


def _slot(pipe) -> None:
    while (job := pipe.recv()) is not None:
        pipe.send(json.dumps(json.loads(job[1])))
