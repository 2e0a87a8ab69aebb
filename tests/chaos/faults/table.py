"""What a fault is, and the table into which each one enters itself."""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tests.chaos.sites import Sites

Pause = Callable[[float], None]
Inject = Callable[[Sites, Random, Pause], str]


@dataclass(frozen=True)
class Fault:
    """`on` is what it happens to: two faults on the same thing come one after the other, others may coincide."""

    name: str
    number: str
    on: str
    weight: float
    inject: Inject


TABLE: list[Fault] = []


def fault(number: str, on: str, weight: float = 1.0) -> Callable[[Inject], Inject]:
    def register(inject: Inject) -> Inject:
        TABLE.append(Fault(inject.__name__, number, on, weight, inject))
        return inject

    return register


def stop_server(pid: int, seconds: float, pause: Pause) -> str:
    os.kill(pid, signal.SIGSTOP)
    try:
        pause(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)
    return f"{seconds:.1f} s"
