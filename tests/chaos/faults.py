"""What may go wrong: a table of faults, each with its number in the list of faults to inject.

A fault is a function (sites, rng, pause) → what it did. It injects, stays for a while by `pause`, and heals;
processes it ended are started again by their keeper. A slow disk is played by servers that freeze (SIGSTOP) and by
a read lock that stops every commit.
"""

import os
import shutil
import signal
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from random import Random
from typing import Any

import pymysql
import redis as redis_client

from tests.chaos.clock import COMPILER
from tests.chaos.sites import Site, Sites

Pause = Callable[[float], None]
Inject = Callable[[Sites, Random, Pause], str]

LANE, GROUP, DLQ = "stream:orchestrator:inference_jobs", "cg:inference", "stream:orchestrator:dlq"
_TABLE: list["Fault"] = []


@dataclass(frozen=True)
class Fault:
    """`on` is what it happens to: two faults on the same thing come one after the other, others may coincide."""

    name: str
    number: str
    on: str
    weight: float
    inject: Inject


def fault(number: str, on: str, weight: float = 1.0) -> Callable[[Inject], Inject]:
    def register(inject: Inject) -> Inject:
        _TABLE.append(Fault(inject.__name__, number, on, weight, inject))
        return inject

    return register


# ── processes ───────────────────────────────────────────────────────────────────────────────────────────────────


@fault("F-1", "workers", 3)
def kill_worker(sites: Sites, rng: Random, pause: Pause) -> str:
    site = rng.choice(sites.workers)
    site.send(signal.SIGKILL)
    return site.name


@fault("F-6", "workers", 3)
def kill_slots(sites: Sites, rng: Random, pause: Pause) -> str:
    site = rng.choice(sites.workers)
    victims = sorted(_children(site))
    chosen = rng.sample(victims, min(len(victims), rng.randint(1, 3)))
    for pid in chosen:
        _kill_child(site, pid)
    return f"{site.name}: {chosen}"


@fault("F-4", "workers", 3)
def stop_worker(sites: Sites, rng: Random, pause: Pause) -> str:
    """Frozen for longer than its timeout: it is declared lost and wakes up without knowing."""
    return _freeze(rng.choice(sites.workers), rng.uniform(1.1, 2.0), pause)


@fault("F-4", "workers")
def stop_worker_for_a_moment(sites: Sites, rng: Random, pause: Pause) -> str:
    return _freeze(rng.choice(sites.workers), rng.uniform(0.1, 0.9), pause)


@fault("F-5", "workers", 2)
def end_worker(sites: Sites, rng: Random, pause: Pause) -> str:
    """SIGTERM, perhaps twice, perhaps with SIGKILL before it is through."""
    site = rng.choice(sites.workers)
    site.send(signal.SIGTERM)
    then = rng.choice((None, signal.SIGTERM, signal.SIGKILL))
    if then is not None:
        pause(rng.uniform(0.0, 1.5))
        site.send(then)
    return f"{site.name}: SIGTERM, then {then.name if then else 'nothing'}"


@fault("F-2", "orchestrators", 2)
def kill_leader(sites: Sites, rng: Random, pause: Pause) -> str:
    site = sites.leader() or rng.choice(sites.orchestrators)
    site.send(signal.SIGKILL)
    return site.name


@fault("F-3", "orchestrators", 2)
def kill_orchestrator(sites: Sites, rng: Random, pause: Pause) -> str:
    site = rng.choice(sites.orchestrators)
    site.send(signal.SIGKILL)
    return site.name


@fault("F-4", "orchestrators", 2)
def stop_leader(sites: Sites, rng: Random, pause: Pause) -> str:
    """Frozen for longer than its term: it wakes up as a leader of the past."""
    site = sites.leader() or rng.choice(sites.orchestrators)
    return _freeze(site, rng.uniform(1.1, 1.6), pause, of=site.settings.leader_ttl_s)


@fault("F-53", "orchestrators")
def end_orchestrator(sites: Sites, rng: Random, pause: Pause) -> str:
    site = rng.choice(sites.orchestrators)
    site.send(signal.SIGTERM)
    return site.name


def step_clock(sites: Sites, rng: Random, pause: Pause) -> str:
    """The wall clock of a running process jumps by an hour, and back after a while."""
    site, error_s, seconds = rng.choice(sites.all), rng.choice((3600, -3600)), rng.uniform(1.0, 5.0)
    site.clock.put_wrong(error_s)
    pause(seconds)
    site.clock.put_wrong(0)
    return f"{site.name}: {error_s:+d} s for {seconds:.1f} s"


if COMPILER:
    fault("F-37", "clocks", 2)(step_clock)


# ── Redis ───────────────────────────────────────────────────────────────────────────────────────────────────────


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
    with sites.redis.client() as client, suppress(redis_client.ResponseError):
        client.xgroup_destroy(LANE, GROUP)
    return GROUP


@fault("F-13", "redis")
def delete_consumers(sites: Sites, rng: Random, pause: Pause) -> str:
    """With whatever is pending for them."""
    lost = 0
    with sites.redis.client() as client, suppress(redis_client.ResponseError):
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
    return _stop_server(sites.redis.pid, rng.uniform(0.5, 4.0), pause)


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
        with suppress(redis_client.ResponseError):  # it is not the first
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


# ── MariaDB ─────────────────────────────────────────────────────────────────────────────────────────────────────


@fault("F-22", "mariadb", 2)
def kill_mariadb(sites: Sites, rng: Random, pause: Pause) -> str:
    sites.mariadb.kill()
    pause(rng.uniform(0.0, 1.5))
    sites.mariadb.start()
    return "and start it with its data"


@fault("F-30", "mariadb")
def stop_mariadb(sites: Sites, rng: Random, pause: Pause) -> str:
    return _stop_server(sites.mariadb.pid, rng.uniform(0.5, 4.0), pause)


@fault("F-23", "mariadb", 3)
def kill_connections(sites: Sites, rng: Random, pause: Pause) -> str:
    share, killed = rng.choice((0.2, 0.5, 1.0)), 0
    with closing(sites.mariadb.connect()) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT id FROM information_schema.processlist WHERE db = 'orchestrator'")
        for (number,) in cursor.fetchall():
            if rng.random() < share:
                with suppress(pymysql.MySQLError):  # it ended meanwhile
                    cursor.execute(f"KILL {number}")
                    killed += 1
    return f"{killed} connections"


@fault("F-32", "mariadb", 3)
def lock_rows(sites: Sites, rng: Random, pause: Pause) -> str:
    """A foreign transaction holds rows, perhaps for longer than anybody waits for a lock."""
    what = rng.choice(
        (
            "orchestrator_jobs WHERE queued IS NOT NULL LIMIT 50",
            "orchestrator_jobs WHERE status IN ('claimed', 'running') LIMIT 50",
            "workers WHERE status = 'active' LIMIT 1",
            "gpus LIMIT 2",
            "leadership",
            "orchestrator_leases LIMIT 20",
        )
    )
    seconds = rng.uniform(0.5, 7.0)
    with closing(sites.mariadb.connect()) as connection, connection.cursor() as cursor:
        connection.select_db("orchestrator")
        connection.begin()
        cursor.execute(f"SELECT * FROM {what} FOR UPDATE")
        pause(seconds)
        connection.rollback()
    return f"{what} for {seconds:.1f} s"


@fault("F-30", "mariadb")
def read_lock(sites: Sites, rng: Random, pause: Pause) -> str:
    """No commit gets through: a disk that does not answer."""
    seconds = rng.uniform(0.5, 4.0)
    with closing(sites.mariadb.connect()) as connection, connection.cursor() as cursor:
        cursor.execute("SET SESSION lock_wait_timeout = 3")  # not while a long transaction runs
        cursor.execute("FLUSH TABLES WITH READ LOCK")
        pause(seconds)
        cursor.execute("UNLOCK TABLES")
    return f"{seconds:.1f} s"


@fault("F-27", "mariadb")
def too_many_connections(sites: Sites, rng: Random, pause: Pause) -> str:
    with closing(sites.mariadb.connect()) as connection, connection.cursor() as cursor:
        cursor.execute("SET GLOBAL max_connections = 10")
        try:
            pause(rng.uniform(0.5, 3.0))
        finally:
            cursor.execute("SET GLOBAL max_connections = 300")
    return "max_connections 10"


# ── wires ───────────────────────────────────────────────────────────────────────────────────────────────────────


@fault("F-35", "wires", 2)
def partition(sites: Sites, rng: Random, pause: Pause) -> str:
    """One process cannot reach one of its servers; the others can."""
    site, server, seconds = rng.choice(sites.all), rng.choice(("mariadb", "redis")), rng.uniform(0.5, 6.0)
    wire = site.wires[server]
    how = rng.choice((wire.refuse, wire.stall, wire.swallow_replies))
    how()
    pause(seconds)
    wire.heal()
    return f"{site.name} and {server}: {how.__name__} for {seconds:.1f} s"


@fault("F-18", "wires")
def cut_everywhere(sites: Sites, rng: Random, pause: Pause) -> str:
    """Every connection to one server ends, or hangs for a while."""
    server, seconds = rng.choice(("mariadb", "redis")), rng.uniform(0.5, 4.0)
    wires = [site.wires[server] for site in sites.all]
    half_open = rng.random() < 0.5
    for wire in wires:
        wire.stall() if half_open else wire.cut()
    if half_open:
        pause(seconds)
        for wire in wires:
            wire.heal()
    return f"{server}: " + (f"half-open for {seconds:.1f} s" if half_open else "cut")


@fault("F-25", "wires", 4)
def lose_replies(sites: Sites, rng: Random, pause: Pause) -> str:
    """The next answer on each wire gets lost: of a commit, an XADD, an XREADGROUP, whatever comes."""
    server, told = rng.choice(("mariadb", "mariadb", "redis")), []
    for site in rng.sample(sites.all, 3):
        site.wires[server].lose_reply()
        told.append(site.name)
    pause(rng.uniform(0.2, 1.0))
    for site in sites.all:
        site.wires[server].heal()
    return f"{server} → {', '.join(told)}"


@fault("F-36", "wires")
def slow_wires(sites: Sites, rng: Random, pause: Pause) -> str:
    server, delay, seconds = rng.choice(("mariadb", "redis")), rng.uniform(0.02, 0.5), rng.uniform(1.0, 4.0)
    wires = [site.wires[server] for site in sites.all]
    for wire in wires:
        wire.slow(delay)
    pause(seconds)
    for wire in wires:
        wire.heal()
    return f"{server}: {delay * 1000:.0f} ms for {seconds:.1f} s"


FAULTS: tuple[Fault, ...] = tuple(_TABLE)


# ── shared ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _freeze(site: Site, share: float, pause: Pause, of: float | None = None) -> str:
    """Stop a process for a share of the time after which it counts as dead."""
    seconds = share * (of or site.settings.worker_timeout_s)
    member = site.member
    try:
        site.send(signal.SIGSTOP)
        pause(seconds)
    finally:
        with suppress(ProcessLookupError):
            member.send(signal.SIGCONT)
    return f"{site.name} for {seconds:.1f} s"


def _stop_server(pid: int, seconds: float, pause: Pause) -> str:
    os.kill(pid, signal.SIGSTOP)
    try:
        pause(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)
    return f"{seconds:.1f} s"


def _children(site: Site) -> set[int]:
    try:
        return site.member.children()
    except OSError:
        return set()  # it ended just now


def _kill_child(site: Site, pid: int) -> None:
    """By a handle that stays the same process's even when its number is used again."""
    with suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            if pid in _children(site):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)
