"""Lease grants: the system's own, as the API's batcher asks for them, beside a plain guarded UPDATE and INSERTs.

Both write the same rows of the same tables: the lease, its share of a GPU, its audit row. The plain loop knows where
each lease goes; ours reads the GPUs, places each request, and says why when there is no room.
"""

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import pymysql
from sqlalchemy import insert

from orchestrator.leases import Granted, LeaseRequest, Terms, lease_name, new_token, token_hash
from orchestrator.settings import Settings
from orchestrator.store import grants, schema
from orchestrator.store.database import Database
from tests.bench.trial import connect, marks
from tests.tables import make_tables

NODES, CARDS = 2, 4
SIZES = (1000, 2000, 4000, 8000)
#: Enough for everybody: a refusal is another measurement.
USABLE_MB = 2_000_000_000
STALE_S = 3600.0
TTL_S = 60.0

_TAKE = (
    "UPDATE gpus SET leased_mb = leased_mb + %s, reserved_for = NULL, reserved_until = NULL WHERE gpu_uuid = %s"
    " AND leased_mb + foreign_mb + %s <= usable_mb AND health = 'ok'"
    " AND sampled_at > UTC_TIMESTAMP(6) - INTERVAL %s SECOND AND quarantined_at IS NULL AND gate_closed_at IS NULL"
)


class Leases:
    def __init__(self, database_url: str) -> None:
        self._settings = Settings(database_url=database_url)
        self._db = Database(self._settings)
        self._terms = Terms(STALE_S)
        self._raw = connect(database_url)
        schema.metadata.drop_all(self._db.engine)
        make_tables(self._db.engine)

    def close(self) -> None:
        self._raw.close()
        self._db.close()

    def race(self, count: int, batch: int) -> dict[str, float]:
        """Grants per second, `count` of each, `batch` to a transaction, by the median of the transactions.

        They take turns: whatever else the machine does meanwhile, it does to both.
        """
        self._empty()
        ways: dict[str, Callable[[int, int], None]] = {"raw": self._raw_batch, "ours": self._our_batch}
        spent: dict[str, list[float]] = {name: [] for name in ways}
        for first in range(0, count, batch):
            for name, grant in ways.items():
                started = time.perf_counter()
                grant(first, batch)
                spent[name].append(time.perf_counter() - started)
        return {name: batch / statistics.median(seconds) for name, seconds in spent.items()}

    def _our_batch(self, first: int, batch: int) -> None:
        requests = [LeaseRequest(f"agent-{n % 7}", SIZES[n % 4], TTL_S) for n in range(first, first + batch)]
        answers = grants.grant_to_clients(self._db, requests, self._terms)
        assert all(isinstance(answer, Granted) for answer in answers)

    def _raw_batch(self, first: int, batch: int) -> None:
        """All of a batch goes to one GPU, as ours does while there is room."""
        uuid = f"GPU-{first // batch % (NODES * CARDS)}"
        leases = [(token_hash(new_token()), f"agent-{n % 7}", SIZES[n % 4]) for n in range(first, first + batch)]
        need = sum(size for _, _, size in leases)
        cursor = self._raw.cursor()
        assert cursor.execute(_TAKE, (need, uuid, need, STALE_S)) == 1
        self._insert(cursor, uuid, leases)
        self._raw.commit()

    def _insert(self, cursor: pymysql.cursors.Cursor, uuid: str, leases: list[tuple[str, str, int]]) -> None:
        row = f"({marks(6)}, {marks(1)}, UTC_TIMESTAMP(6) + INTERVAL {TTL_S} SECOND)"
        cursor.execute(
            "INSERT INTO orchestrator_leases (token, agent_name, gpu_index, mode, memory_mb, node_id, ttl_seconds,"
            f" expires_at) VALUES {marks(len(leases), row)}",
            [value for key, agent, size in leases for value in (key, agent, 0, "gpu", size, "node-0", TTL_S)],
        )
        cursor.execute(
            f"INSERT INTO lease_gpus (token, gpu_uuid, memory_mb) VALUES {marks(len(leases), '(%s,%s,%s)')}",
            [value for key, _, size in leases for value in (key, uuid, size)],
        )
        cursor.execute(
            f"INSERT INTO orchestrator_audit (event_type, actor, details) VALUES {marks(len(leases), '(%s,%s,%s)')}",
            [value for lease in leases for value in ("lease.granted", lease[1], _details(uuid, *lease))],
        )

    def _empty(self) -> None:
        """Begin with empty tables and empty GPUs, sampled just now."""
        cards = [
            {
                "gpu_uuid": f"GPU-{number}",
                "node_id": f"node-{number // CARDS}",
                "gpu_index": number % CARDS,
                "name": "bench",
                "total_mb": USABLE_MB,
                "usable_mb": USABLE_MB,
            }
            for number in range(NODES * CARDS)
        ]

        def work(conn: Any) -> None:
            for table in (schema.lease_gpus, schema.leases, schema.audit, schema.gpus):
                conn.execute(table.delete())
            conn.execute(insert(schema.gpus), cards)

        self._db.write(work)


def _details(uuid: str, key: str, _agent: str, size: int) -> str:
    return json.dumps({"lease": lease_name(key), "mode": "gpu", "memory_mb": size, "gpus": [uuid]})
