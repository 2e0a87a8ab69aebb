"""docker-compose.e2e.yml: what a schema says of it, and its services for real, as processes instead of containers."""

import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from orchestrator.children import dying_with_parent
from orchestrator.settings import FIELDS, variable
from tests.scaler.manifests import SCHEMAS
from tests.servers import free_port
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.e2e.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
#: Those of our image; the others are servers.
OURS = {name: service for name, service in SERVICES.items() if "build" in service}


def test_the_specification_takes_it():
    path = SCHEMAS / "compose-spec.json"
    if not path.is_file():
        pytest.skip(f"no {path.name} in ../shared/data beside the project")
    specification = jsonschema.Draft7Validator(json.loads(path.read_text()))
    specification.validate(COMPOSE)
    assert not specification.is_valid(COMPOSE | {"services": {"redis": {"imago": "redis:7.0.15"}}})


@pytest.mark.parametrize("name", SERVICES)
def test_images_have_a_version(name):
    assert re.fullmatch(r"[\w-]+:\d+\.\d+\.\d+", SERVICES[name]["image"])


@pytest.mark.parametrize("name", OURS)
def test_every_variable_is_a_setting(name):
    assert set(OURS[name]["environment"]) <= {variable(field) for field in FIELDS}


def test_whoever_is_waited_for_says_when_it_is_well():
    needs = [need for service in SERVICES.values() for need in service.get("depends_on", {}).items()]
    waited = {name for name, how in needs if how["condition"] == "service_healthy"}
    assert waited == {name for name, service in SERVICES.items() if "healthcheck" in service}


def test_what_the_image_is_made_of_is_there():
    (dockerfile,) = {service["build"]["dockerfile"] for service in OURS.values()}
    lines = re.findall(r"^COPY (.+) \S+$", (ROOT / dockerfile).read_text(), re.MULTILINE)
    copied = [path for line in lines for path in line.split()]
    assert {"requirements.lock", "orchestrator", "sql", "worker"} <= set(copied)
    assert [path for path in copied if not (ROOT / path).exists()] == []


@pytest.fixture
def here(mariadb, redis_server) -> Callable[[str], str]:
    """A word of the file → the same with the servers and ports of this test."""
    redis_server.flush()
    account = "{MARIADB_USER}:{MARIADB_PASSWORD}@mariadb:3306/{MARIADB_DATABASE}".format(
        **SERVICES["mariadb"]["environment"]
    )
    instead = {
        f"mysql+pymysql://{account}": mariadb.create_database(f"composed_{secrets.token_hex(4)}"),
        "redis://redis:6379/0": redis_server.url,
        "8008": str(free_port()),
        "8009": str(free_port()),
    }

    def replaced(word: str) -> str:
        return re.sub("|".join(map(re.escape, instead)), lambda found: instead[found[0]], word)

    return replaced


@pytest.fixture
def start(here, tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Run a service's command, with its variables and nothing else of ours."""
    with ExitStack() as stack:

        def started(name: str) -> subprocess.Popen[str]:
            given = {key: here(value) for key, value in SERVICES[name]["environment"].items()}
            process = subprocess.Popen(
                dying_with_parent(program(SERVICES[name]["command"], here)),
                env=os.environ | given | {"ORCH_DATA_DIR": str(tmp_path / name)},
                cwd=ROOT,
                stdout=stack.enter_context((tmp_path / f"{name}.log").open("w+")),
                stderr=subprocess.STDOUT,
                text=True,
            )
            stack.callback(process.wait, 30)
            stack.callback(process.kill)
            return process

        yield started


def program(command: list[str], here: Callable[[str], str]) -> list[str]:
    """As the image would find it."""
    return [str(Path(sys.executable).with_name(command[0])), *map(here, command[1:])]


def is_well(name: str, here: Callable[[str], str]) -> bool:
    asks, *command = SERVICES[name]["healthcheck"]["test"]
    assert asks == "CMD"
    return subprocess.run(program(command, here), capture_output=True, timeout=60, check=False).returncode == 0


@pytest.mark.e2e
def test_its_services_do_every_job_once(here, start, tmp_path):
    def tails() -> str:
        return "\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in tmp_path.glob("*.log"))

    assert start("migrate").wait(60) == 0, tails()
    lasting = [start(name) for name in OURS if name not in ("migrate", "tests")]
    for name in ("orchestrator-1", "orchestrator-2"):
        wait_until(lambda: is_well(name, here), what=tails)  # noqa: B023  # called before the next
    assert start("tests").wait(100) == 0, tails()
    assert [process.poll() for process in lasting] == [None] * 4, tails()
    for process in lasting:
        process.terminate()
    assert [process.wait(30) for process in lasting] == [0] * 4, tails()
