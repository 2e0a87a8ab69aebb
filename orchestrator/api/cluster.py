"""What the cluster consists of beside workers: GPUs, the leader."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter

from orchestrator.api.backend import Api
from orchestrator.api.replies import Json
from orchestrator.store import gpus, leadership

router = APIRouter(tags=["cluster"])


@router.get("/gpus")
async def list_gpus(api: Api) -> Json:
    stale_s = api.settings.gpu_stale_s
    return Json({"gpus": await api.read(lambda conn: gpus.list_gpus(conn, stale_s))})


@router.post("/gpus/{gpu_uuid}/clear")
async def clear(api: Api, gpu_uuid: str) -> Json:
    """End a quarantine, after somebody looked why memory did not come back; `cleared` is false if there was none."""
    return Json({"cleared": await api.write(lambda conn: gpus.clear(conn, gpu_uuid))})


@router.get("/control/leader")
async def leader(api: Api) -> Json:
    """Who leads, by the database's word; `self` is the instance that answers."""
    term = await api.read(lambda conn: leadership.current(conn, api.settings.leader_lock))
    return Json(asdict(term) | {"self": api.orchestrator.holder})
