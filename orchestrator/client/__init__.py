"""The Python client: what programs outside of the orchestrator use, over HTTP.

    from orchestrator.client import lease

    with lease(min_memory_mb=8000, agent="trainer") as held:
        train()                     # sees the leased GPU only; LeaseLost is raised here if the lease is lost

    from orchestrator.client import submit

    submit([{"type": "embed", "payload": {"text": text}} for text in texts])    # waits when it is told to

`api` is the one door to a server, for the command line too. `asking` waits until a lease is granted, `keeper` renews
it, `interrupt` raises in the holder when it is lost, `visible` sets what CUDA sees, `holding` puts these together.
`submitting` sends jobs until they are let in.
"""

from orchestrator.client.errors import JobsRefused, LeaseDenied, LeaseLost, Refused, ServerUnreachable
from orchestrator.client.holding import Held, lease
from orchestrator.client.submitting import submit

__all__ = ["Held", "JobsRefused", "LeaseDenied", "LeaseLost", "Refused", "ServerUnreachable", "lease", "submit"]
