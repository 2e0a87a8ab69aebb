"""/gpus"""

import json
from dataclasses import replace

from orchestrator.gpu import GpuProcess, Health
from orchestrator.store import gpus, schema
from tests.api.conftest import Running
from tests.factories import gpu, hire, rows


def quarantine(api: Running, uuid: str = "GPU-0") -> None:
    api.db.write(lambda conn: gpus.quarantine(conn, [uuid], "memory did not come back"))


def cleared(api: Running) -> list[list[str]]:
    found = [entry for entry in rows(api.db, schema.audit) if entry.event_type == "gpu.cleared"]
    return [json.loads(entry.details)["gpus"] for entry in found]


def test_a_quarantine_is_shown_and_ended(api: Running) -> None:
    hire(api.db, gpu(0), gpu(1))
    quarantine(api)
    first, second = api.get("/gpus").json()["gpus"]
    assert first["quarantined_at"] is not None and second["quarantined_at"] is None
    assert first["quarantine_reason"] == "memory did not come back"
    want = {"agent": "a", "min_memory_mb": 1000, "gpu_count": 2}
    assert api.post("/leases", want).json()["granted"] is False
    answer = api.post("/gpus/GPU-0/clear")
    assert (answer.status_code, answer.json()) == (200, {"cleared": True})
    assert cleared(api) == [["GPU-0"]]
    assert api.post("/leases", want).json()["granted"] is True


def test_clearing_again_changes_nothing(api: Running) -> None:
    hire(api.db, gpu(0))
    quarantine(api)
    assert [api.post("/gpus/GPU-0/clear").json()["cleared"] for _ in range(3)] == [True, False, False]
    assert cleared(api) == [["GPU-0"]]


def test_an_unknown_gpu_is_not_found(api: Running) -> None:
    hire(api.db, gpu(0))
    quarantine(api)
    for wrong in ("GPU-1", "gpu-0", "GPU-0%20", "0", "x" * 500, "%00", "🦊"):
        answer = api.post(f"/gpus/{wrong}/clear")
        assert (answer.status_code, answer.json()["code"]) == (404, "gpu_not_found"), wrong
    assert cleared(api) == []
    assert rows(api.db, schema.gpus)[0].quarantined_at is not None


def test_clearing_takes_a_post(api: Running) -> None:
    hire(api.db, gpu(0))
    quarantine(api)
    assert api.get("/gpus/GPU-0/clear").status_code == 405
    assert cleared(api) == []


def test_a_gpu_shows_whose_memory_is_in_use_and_why_it_is_closed(api: Running) -> None:
    strangers = (GpuProcess(7, 9500),)
    sick = gpu(0, 10_000, used_mb=9500, processes=strangers, health=Health.UNHEALTHY, health_reason="XID 63")
    hire(api.db, replace(sick, temperature_c=91))
    (shown,) = api.get("/gpus").json()["gpus"]
    assert (shown["used_mb"], shown["foreign_mb"], shown["leased_mb"], shown["usable_mb"]) == (9500, 9500, 0, 9000)
    assert (shown["health"], shown["health_reason"], shown["temperature_c"]) == ("unhealthy", "XID 63", 91)
    assert shown["gate_closed_at"] is not None and shown["fresh"] is True
