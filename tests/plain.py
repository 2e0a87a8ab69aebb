"""HTTP for tests, without TLS: a client for each request would read the system's certificate authorities each time."""

import httpx

#: No connection is kept: a server that was killed and has come back on its port knows nothing of it.
http = httpx.Client(timeout=30, trust_env=False, verify=False, limits=httpx.Limits(max_keepalive_connections=0))  # noqa: S501
