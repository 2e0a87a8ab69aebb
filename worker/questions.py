"""What handlers ask of which only the database knows: whose a job is, tasks to be kept, results of what it needed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from orchestrator.errors import InvalidInput
from orchestrator.settings import Settings
from orchestrator.store import inputs, ownership, spawning
from orchestrator.store.claim import Claim
from orchestrator.store.database import Database
from orchestrator.store.spawning import Parent
from orchestrator.telemetry.life import about
from orchestrator.workflows import Limits

log = logging.getLogger(__name__)

Answer = tuple[dict[str, Any], str]


class Questions:
    def __init__(self, db: Database, settings: Settings, worker_id: str, lane: str) -> None:
        self._db = db
        self._limits = Limits.of(settings)
        self._worker_id = worker_id
        self._lane = lane
        self._kinds: dict[str, Callable[[Claim, dict[str, Any], str], Answer]] = {
            "owns": self._owns,
            "stage": self._stage,
            "inputs": self._inputs,
        }

    def answer(self, claim: Claim, head: dict[str, Any], body: str) -> Answer:
        """Never raises: the handler waits for an answer. Without one from the database nobody owns anything."""
        question = {"question": head["question"]}
        try:
            found, text = self._kinds[head["asks"]](claim, head, body)
        except InvalidInput as wrong:
            return question | {"refused": wrong.message}, ""
        except Exception as error:  # noqa: BLE001 - whatever it was
            log.warning("no answer", extra={"asked": head.get("asks"), "error": str(error)} | about(claim))
            return question | {"failed": f"{type(error).__name__}: {error}"[:500]}, ""
        return question | found, text

    def _owns(self, claim: Claim, _head: dict[str, Any], _body: str) -> Answer:
        owns = self._db.read(lambda conn: ownership.owns(conn, claim.job_id, claim.attempt, self._worker_id))
        return {"owns": owns}, ""

    def _stage(self, claim: Claim, head: dict[str, Any], body: str) -> Answer:
        parent = Parent(claim.workflow_id or "flow", claim.agent, self._lane)
        spawning.check(body, parent, self._limits)
        self._db.write(lambda conn: spawning.stage(conn, claim.job_id, claim.attempt, int(head["seq"]), body))
        return {}, ""

    def _inputs(self, claim: Claim, head: dict[str, Any], _body: str) -> Answer:
        page = self._db.read(lambda conn: inputs.page(conn, claim.job_id, int(head["after"]), head["name"]))
        told = [[one.position, one.job_id, one.name, one.status] for one in page.inputs]
        texts = ",".join(one.result if one.result is not None else "null" for one in page.inputs)
        return {"inputs": told, "more": page.more}, f"[{texts}]"
