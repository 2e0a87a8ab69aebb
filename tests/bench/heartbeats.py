"""Heartbeats of clients' leases: each in a transaction of its own, and through the batcher, with as many callers."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from orchestrator.heartbeats import Heartbeats
from orchestrator.leases import Granted, LeaseRequest, Terms, token_hash
from orchestrator.settings import Settings
from orchestrator.store import grants, renewals, schema
from orchestrator.store.database import Database
from tests.factories import traffic
from tests.tables import make_tables

LEASES, CALLERS = 500, 64


class Beating:
    def __init__(self, database_url: str) -> None:
        self._db = Database(Settings(database_url=database_url, db_pool_size=CALLERS // 2))  # and as many in reserve
        schema.metadata.drop_all(self._db.engine)
        make_tables(self._db.engine)
        self._heartbeats = Heartbeats(self._db)
        wishes = [LeaseRequest("bench", 10, 3600.0, cpu_fallback=True) for _ in range(LEASES)]
        answers = grants.grant_to_clients(self._db, wishes, Terms(3600.0))
        self._tokens = [answer.request.token for answer in answers if isinstance(answer, Granted)]
        assert len(self._tokens) == LEASES

    def close(self) -> None:
        self._heartbeats.close(10.0)
        self._db.close()

    def race(self, count: int) -> dict[str, tuple[float, float]]:
        """Heartbeats per second, and commits for each, by way."""
        ways: dict[str, Callable[[str], Any]] = {
            "one by one": lambda token: self._db.write(lambda conn: renewals.renew(conn, [token_hash(token)])),
            "batched": lambda token: self._heartbeats.of_lease(token).result(30),
        }
        return {name: self._measure(beat, count) for name, beat in ways.items()}

    def _measure(self, beat: Callable[[str], Any], count: int) -> tuple[float, float]:
        tokens = [self._tokens[n % LEASES] for n in range(count)]
        with ThreadPoolExecutor(CALLERS) as callers, traffic(self._db) as seen:
            list(callers.map(beat, tokens[:CALLERS]))  # connections are open
            seen.commits, began = 0, time.perf_counter()
            list(callers.map(beat, tokens))
            return count / (time.perf_counter() - began), seen.commits / count
