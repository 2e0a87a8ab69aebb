"""A flood of submits against a rate: what gets in, what the others are told, and how long those who got in waited.

    python -m tests.bench.flood URL COUNT CONNECTIONS AGENT

is the client, a process of its own that keeps COUNT requests coming over CONNECTIONS connections and prints what it
saw as JSON. It speaks HTTP by hand: a library's client would be what is measured, on a machine with few cores.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from orchestrator.settings import Settings
from orchestrator.store import schema
from tests.cluster import Cluster
from tests.conftest import empty
from tests.tables import make_tables

RATE = 500
COUNT, CONNECTIONS = 50_000, 64
#: Seconds for the whole flood.
PATIENCE_S = 300


class Flood:
    def __init__(self, database_url: str, redis_url: str, folder: Path) -> None:
        settings = Settings(database_url=database_url, redis_url=redis_url, data_dir=folder, log_level="warning")
        self._cluster = Cluster(settings, folder)
        make_tables(self._cluster.db.engine)
        empty(self._cluster.db)
        _, self._url = self._cluster.serve()

    def measure(self, count: int = COUNT) -> dict[str, float]:
        policy = httpx.put(f"{self._url}/policies/agents/flood", json={"rate": RATE}, timeout=30, trust_env=False)
        policy.raise_for_status()
        # The same without a rate says what the machine can do at the moment.
        free = self._client(count // 10, "free")
        seen = self._client(count, "flood")
        stored = self._cluster.count("orchestrator_jobs", schema.jobs.c.agent == "flood")
        accepted = seen["statuses"].pop("202", 0)
        assert accepted == stored, f"{accepted} were accepted, {stored} are stored"
        refused = seen["statuses"].pop("429", 0)
        # What the policy allows: what was in the bucket, and what dripped in meanwhile.
        allowed = RATE + RATE * seen["seconds"]
        return {
            "submits a second": count / seen["seconds"],
            "accepted ÷ what the policy allows": accepted / allowed,
            "accepted a second, after the burst": (accepted - RATE) / seen["seconds"],
            "accepted (202)": accepted,
            "refused (429)": refused,
            "anything else": sum(seen["statuses"].values()),
            "accepted: p50 ms": 1000 * seen["p50"],
            "accepted: p99 ms": 1000 * seen["p99"],
            "refused: p99 ms": 1000 * seen["refused_p99"],
            "without a rate: submits a second": count // 10 / free["seconds"],
            "without a rate: p99 ms": 1000 * free["p99"],
        }

    def _client(self, count: int, agent: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "tests.bench.flood", self._url, str(count), str(CONNECTIONS), agent]
        client = subprocess.run(command, capture_output=True, check=True, timeout=PATIENCE_S)
        seen: dict[str, Any] = json.loads(client.stdout)
        return seen

    def close(self) -> None:
        self._cluster.close()


async def flood(url: str, count: int, connections: int, agent: str) -> dict[str, Any]:
    parts = urlsplit(url)
    body = json.dumps({"type": "echo", "payload": {}, "agent": agent}).encode()
    request = (
        f"POST /jobs/submit HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body
    left = iter(range(count))
    took: dict[int, list[float]] = {}

    async def one() -> None:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        for _ in left:
            sent = time.perf_counter()
            writer.write(request)
            status = await _status(reader)
            took.setdefault(status, []).append(time.perf_counter() - sent)
        writer.close()

    started = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(connections)))
    seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "statuses": Counter({str(status): len(times) for status, times in took.items()}),
        "p50": statistics.median(took.get(202, [0.0])),
        "p99": _p99(took.get(202, [])),
        "refused_p99": _p99(took.get(429, [])),
    }


async def _status(reader: asyncio.StreamReader) -> int:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.partition("content-length:")[2].partition("\r\n")[0])
    await reader.readexactly(length)
    return int(head.split(" ", 2)[1])


def _p99(times: list[float]) -> float:
    return sorted(times)[int(len(times) * 0.99)] if times else 0.0


if __name__ == "__main__":
    print(json.dumps(asyncio.run(flood(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))))
