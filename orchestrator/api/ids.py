"""Ids in paths. A name that nobody can have is looked up by nobody: MariaDB, for one, would ignore trailing spaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from pydantic import AfterValidator

from orchestrator.errors import JobNotFound, LaneNotFound, NotFound, PoolNotFound, ScheduleNotFound, WorkflowNotFound
from orchestrator.names import MAX_NAME, is_name


def _known_as(missing: Callable[[str], NotFound]) -> AfterValidator:
    def check(name: str) -> str:
        if not is_name(name):
            raise missing(name[:MAX_NAME])
        return name

    return AfterValidator(check)


JobId = Annotated[str, _known_as(JobNotFound)]
LaneName = Annotated[str, _known_as(LaneNotFound)]
PoolId = Annotated[str, _known_as(PoolNotFound)]
ScheduleId = Annotated[str, _known_as(ScheduleNotFound)]
WorkflowId = Annotated[str, _known_as(WorkflowNotFound)]
