"""The manifests of deploy/keda, as documents."""

from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "deploy" / "keda"
#: Published schemas, no part of the project: they are read from beside it, where they may be absent.
SCHEMAS = Path(__file__).parents[3] / "shared" / "data"
VARIANTS = ("metrics-api", "external-push", "prometheus", "redis-streams")


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def every() -> list[tuple[str, dict[str, Any]]]:
    return [(path.name, document) for path in sorted(FOLDER.glob("*.yaml")) for document in documents(path)]


def one(kind: str, name: str) -> dict[str, Any]:
    """The only document of this kind in a file."""
    (found,) = [document for document in documents(FOLDER / name) if document["kind"] == kind]
    return found


def scaled_object(variant: str) -> dict[str, Any]:
    return one("ScaledObject", f"scaledobject-{variant}.yaml")


def worker_pod() -> dict[str, Any]:
    spec: dict[str, Any] = one("Deployment", "workers.yaml")["spec"]["template"]["spec"]
    return spec


def environment(container: dict[str, Any]) -> dict[str, str]:
    """Variables with a value of their own."""
    return {given["name"]: given["value"] for given in container["env"] if "value" in given}
