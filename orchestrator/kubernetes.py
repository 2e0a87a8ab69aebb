"""Two things of Kubernetes: how many replicas a Deployment should have, and how dear a pod is.

The leader asks before it tells, so that a pool which is as it should be costs one GET now and then. Whoever else scales
the same Deployment (an autoscaler, a person) is overruled at the next look: a pool has one owner.

A worker's pod says what it would cost to delete it, so that whoever scales down begins with those that are idle.
"""

from __future__ import annotations

import http.client
import json
import re
import ssl
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from orchestrator.errors import InvalidInput, KubernetesUnavailable
from orchestrator.settings import Settings

#: What Kubernetes allows as a name; nothing else may become part of a path.
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
#: Seconds for each answer; the leader's other duties wait meanwhile.
TIMEOUT_S = 5.0
#: Bytes of an answer that are read.
MAX_ANSWER = 1 << 20
#: "Too many requests": of the API as a whole, as 5xx are, not of one Deployment.
BUSY = 429


@dataclass(frozen=True)
class Deployment:
    namespace: str
    name: str

    @classmethod
    def of(cls, metadata: dict[str, Any] | None, namespace: str) -> Deployment:
        """The one that a pool's metadata names. Raises InvalidInput."""
        given = metadata or {}
        named = [str(given.get("namespace") or namespace), str(given.get("deployment") or "")]
        for field, value in zip(("namespace", "deployment"), named, strict=True):
            if not _NAME.fullmatch(value):
                raise InvalidInput(f"metadata.{field}: {value[:80]!r} is no name of Kubernetes", f"metadata.{field}")
        return cls(*named)

    @property
    def path(self) -> str:
        return f"/apis/apps/v1/namespaces/{self.namespace}/deployments/{self.name}/scale"


#: Pods of a ReplicaSet with the lowest cost are deleted first; one without has 0.
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"


@dataclass(frozen=True)
class Pod:
    namespace: str
    name: str

    @property
    def path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods/{self.name}"


class Kubernetes:
    """Raises KubernetesUnavailable when the API does not answer, refuses, or says what nobody understands."""

    def __init__(self, settings: Settings) -> None:
        self._url = urlsplit(settings.kubernetes_url)
        self._token_file = settings.kubernetes_token_file
        self._ca_file = settings.kubernetes_ca_file

    def scale(self, deployment: Deployment, replicas: int) -> bool:
        """Have so many replicas; whether that was a change."""
        said = self._ask("GET", deployment.path)
        now = _replicas(_read(said))
        if now is None:
            raise KubernetesUnavailable(f"GET {deployment.path}: no Scale came: {said[:100]!r}", answered=True)
        if now == replicas:
            return False
        self._ask("PATCH", deployment.path, {"spec": {"replicas": replicas}})
        return True

    def price(self, pod: Pod, cost: int) -> None:
        """Say what it costs to delete a pod."""
        self._ask("PATCH", pod.path, {"metadata": {"annotations": {DELETION_COST: str(cost)}}})

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        try:
            # Connecting reads the certificates, which may be as broken as anything else here.
            with closing(self._connect()) as connection:
                connection.request(method, path, json.dumps(body) if body else None, self._headers())
                answer = connection.getresponse()
                text = answer.read(MAX_ANSWER)
        except (OSError, http.client.HTTPException, ValueError) as broken:
            raise KubernetesUnavailable(f"{method} {path}: {broken!r}"[:500]) from broken
        if answer.status >= 300:
            message = f"{method} {path}: {answer.status} {answer.reason}: {_message(text)}"
            raise KubernetesUnavailable(message, answered=answer.status < 500 and answer.status != BUSY)
        return text

    def _connect(self) -> http.client.HTTPConnection:
        host, port = self._url.hostname or "", self._url.port
        if self._url.scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
        trusted = str(self._ca_file) if self._ca_file.exists() else None
        context = ssl.create_default_context(cafile=trusted)
        return http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=context)

    def _headers(self) -> dict[str, str]:
        """The token is read each time: Kubernetes replaces it every hour."""
        headers = {"Accept": "application/json", "Content-Type": "application/merge-patch+json"}
        if self._token_file.exists():
            headers["Authorization"] = f"Bearer {Path(self._token_file).read_text().strip()}"
        return headers


def _replicas(scale: Any) -> int | None:
    """Of a Scale; one that names no number has none. None for what is no Scale."""
    spec = scale.get("spec") if isinstance(scale, dict) else None
    replicas = spec.get("replicas", 0) if isinstance(spec, dict) else None
    return replicas if isinstance(replicas, int) else None


def _read(text: bytes) -> Any:
    """None for what is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _message(text: bytes) -> str:
    """What a refusal says, without what no database would store."""
    said = _read(text)
    message = str(said["message"]) if isinstance(said, dict) and "message" in said else text.decode(errors="replace")
    return message[:200].encode(errors="replace").decode()
