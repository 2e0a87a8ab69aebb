"""The Python client: what programs outside of the orchestrator use, over HTTP. docs/client.md tells how.

    from orchestrator.client import Client

    with Client() as client:                                    # AsyncClient: the same, awaited
        answers = client.submit_many({"type": "embed", "payload": {"text": text}} for text in texts)
        for job in client.as_completed(answer["job_id"] for answer in answers):
            print(job["job_id"], job["status"], job.get("result"))

    from orchestrator.client import lease

    with lease(min_memory_mb=8000, agent="trainer") as held:
        train()                     # sees the leased GPU only; LeaseLost is raised here if the lease is lost

What a client can do is described once, without doing it: operations (`nouns`, `submitting`, `asking`) yield `steps`,
which `api` performs with threads and `aio` in an event loop; `operations` gives both their methods. `wire` is what they
share of httpx, `patience` what is sent again and when, `answers` what comes back. `asking` waits until a lease is
granted, `keeper` renews it, `interrupt` raises in the holder when it is lost, `visible` sets what CUDA sees, `holding`
puts these together.
"""

from orchestrator.client.clients import AsyncClient, Client
from orchestrator.client.errors import JobsRefused, LeaseDenied, LeaseLost, NotEnded, Refused, ServerUnreachable
from orchestrator.client.holding import Held, lease
from orchestrator.client.submitting import submit

__all__ = [
    "AsyncClient",
    "Client",
    "Held",
    "JobsRefused",
    "LeaseDenied",
    "LeaseLost",
    "NotEnded",
    "Refused",
    "ServerUnreachable",
    "lease",
    "submit",
]
