"""One thing of Kubernetes: how many replicas a Deployment has, and how many it should have.

The leader asks before it tells, so that a pool which is as it should be costs one GET now and then. Whoever else scales
the same Deployment (an autoscaler, a person) is overruled at the next look: a pool has one owner.
"""

from __future__ import annotations

import http.client
import json
import re
import ssl
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


class Kubernetes:
    """Raises KubernetesUnavailable when the API does not answer, or refuses."""

    def __init__(self, settings: Settings) -> None:
        self._url = urlsplit(settings.kubernetes_url)
        self._token_file = settings.kubernetes_token_file
        self._ca_file = settings.kubernetes_ca_file

    def scale(self, deployment: Deployment, replicas: int) -> bool:
        """Have so many replicas; whether that was a change."""
        now = self._ask("GET", deployment.path)["spec"].get("replicas", 0)
        if now == replicas:
            return False
        self._ask("PATCH", deployment.path, {"spec": {"replicas": replicas}})
        return True

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        connection = self._connect()
        try:
            connection.request(method, path, json.dumps(body) if body else None, self._headers())
            answer = connection.getresponse()
            text = answer.read(MAX_ANSWER)
            if answer.status >= 300:
                raise KubernetesUnavailable(f"{method} {path}: {answer.status} {answer.reason}: {_message(text)}")
            found: dict[str, Any] = json.loads(text)
            return found
        except (OSError, http.client.HTTPException, ValueError) as broken:
            raise KubernetesUnavailable(f"{method} {path}: {broken!r}"[:500]) from broken
        finally:
            connection.close()

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


def _message(text: bytes) -> str:
    try:
        return str(json.loads(text)["message"])[:200]
    except (ValueError, KeyError, TypeError):
        return text[:200].decode(errors="replace")
