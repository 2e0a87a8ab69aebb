"""What the cluster consists of beside workers: nodes, GPUs."""

from __future__ import annotations

from fastapi import APIRouter

from orchestrator.api.backend import Api
from orchestrator.api.replies import Json
from orchestrator.store import crews, gpus

router = APIRouter(tags=["cluster"])


@router.get("/nodes")
async def list_nodes(api: Api) -> Json:
    """Machines that were heard of, with what runs there; `drain_until` is null while a node takes jobs."""
    return Json({"nodes": await api.read(crews.list_nodes)})


@router.get("/gpus")
async def list_gpus(api: Api) -> Json:
    stale_s = api.settings.gpu_stale_s
    return Json({"gpus": await api.read(lambda conn: gpus.list_gpus(conn, stale_s))})


@router.post("/gpus/{gpu_uuid}/clear")
async def clear(api: Api, gpu_uuid: str) -> Json:
    """End a quarantine, after somebody looked why memory did not come back; `cleared` is false if there was none."""
    return Json({"cleared": await api.write(lambda conn: gpus.clear(conn, gpu_uuid))})
