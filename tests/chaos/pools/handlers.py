"""Models of pools: each holds simulated GPU memory from its load to its process's end, and says what it did.

Jobs are written to the ledger that their payload names, as those of every chaos run. Processes that came up and models
that were loaded stand in a file of their own, which the environment names. Dozens of slots import this: it imports
little itself.
"""

import json
import os
import secrets
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.gpu import simulated
from orchestrator.gpu.processes import MARK
from tests.chaos.handlers import note, type_name
from worker import Context, handler

#: Job types: a model that leaves for others, and one that stays.
MODEL, PINNED = "pools.model", "pools.pinned"
#: Names the file that processes write themselves into.
PROCESSES = "CHAOS_PROCESSES"
#: What a model really takes of the memory that its lease allows.
USED_MB = 500
LOAD_S = 0.1


class Process(NamedTuple):
    """What a slot's process says: it is `up`, or its model is `loaded`."""

    event: str
    pid: int
    mono: float
    mark: str
    model: str = ""


def _tell(event: str, model: str = "") -> None:
    line = Process(event, os.getpid(), time.monotonic(), os.environ.get(MARK, ""), model)
    with Path(os.environ[PROCESSES]).open("a") as file:
        file.write(json.dumps(line) + "\n")


def read(path: Path) -> list[Process]:
    return [Process(*json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


class Model:
    def load(self, ctx: Context) -> None:
        self._memory = ExitStack()
        if ctx.device:
            self._memory.enter_context(simulated.allocated(ctx.device, USED_MB))
        time.sleep(LOAD_S)
        _tell("loaded", f"{ctx.type} {ctx.model_id} {ctx.adapter} {ctx.variant}")

    def run(self, ctx: Context, payload: dict[str, Any]) -> dict[str, Any]:
        note(ctx, payload, "start")
        try:
            _sleep(float(payload["seconds"]))
        except BaseException as error:
            note(ctx, payload, "raised", type_name(error))
            raise
        nonce = secrets.token_hex(6)
        note(ctx, payload, "done", nonce)
        return {"attempt": ctx.attempt, "nonce": nonce}

    def unload(self) -> None:
        self._memory.close()


def _sleep(seconds: float) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(left, 0.1))


@handler(MODEL, min_memory_mb=1000)
class Plain(Model):
    """Leaves when others need its room."""


@handler(PINNED, min_memory_mb=1000, pinned=True)
class Pinned(Model):
    """Leaves for nobody."""


if PROCESSES in os.environ:  # imported by a slot: it is up
    _tell("up")
