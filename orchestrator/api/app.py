"""The application: routers, errors and the guard around one orchestrator."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from orchestrator import __version__
from orchestrator.api import (
    audit,
    autoscale,
    cluster,
    control,
    dlq,
    fetch,
    health,
    job_actions,
    jobs,
    leases,
    outcomes,
    policies,
    pools,
    problems,
    schedules,
    submit,
    workers,
    workflows,
)
from orchestrator.api.backend import Backend
from orchestrator.api.caller import Caller
from orchestrator.api.guard import Guard
from orchestrator.daemon import Orchestrator

#: Every module with a router. `fetch` before `jobs`, which would take /jobs/dispatchable for a job's id.
NOUNS = (
    submit,
    fetch,
    jobs,
    outcomes,
    job_actions,
    dlq,
    leases,
    workers,
    pools,
    policies,
    schedules,
    workflows,
    control,
    cluster,
    autoscale,
    audit,
    health,
)


def create_app(orchestrator: Orchestrator) -> FastAPI:
    """The orchestrator is started and closed by whoever made it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        app.state.backend.close()

    app = FastAPI(
        title="gpu-orchestrator",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        # Not included one by one: that would build every route again, at the first request.
        routes=[route for module in NOUNS for route in module.router.routes],
    )
    app.state.backend = Backend(orchestrator)
    problems.install(app)
    app.add_middleware(Caller)
    app.add_middleware(Guard, bound_host=orchestrator.settings.host)
    return app
