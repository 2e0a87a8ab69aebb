"""Looks at what must hold at every moment, while the run goes on."""

from typing import Any, Protocol

import pymysql

from tests.chaos.history import Recorder

#: One statement, so one snapshot: the account of each GPU beside the leases it stands for.
_GPUS = """
SELECT g.gpu_uuid, g.usable_mb, g.leased_mb, COALESCE(SUM(IF(l.state = 'active', s.memory_mb, 0)), 0)
FROM gpus g LEFT JOIN lease_gpus s ON s.gpu_uuid = g.gpu_uuid LEFT JOIN orchestrator_leases l ON l.token = s.token
GROUP BY g.gpu_uuid, g.usable_mb, g.leased_mb
"""
#: An attempt that ended well freed its lease in the same transaction; that of a lost worker lives until it expires.
_LEFT_OVER = """
SELECT j.job_id, j.attempt FROM orchestrator_leases l JOIN orchestrator_jobs j ON j.job_id = l.job_id
WHERE l.state = 'active' AND j.status = 'done' AND l.token = CONCAT('job:', j.job_id, ':', j.attempt)
"""


class Queried(Protocol):
    def query(self, statement: str) -> list[tuple[Any, ...]]: ...


class Watcher:
    """`looks` counts the moments that were seen."""

    def __init__(self, sites: Queried, recorder: Recorder) -> None:
        self._sites = sites
        self._recorder = recorder
        self._epoch = 0
        self.looks = 0
        self.most_leased_mb = 0

    def look(self) -> None:
        try:
            gpus = self._sites.query(_GPUS)
            left_over = self._sites.query(_LEFT_OVER)
            epochs = self._sites.query("SELECT epoch FROM leadership")
        except pymysql.MySQLError:
            return  # it is away, as faults want it
        self.looks += 1
        for uuid, usable, leased, shares in gpus:
            self.most_leased_mb = max(self.most_leased_mb, int(leased))
            if leased > usable:
                self._recorder.incident("INV-12", None, f"{uuid}: {leased} MB leased of {usable} usable")
            if leased != shares:
                self._recorder.incident("INV-12", None, f"{uuid}: {leased} MB leased, the leases say {shares}")
        for job_id, attempt in left_over:
            self._recorder.incident("INV-17", job_id, f"attempt {attempt} is done, and its lease is active")
        for (epoch,) in epochs:
            if epoch < self._epoch:
                self._recorder.incident("INV-18", None, f"the epoch went from {self._epoch} to {epoch}")
            self._epoch = epoch
