"""What it costs to publish out of a backlog of a thousand and of a million: the same statements, the same index."""

import time
from collections.abc import Iterator
from typing import Any

from sqlalchemy import Executable, text

from orchestrator.settings import Settings
from orchestrator.store import outbox, schema
from orchestrator.store.database import Database
from tests.tables import make_tables

#: Rows that wait, and how many are taken at a time.
BACKLOGS = (1_000, 1_000_000)
TAKEN = 100
ROUNDS = 40

#: Rows of one INSERT … SELECT: the server writes them itself, and no transaction takes minutes.
PORTION = 50_000
_ROWS = text("""
INSERT INTO orchestrator_jobs
  (job_id, type, payload, payload_hash, agent, lane, `rank`, max_attempts, start_by, expires_at)
SELECT CONCAT(:lane, '-', LPAD(seq, 8, '0')), 'echo', '{}', REPEAT('0', 64), CONCAT('agent-', LPAD(seq % 50, 2, '0')),
       :lane, seq * 1000, 5,
       IF(seq % 10 = 0, utc_timestamp(6) + INTERVAL (9 + seq / 1000) DAY, NULL),
       IF(seq % 10 = 0, utc_timestamp(6) + INTERVAL (9 + seq / 1000) DAY, NULL)
FROM seq_1_to_1000000 WHERE seq BETWEEN :first AND :last
""")


class Publishing:
    def __init__(self, database_url: str) -> None:
        self._db = Database(Settings(database_url=database_url, db_timeout_s=300))
        schema.metadata.drop_all(self._db.engine)
        make_tables(self._db.engine)

    def prepare(self) -> None:
        for count in BACKLOGS:
            for first in range(1, count + 1, PORTION):
                last = min(first + PORTION - 1, count)
                self._write(_ROWS, lane=f"of-{count}", first=first, last=last)
            self._write(schema.lanes.insert(), lane=f"of-{count}")
        self._db.read(lambda conn: conn.execute(text("ANALYZE TABLE orchestrator_jobs")).all())

    def _write(self, statement: Executable, **given: Any) -> None:
        self._db.write(lambda conn: conn.execute(statement, given))

    def race(self) -> Iterator[tuple[int, float]]:
        """A backlog and the seconds of one take out of it, in turns; what was taken goes back to its place."""
        for number in range(ROUNDS + 2):
            for count in BACKLOGS:
                seconds = self._take(f"of-{count}")
                if number >= 2:  # statements are compiled, pages are in memory
                    yield count, seconds

    def _take(self, lane: str) -> float:
        started = time.perf_counter()
        taken = self._db.write(lambda conn: outbox.take(conn, lane, TAKEN, outbox.Urgent(TAKEN // 2, 10.0)))
        seconds = time.perf_counter() - started
        assert len(taken) == TAKEN
        self._db.write(lambda conn: outbox.unpublish(conn, [job.job_id for job in taken]))
        return seconds

    def close(self) -> None:
        self._db.close()
