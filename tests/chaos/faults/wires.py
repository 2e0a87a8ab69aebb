"""The connections between processes and servers: cut, half-open, slow, and with answers that get lost."""

from random import Random

from tests.chaos.faults.table import Pause, fault
from tests.chaos.sites import Sites


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
