"""What the dead-letter stream is told about a job that was given up, or an entry that names none."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeadLetter:
    job_id: str
    origin_id: str
    attempts: int
    last_error: str
    reason: str
