"""The floor: a job's durable cycle (insert, claim, lease, done, unlease) in plain SQL, batch by batch, one thread."""

import time

from tests.bench.trial import connect, marks

DDL = (
    "DROP TABLE IF EXISTS raw_jobs, raw_leases, raw_audit, raw_gpus",
    """CREATE TABLE raw_jobs (job_id VARCHAR(64) PRIMARY KEY, payload JSON NOT NULL, status VARCHAR(16) NOT NULL
       DEFAULT 'pending', attempt INT NOT NULL DEFAULT 0, KEY (status)) ENGINE=InnoDB""",
    "CREATE TABLE raw_leases (token VARCHAR(64) PRIMARY KEY, memory_mb INT NOT NULL) ENGINE=InnoDB",
    """CREATE TABLE raw_audit (id BIGINT AUTO_INCREMENT PRIMARY KEY, event_type VARCHAR(64), job_id VARCHAR(64))
       ENGINE=InnoDB""",
    "CREATE TABLE raw_gpus (gpu INT PRIMARY KEY, leased_mb INT NOT NULL, usable_mb INT NOT NULL) ENGINE=InnoDB",
    "INSERT INTO raw_gpus VALUES (0, 0, 1000000)",
)


def cycle(database_url: str, count: int, batch: int = 100) -> float:
    """Seconds for `count` jobs, three commits per batch."""
    db = connect(database_url)
    cursor = db.cursor()
    for statement in DDL:
        cursor.execute(statement)
    db.commit()
    started = time.perf_counter()
    for first in range(0, count, batch):
        ids = [f"raw-{n:08d}" for n in range(first, first + batch)]
        listed = marks(batch)
        _insert(cursor, "raw_jobs (job_id, payload)", [(job_id, "{}") for job_id in ids])
        _insert(cursor, "raw_audit (event_type, job_id)", [("submitted", job_id) for job_id in ids])
        db.commit()
        cursor.execute(f"SELECT job_id FROM raw_jobs WHERE job_id IN ({listed}) FOR UPDATE", ids)
        cursor.fetchall()
        cursor.execute(
            f"UPDATE raw_jobs SET status='claimed', attempt=attempt+1 WHERE job_id IN ({listed}) AND status='pending'",
            ids,
        )
        cursor.execute(
            "UPDATE raw_gpus SET leased_mb = leased_mb + %s WHERE gpu = 0 AND leased_mb + %s <= usable_mb",
            (batch, batch),
        )
        _insert(cursor, "raw_leases (token, memory_mb)", [(job_id, 1) for job_id in ids])
        _insert(cursor, "raw_audit (event_type, job_id)", [("claimed", job_id) for job_id in ids])
        db.commit()
        cursor.execute(
            f"UPDATE raw_jobs SET status='done' WHERE job_id IN ({listed}) AND status='claimed' AND attempt=1",
            ids,
        )
        cursor.execute(f"DELETE FROM raw_leases WHERE token IN ({listed})", ids)
        cursor.execute("UPDATE raw_gpus SET leased_mb = leased_mb - %s WHERE gpu = 0", (batch,))
        _insert(cursor, "raw_audit (event_type, job_id)", [("done", job_id) for job_id in ids])
        db.commit()
    seconds = time.perf_counter() - started
    db.close()
    return seconds


def _insert(cursor, target: str, rows: list[tuple]) -> None:
    row = f"({marks(len(rows[0]))})"
    cursor.execute(
        f"INSERT INTO {target} VALUES {marks(len(rows), row)}", [value for values in rows for value in values]
    )
