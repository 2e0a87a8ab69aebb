"""What may go wrong: a table of faults, each with its number in the list of faults to inject.

A fault is a function (sites, rng, pause) → what it did. It injects, stays for a while by `pause`, and heals;
processes it ended are started again by their keeper. A slow disk is played by servers that freeze (SIGSTOP) and by
a read lock that stops every commit.
"""

from tests.chaos.faults import mariadb_server, processes, redis_server, wires
from tests.chaos.faults.table import TABLE, Fault

__all__ = ["FAULTS", "Fault", "mariadb_server", "processes", "redis_server", "wires"]

FAULTS: tuple[Fault, ...] = tuple(TABLE)
