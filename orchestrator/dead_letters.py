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


def about_entry(entry_id: str, job_id: str | None) -> DeadLetter:
    """Of an entry that names nothing that could be a job, or one that nobody has heard of."""
    reason = "unknown_job" if job_id else "malformed"
    return DeadLetter(job_id or "", entry_id, 0, f"entry {entry_id} names no known job", reason)
