"""Orchestrators, workers and their slots: killed, frozen, ended, and with the wrong time."""

import os
import signal
from contextlib import suppress
from random import Random

from tests.chaos.clock import COMPILER
from tests.chaos.faults.table import Pause, fault
from tests.chaos.sites import Site, Sites


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


def _children(site: Site) -> set[int]:
    try:
        return site.member.slots()
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
