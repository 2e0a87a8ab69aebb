"""deploy/keda against KEDA's published schema, and what no schema can check."""

import json
import os
import re
import shlex
import subprocess
from typing import Any

import click
import jsonschema
import pytest
import yaml

from orchestrator.api.app import NOUNS
from orchestrator.cli import gpuorch
from orchestrator.config import load
from orchestrator.scaler.service import Aim
from orchestrator.settings import FIELDS, variable
from orchestrator.stream.hub import Hub
from tests.scaler.manifests import FOLDER, SCHEMAS, VARIANTS, environment, every, one, scaled_object, worker_pod
from tests.servers import MissingBinaryError, find_binary

CRDS = {"ScaledObject": "keda-crd-scaledobjects.yaml", "TriggerAuthentication": "keda-crd-triggerauthentications.yaml"}
OURS = [(name, document) for name, document in every() if document["kind"] in CRDS]
#: Seconds that a worker may need to write down what it handed back, after its grace: see Supervisor._leave.
WRITE_S = 4 * FIELDS["db_timeout_s"].default


def strict(schema):
    """Kubernetes drops what a schema does not name; here a slip of the pen is an error."""
    if isinstance(schema, dict):
        closed = {key: strict(value) for key, value in schema.items()}
        if "properties" in schema and "additionalProperties" not in schema:
            closed["additionalProperties"] = False
        return closed
    return [strict(one) for one in schema] if isinstance(schema, list) else schema


def schema_of(kind):
    path = SCHEMAS / CRDS[kind]
    if not path.is_file():
        pytest.skip(f"no {path.name} in ../shared/data beside the project")
    (version,) = yaml.safe_load(path.read_text())["spec"]["versions"]
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}  # Kubernetes' own
    return schema


@pytest.mark.parametrize(("name", "document"), OURS, ids=[f"{name}-{document['kind']}" for name, document in OURS])
def test_keda_takes_them(name, document):
    jsonschema.validate(document, schema_of(document["kind"]))


@pytest.mark.parametrize(
    ("path", "value"),
    [(("spec", "minReplicaCounts"), 0), (("spec", "maxReplicaCount"), "ten"), (("spec", "triggers"), None)],
)
def test_a_slip_of_the_pen_is_seen(path, value):
    document = json.loads(json.dumps(scaled_object("metrics-api")))
    document[path[0]][path[1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, schema_of("ScaledObject"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_wakes_from_zero_with_one_job_and_never_takes_silence_for_idleness(variant):
    spec = scaled_object(variant)["spec"]
    assert spec["scaleTargetRef"]["name"] == one("Deployment", "workers.yaml")["metadata"]["name"]
    assert spec["minReplicaCount"] == 0 < spec["maxReplicaCount"]
    assert spec["fallback"]["behavior"] == "currentReplicasIfHigher" and spec["fallback"]["replicas"] >= 1
    assert not spec["advanced"]["restoreToOriginalReplicaCount"]
    assert {trigger["type"] for trigger in spec["triggers"]} == {variant}
    for trigger in spec["triggers"]:
        activation = {key: value for key, value in trigger["metadata"].items() if key.startswith("activation")}
        assert set(activation.values()) <= {"0"}, "activation is strictly above: anything else needs two jobs"
        assert trigger["metadata"].get("ignoreNullValues", "false") == "false"
    # Fallback is for triggers by average; one of them must be.
    assert any(trigger["metricType"] == "AverageValue" for trigger in spec["triggers"])


@pytest.mark.parametrize("variant", ["prometheus"])
def test_a_series_that_is_missing_is_an_error_where_keda_would_take_it_for_a_zero(variant):
    for trigger in scaled_object(variant)["spec"]["triggers"]:
        assert trigger["metadata"]["ignoreNullValues"] == "false"
        assert trigger["metadata"]["activationThreshold"] == "0"


def test_the_stream_is_measured_by_its_length(settings):
    (trigger,) = scaled_object("redis-streams")["spec"]["triggers"]
    given, pod = trigger["metadata"], environment(worker_pod()["containers"][0])
    assert not {"consumerGroup", "lagCount", "pendingEntriesCount"} & given.keys()
    assert given["streamLength"] == pod["ORCH_WORKER_SLOTS"]
    hub = Hub(settings())
    assert given["stream"] == hub.lane(pod["ORCH_WORKER_POOL"]).key
    hub.close()


def test_what_is_asked_over_http_exists():
    (trigger,) = scaled_object("metrics-api")["spec"]["triggers"]
    url = re.fullmatch(r"http://[a-z.-]+:8008(/.*)", trigger["metadata"]["url"])
    assert url is not None
    path = url[1]
    assert any(route.path_regex.fullmatch(path) for module in NOUNS for route in module.router.routes)
    assert path.rpartition("/")[2] == environment(worker_pod()["containers"][0])["ORCH_WORKER_POOL"]


def test_what_the_scaler_is_told_makes_sense_to_it():
    (trigger,) = scaled_object("external-push")["spec"]["triggers"]
    aim = Aim.of(trigger["metadata"])
    assert (aim.pool_id, aim.metric, aim.target) == ("embed", "desired_workers", 1.0)
    service = one("Service", "scaledobject-external-push.yaml")
    assert trigger["metadata"]["scalerAddress"].endswith(f":{service['spec']['ports'][0]['port']}")


def test_running_jobs_get_all_the_time_there_is_and_the_worker_some_of_it():
    pod = worker_pod()
    container = pod["containers"][0]
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    patience_s = float(command[command.index("--timeout") + 1])
    grace_s = float(environment(container)["ORCH_WORKER_GRACE_S"])
    assert patience_s + grace_s + WRITE_S < pod["terminationGracePeriodSeconds"]
    assert patience_s > 0.9 * pod["terminationGracePeriodSeconds"], "most of it is for the jobs"
    # The hook names process 1: no shell in between.
    assert container["command"][0] == "gpuorch" and command[command.index("--pid") + 1] == "1"


def commands():
    for name, document in every():
        if document["kind"] == "Deployment":
            for container in document["spec"]["template"]["spec"]["containers"]:
                hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
                for words in filter(None, ([*container["command"], *container.get("args", [])], hook)):
                    yield pytest.param(words, id=f"{name}: {shlex.join(words[:2])}")


@pytest.mark.parametrize("words", list(commands()))
def test_what_containers_run_exists(words):
    assert words[0] == "gpuorch"
    command = gpuorch.get_command(click.Context(gpuorch), words[1])
    assert command is not None
    known = {flag for parameter in command.params for flag in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known


def test_the_environment_of_workers_is_made_of_settings():
    container = worker_pod()["containers"][0]
    names = {given["name"] for given in container["env"]}
    assert names <= {variable(key) for key in FIELDS}
    assert {"ORCH_POD_NAME", "ORCH_KUBERNETES_NAMESPACE"} <= names
    fields = environment(container)
    assert load(environ=fields).settings.worker_pool == "embed"


def test_a_worker_may_do_what_it_does_and_no_more():
    role, binding, account = (one(kind, "rbac.yaml") for kind in ("Role", "RoleBinding", "ServiceAccount"))
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]}]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert [subject["name"] for subject in binding["subjects"]] == [account["metadata"]["name"]]
    assert worker_pod()["serviceAccountName"] == account["metadata"]["name"]


def test_kustomize_applies_files_that_exist_and_one_scaled_object():
    (kustomization,) = [document for name, document in every() if name == "kustomization.yaml"]
    assert all((FOLDER / name).is_file() for name in kustomization["resources"])
    assert sum(name.startswith("scaledobject-") for name in kustomization["resources"]) == 1


# --- what the queries say, by Prometheus itself ---

DEPTH = 'gpu_orchestrator_job_queue_depth{stream="stream:orchestrator:inference_jobs:embed",instance="%s"}'
IN_FLIGHT = 'gpu_orchestrator_jobs_in_flight{pool_id="embed",instance="%s"}'
SUM = 'gpu_orchestrator_job_latency_seconds_sum{type="embed",instance="%s"}'
COUNT = 'gpu_orchestrator_job_latency_seconds_count{type="embed",instance="%s"}'


def world(depth, running, per_job_s=0.0):
    """Two instances that show the same: ten jobs ended every 15 s, if any."""
    counts = {DEPTH: f"{depth}x20", IN_FLIGHT: f"{running}x20"}
    if per_job_s:
        counts |= {SUM: f"0+{10 * per_job_s}x20", COUNT: "0+10x20"}
    return {series % instance: values for series, values in counts.items() for instance in ("a", "b")}


def found(binary):
    try:
        return find_binary(binary)
    except MissingBinaryError as missing:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(missing))


@pytest.mark.parametrize(
    ("query", "series", "value"),
    [
        ("depth", world(0, 0), 0),
        ("depth", world(1, 0), 1),
        ("depth", world(60, 0), 1),
        ("depth", world(60, 12), 12),
        ("depth", world(100, 40), 40),
        ("depth", world(101, 40), 101),
        ("depth", {}, None),
        ("latency", world(60, 12, per_job_s=5.0), 5),
        ("latency", world(12, 12, per_job_s=5.0), 0),
        ("latency", world(60, 12), 0),
        ("latency", world(0, 0), 0),
        ("latency", {}, None),
    ],
)
def test_the_queries_say_what_they_should(query, series, value, tmp_path):
    """Nothing at all where nobody is scraped: a zero would end all workers."""
    (trigger,) = [one for one in scaled_object("prometheus")["spec"]["triggers"] if one["name"] == query]
    wanted: dict[str, Any] = {"expr": f"round({trigger['metadata']['query']}, 0.001)", "eval_time": "5m"}
    wanted["exp_samples"] = [] if value is None else [{"value": value}]
    given = [{"series": name, "values": values} for name, values in series.items()]
    test = {
        "evaluation_interval": "15s",
        "tests": [{"interval": "15s", "input_series": given, "promql_expr_test": [wanted]}],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(test))
    promtool = found("promtool")
    ran = subprocess.run(
        [promtool, "test", "rules", tmp_path / "test.yaml"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
