"""The Python client: what programs outside of the orchestrator use, over HTTP.

    from orchestrator.client import lease

    with lease(min_memory_mb=8000, agent="trainer") as held:
        train()                     # sees the leased GPU only; LeaseLost is raised here if the lease is lost

`api` is the one door to a server, for the command line too. `asking` waits until a lease is granted, `keeper` renews
it, `interrupt` raises in the holder when it is lost, `visible` sets what CUDA sees, `holding` puts these together.
"""

from orchestrator.client.errors import LeaseDenied, LeaseLost, Refused, ServerUnreachable
from orchestrator.client.holding import Held, lease

__all__ = ["Held", "LeaseDenied", "LeaseLost", "Refused", "ServerUnreachable", "lease"]
