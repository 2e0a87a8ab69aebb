"""A running cluster as its users see it, over HTTP alone: whatever one orchestrator takes, the other sees done, once.

    python -m tests.e2e.outside http://127.0.0.1:8008 http://127.0.0.1:8009

It needs nothing but the client, and may be run again and again.
"""

import argparse
import secrets
from typing import Any

from orchestrator.client import Client
from tests.waiting import wait_until

#: By each orchestrator; every tenth with a lease of a GPU's memory.
JOBS = 500


def jobs(run: str) -> list[dict[str, Any]]:
    return [
        {"job_id": f"{run}-{n}", "type": "echo", "payload": {"n": n}, "min_memory_mb": 0 if n % 10 else 512}
        for n in range(JOBS)
    ]


def check(entry: str, other: str) -> None:
    """What is submitted here is seen there."""
    batch = jobs(f"outside-{secrets.token_hex(6)}")
    wanted = {job["job_id"]: job["payload"] for job in batch}
    with Client(entry) as here, Client(other) as there:
        assert all(answer["created"] for answer in here.submit_many(batch))
        ended = list(there.as_completed(wanted, timeout_s=120))
        wrong = [job for job in ended if (job["status"], job["attempts"]) != ("done", 1)]
        assert not wrong, wrong[:3]
        assert {job["job_id"]: job["result"] for job in ended} == wanted
        assert not any(answer["created"] for answer in there.submit_many(batch)), "submitted again, and stored again"
        wait_until(lambda: not there.leases(), what="no lease left")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("orchestrators", metavar="URL", nargs=2)
    first, second = parser.parse_args().orchestrators
    for entry, other in ((first, second), (second, first)):
        check(entry, other)
        print(f"{JOBS} jobs submitted to {entry} are done, each once, as {other} says", flush=True)


if __name__ == "__main__":
    main()
