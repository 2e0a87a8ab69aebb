"""Redis: killed, emptied, frozen, full, and fed with entries that nobody of ours wrote."""

import shutil
from contextlib import suppress
from random import Random
from typing import Any

import redis

from tests.chaos.faults.table import Pause, fault, stop_server
from tests.chaos.sites import Sites

LANE, GROUP = "stream:orchestrator:inference_jobs", "cg:inference"


@fault("F-8", "redis", 2)
def kill_redis(sites: Sites, rng: Random, pause: Pause) -> str:
    sites.redis.kill()
    pause(rng.uniform(0.0, 1.5))
    sites.redis.start()
    return "and start it with its data"


@fault("F-9", "redis")
def lose_redis(sites: Sites, rng: Random, pause: Pause) -> str:
    sites.redis.kill()
    shutil.rmtree(sites.redis.directory / "appendonlydir")
    sites.redis.start()
    return "and start it empty"


@fault("F-10", "redis", 2)
def flush_redis(sites: Sites, rng: Random, pause: Pause) -> str:
    sites.redis.flush()
    return "FLUSHALL"


@fault("F-11", "redis")
def delete_stream(sites: Sites, rng: Random, pause: Pause) -> str:
    with sites.redis.client() as client:
        return f"{client.delete(LANE)} stream"


@fault("F-12", "redis")
def destroy_group(sites: Sites, rng: Random, pause: Pause) -> str:
    with sites.redis.client() as client, suppress(redis.ResponseError):
        client.xgroup_destroy(LANE, GROUP)
    return GROUP


@fault("F-13", "redis")
def delete_consumers(sites: Sites, rng: Random, pause: Pause) -> str:
    """With whatever is pending for them."""
    lost = 0
    with sites.redis.client() as client, suppress(redis.ResponseError):
        for consumer in client.xinfo_consumers(LANE, GROUP):
            lost += client.xgroup_delconsumer(LANE, GROUP, consumer["name"])
    return f"with {lost} pending entries"


@fault("F-14", "redis")
def trim_stream(sites: Sites, rng: Random, pause: Pause) -> str:
    with sites.redis.client() as client:
        return f"{client.xtrim(LANE, maxlen=0, approximate=False)} entries"


@fault("F-17", "redis")
def pause_redis(sites: Sites, rng: Random, pause: Pause) -> str:
    seconds = rng.uniform(0.5, 4.0)
    with sites.redis.client() as client:
        client.client_pause(round(seconds * 1000))
    pause(seconds)
    return f"{seconds:.1f} s"


@fault("F-17", "redis")
def stop_redis(sites: Sites, rng: Random, pause: Pause) -> str:
    return stop_server(sites.redis.pid, rng.uniform(0.5, 4.0), pause)


@fault("F-20", "redis")
def flush_scripts(sites: Sites, rng: Random, pause: Pause) -> str:
    with sites.redis.client() as client:
        client.script_flush()
    return "SCRIPT FLUSH"


@fault("F-16", "redis")
def no_memory(sites: Sites, rng: Random, pause: Pause) -> str:
    """Every write is refused for a while: OOM command not allowed."""
    with sites.redis.client() as client:
        client.config_set("maxmemory", "1")
        try:
            pause(rng.uniform(0.5, 2.0))
        finally:
            client.config_set("maxmemory", "0")
    return "maxmemory 1"


@fault("BI-20", "redis", 2)
def garbage_entries(sites: Sites, rng: Random, pause: Pause) -> str:
    garbage: list[dict[Any, Any]] = [
        {"hello": "world"},
        {"job_id": ""},
        {"job_id": "x" * 100_000},
        {"job_id": b"\xff\xfe\x00"},
        {"job_id": "../../etc/passwd"},
        {"job_id": f"forged-{rng.randrange(10**9)}", "type": "chaos.work", "payload": "{}"},
    ]
    with sites.redis.client() as client:
        for fields in rng.sample(garbage, 3):
            client.xadd(LANE, fields)
    return "3 entries"


@fault("BI-20", "redis", 3)
def duplicate_entries(sites: Sites, rng: Random, pause: Pause) -> str:
    """Second entries for jobs in every state: waiting, owned, ended."""
    jobs = sites.query("SELECT job_id FROM orchestrator_jobs ORDER BY created_at DESC LIMIT 500")
    chosen = rng.sample(jobs, min(len(jobs), 30))
    with sites.redis.client() as client:
        for (job_id,) in chosen:
            client.xadd(LANE, {"job_id": job_id, "type": "chaos.work"})
    return f"{len(chosen)} entries"


@fault("BI-20", "redis", 0.5)
def future_entry(sites: Sites, rng: Random, pause: Pause) -> str:
    """An entry from an hour ahead: later ones get ids beyond it."""
    with sites.redis.client() as client:
        seconds, _ = client.time()
        with suppress(redis.ResponseError):  # it is not the first
            client.xadd(LANE, {"job_id": "forged-future"}, id=f"{(seconds + 3600) * 1000}-0")
    return "one hour ahead"


@fault("BI-20", "redis", 0.5)
def last_entry(sites: Sites, rng: Random, pause: Pause) -> str:
    """An entry with the last possible id: no other can follow it."""
    with sites.redis.client() as client:
        client.xadd(LANE, {"job_id": "forged-last"}, id=f"{2**64 - 1}-{2**64 - 1}")
    return "the stream is full"


@fault("BI-20", "redis", 0.5)
def wrong_type(sites: Sites, rng: Random, pause: Pause) -> str:
    with sites.redis.client() as client:
        client.set(LANE, "no stream")
    return "a string stands where the stream was"
