"""What all posts of a supervisor share: the node's servers, its GPUs, one heartbeat, one bell."""

from __future__ import annotations

import logging
from collections.abc import Callable

from orchestrator.gpu import backends
from orchestrator.gpu.watch import Watch
from orchestrator.identity import node_id
from orchestrator.publisher import Publisher
from orchestrator.settings import Settings
from orchestrator.store.database import Database
from orchestrator.store.inventory import Findings
from orchestrator.store.policies import Copy
from orchestrator.stream.hub import Hub
from orchestrator.telemetry import tracing
from worker.acknowledger import Acknowledger
from worker.doorbell import Listener
from worker.keepalive import Keepalive
from worker.nursery import Nursery
from worker.starts import Starts
from worker.strays import end_processes

log = logging.getLogger(__name__)


class Node:
    """`rang` is called when somebody rang the bell, `give_up` when no slot here will ever come up."""

    def __init__(
        self, settings: Settings, rang: Callable[[], None], give_up: Callable[[str], None] = lambda _why: None
    ) -> None:
        self.settings = settings
        self.give_up = give_up
        #: Whether any slot ever found all of its handlers.
        self.handlers_load = False
        self.node_id = node_id(settings)
        self.db = Database(settings)
        self.hub = Hub(settings)
        self.policies = Copy()
        self.publisher = Publisher(self.db, self.hub, settings, self.policies)
        self.acknowledger = Acknowledger()
        self.starts = Starts()
        self.nursery = Nursery(tracing.PRELOADED if settings.otlp_endpoint else ())
        self._stop_tracing: Callable[[], None] = lambda: None
        backend = backends.choose(settings.gpu_backend, self.node_id, settings.data_dir)
        self.gpus = Watch(backend, min(settings.gpu_sample_s, settings.worker_heartbeat_s))
        #: For signs of life, of all workers and of their supervisor: however many posts write at once, these wait for
        #: no connection of theirs, and for none that died in silence.
        self.heart = Database(
            settings.model_copy(update={"db_pool_size": 2}),
            again_when_late=False,
            silence_s=settings.heartbeat_limit_s,
        )
        self.keepalive = Keepalive(self.heart, self.node_id, self.gpus, settings, self._found)
        self._rang = rang
        self._bell = Listener(self.hub.doorbell(), settings, self._hear)

    def start(self) -> None:
        self._stop_tracing = tracing.start(self.settings, "gpuorch-worker")
        self.nursery.start()
        self.publisher.start()
        self.keepalive.start()
        self._bell.start()

    def close(self) -> None:
        """After the last post is left."""
        self.nursery.close()
        self._bell.close()
        self.keepalive.close()
        self.publisher.close()
        self.acknowledger.close(self.settings.redis_timeout_s)
        self.gpus.close()
        self.hub.close()
        self.heart.close()
        self.db.close()
        self._stop_tracing()

    def _hear(self) -> None:
        self.policies.expire()
        self.keepalive.poke()
        self._rang()

    def _found(self, findings: Findings) -> None:
        end_processes(findings.orphans)
        for uuid in findings.quarantined:
            log.error(
                "GPU quarantined, its memory did not come back", extra={"gpu_uuid": uuid, "runbook": "gpu-quarantine"}
            )
