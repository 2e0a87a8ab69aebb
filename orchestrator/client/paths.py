"""Where things are on a server, and which server."""

from __future__ import annotations

import os
from urllib.parse import quote

from orchestrator.client.wire import encodable
from orchestrator.errors import InvalidInput
from orchestrator.names import NO_JOBS, is_dots

DEFAULT_URL = "http://127.0.0.1:8008"
#: Names the server for those who give no URL.
URL_VARIABLE = "GPUORCH_URL"


def default_url() -> str:
    return os.environ.get(URL_VARIABLE) or DEFAULT_URL


def job_path(job_id: str, *more: str) -> str:
    """Raises InvalidInput where something else than a job would answer."""
    if job_id in NO_JOBS and not more:
        raise InvalidInput(f"no job has the id {job_id!r}: GET /jobs/{job_id} is something else", "job_id")
    return "/".join(["/jobs", _segment(job_id), *more])


def workflow_path(workflow_id: str, *more: str) -> str:
    return "/".join(["/workflows", _segment(workflow_id), *more])


def pool_path(pool_id: str) -> str:
    return f"/workers/pool/{_segment(pool_id)}"


def autoscale_path(pool_id: str) -> str:
    return f"/autoscale/{_segment(pool_id)}"


def schedule_path(schedule_id: str, *more: str) -> str:
    return "/".join(["/schedules", _segment(schedule_id), *more])


def lease_path(token: str, action: str) -> str:
    return f"/leases/{_segment(token)}/{action}"


def gpu_path(gpu_uuid: str, action: str) -> str:
    return f"/gpus/{_segment(gpu_uuid)}/{action}"


def policy_path(scope: str, name: str | None, *more: str) -> str:
    """`admission` has no names. Keys of caps may have slashes, which are as good as encoded ones."""
    folder = {"agent": "agents", "trigger": "triggers"}.get(scope, scope)
    return "/".join(["/policies", folder, *([] if name is None else [_segment(name)]), *more])


def _segment(name: str) -> str:
    # Dots alone would be taken for the way up before they are sent.
    return quote(encodable(name), safe="") if not is_dots(name) else "%2E" * len(name)
