"""The documentation says what the code has: every name that a reader may look up, every command they may copy."""

import inspect
import re
import shlex
from pathlib import Path

import click
import pytest
from prometheus_client.metrics import MetricWrapperBase

from orchestrator import errors, settings
from orchestrator.api import problems
from orchestrator.api.app import NOUNS
from orchestrator.cli import gpuorch
from orchestrator.client import errors as client_errors
from orchestrator.jobs import Status
from orchestrator.leader.duties import DUTIES
from orchestrator.pools import PoolState
from orchestrator.telemetry import metrics

ROOT = Path(__file__).parents[2]
TEXTS = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in sorted(ROOT.rglob("*.md"))
    if not any(part.startswith(".") or part in {"build", "dist"} for part in path.relative_to(ROOT).parts)
}
RUNBOOKS = sorted(name for name in TEXTS if name.startswith("runbooks/") and name != "runbooks/README.md")
SECTIONS = ["Symptom", "Look", "Fix", "Verify", "If it comes back"]
#: Commands that change nothing, and so may stand under Look.
READ_ONLY = (
    "audit tail",
    "check-config",
    "dlq list",
    "dlq show",
    "doctor",
    "gpus",
    "jobs events",
    "jobs explain",
    "jobs get",
    "jobs list",
    "leader",
    "leases list",
    "migrate --check",
    "nodes list",
    "policy get",
    "policy history",
    "policy list",
    "pools list",
    "pools show",
    "queue gates",
    "queue paused",
    "queue stats",
    "schedules list",
    "schedules show",
    "top",
    "workers list",
    "workflows events",
    "workflows list",
    "workflows show",
)
#: What is written like a command and is none: help, and what a server says.
NO_COMMANDS = {"gpuorch --help", "gpuorch COMMAND --help", "gpuorch serves …"}


def rows(name: str) -> dict[str, list[str]]:
    """The tables of a page: first cell, without its backticks → the other cells."""
    lines = [line.strip().strip("|").split("|") for line in TEXTS[name].splitlines() if line.startswith("| `")]
    return {cells[0].strip(" `"): [cell.strip() for cell in cells[1:]] for cells in lines}


def setting_row(key: str) -> list[str]:
    default = settings.to_text(settings.FIELDS[key].default)
    return [
        f"`{settings.variable(key)}`",
        f"`{default}`" if default else "none",
        settings.FIELDS[key].description or "",
    ]


def metric_labels() -> dict[str, tuple[str, ...]]:
    """Every metric as a scrape shows it → its labels."""
    ends = {"counter": "_total", "info": "_info"}
    wrapped = [value for value in vars(metrics).values() if isinstance(value, MetricWrapperBase)]
    counted = {f"{metric._name}{ends.get(str(metric._type), '')}": tuple(metric._labelnames) for metric in wrapped}
    shared = metrics.CLUSTER | metrics.COUNTERS | metrics.HISTOGRAMS
    gauges = {f"{metrics._PREFIX}_{name}": labels for name, (_, labels) in shared.items()}
    read = {metrics._batch_sizes.name: metrics._batch_sizes.labels}
    return counted | gauges | read | {f"{metrics._PREFIX}_build_info": ("version",)}


def error_codes() -> set[str]:
    found = [value for module in (errors, problems, client_errors) for value in vars(module).values()]
    named = (errors.OrchestratorError, client_errors.LeaseLost)
    ours = {c.code for c in found if inspect.isclass(c) and issubclass(c, named)}
    return ours | set(problems.FRAMEWORK_CODES.values()) | {"result_not_ready", "http_error"}


def broken_links(name: str, text: str) -> list[str]:
    """Relative links of a page that lead nowhere."""
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    return [f"{name} → {target}" for target in targets if target and not (ROOT / name).parent.joinpath(target).exists()]


def shell_lines(text: str) -> list[str]:
    """What a reader may copy: the lines of blocks marked sh, with continuation lines joined."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def inline_commands(text: str) -> list[str]:
    """Those that stand in sentences. A group alone, such as `gpuorch dlq`, speaks of all its commands."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    found = [" ".join(command.split()) for command in re.findall(r"`(gpuorch [^`]+)`", prose)]
    of_group = lambda command: isinstance(gpuorch.get_command(click.Context(gpuorch), command[8:]), click.Group)
    return [command for command in found if command not in NO_COMMANDS and not of_group(command)]


def wrong_command(line: str) -> str | None:
    """Why a line that begins with gpuorch would be refused before it does anything."""
    command: click.Command = gpuorch
    words = shlex.split(line, comments=True)[1:]
    context = click.Context(gpuorch)
    while isinstance(command, click.Group) and not (command.invoke_without_command and _is_complete(words)):
        found = command.get_command(context, words[0]) if words else None
        if found is None:
            return f"no such command: {line}"
        command, words = found, words[1:]
    options = {name for parameter in command.params for name in parameter.opts} | {"--help"}
    ours = words[: words.index("--")] if "--" in words else words
    unknown = [word for word in ours if word.startswith("--") and word not in options]
    return f"no option {unknown[0]}: {line}" if unknown else None


def _is_complete(words: list[str]) -> bool:
    return not words or words[0].startswith("-")


def wrong_path(line: str) -> str | None:
    """Why a curl line asks for something that the API does not have."""
    routes = [route for module in NOUNS for route in module.router.routes]
    for path in re.findall(r"localhost:8008(/[^\s'\"?]*)", line):
        if not any(route.path_regex.fullmatch(path) for route in routes):
            return f"no path {path}: {line}"
    return None


def section(text: str, title: str) -> str:
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("key", settings.FIELDS)
def test_every_setting_is_documented_as_it_is(key):
    assert rows("docs/settings.md").get(key) == setting_row(key)


def test_no_setting_is_documented_that_does_not_exist():
    assert rows("docs/settings.md").keys() <= settings.FIELDS.keys()


def relation_line(relation: settings.Relation) -> str:
    factor = f" × {relation.times:g}" if relation.times > 1 else ""
    margin = f" + {relation.margin:g} {relation.unit}" if relation.margin else ""
    reserve = f" − `{relation.reserve}`" if relation.reserve else ""
    return f"- `{relation.short}`{factor}{margin} ≤ `{relation.long}`{reserve}: {relation.why}"


def test_every_relation_of_settings_is_documented_as_it_is():
    told = section(TEXTS["docs/settings.md"], "How values must relate")
    assert [line for line in told.splitlines() if line.startswith("- ")] == list(map(relation_line, settings.RELATIONS))


def test_the_precedence_of_settings_is_told_loudly():
    assert "## FLAG > FILE > ENVIRONMENT > DEFAULT" in TEXTS["docs/settings.md"]
    assert "THE FILE BEATS THE ENVIRONMENT" in TEXTS["docs/settings.md"]


def test_every_metric_is_documented_with_its_labels_and_no_other():
    documented = {name: cells[1] for name, cells in rows("docs/metrics.md").items() if len(cells) == 3}
    labels = {name: ", ".join(f"`{label}`" for label in known) or "–" for name, known in metric_labels().items()}
    assert documented == labels


def test_every_error_code_is_documented():
    assert error_codes() - rows("docs/errors.md").keys() == set()


def test_every_duty_is_described_and_no_other():
    assert rows("docs/design/leader.md").keys() == {duty.name for duty in DUTIES}


@pytest.mark.parametrize("name", [*Status, *PoolState])
def test_every_state_is_described(name):
    design = [text for path, text in TEXTS.items() if path.startswith("docs/design/")]
    assert any(f"`{name}`" in text for text in design)


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_somewhere(name):
    assert broken_links(name, TEXTS[name]) == []


@pytest.mark.parametrize("name", TEXTS)
def test_what_may_be_copied_exists(name):
    lines = shell_lines(TEXTS[name])
    wrong = [wrong_command(line) for line in lines if line.startswith("gpuorch ")]
    if name != "CHANGELOG.md":  # it tells of commands that were
        wrong += [wrong_command(command) for command in inline_commands(TEXTS[name])]
    wrong += [wrong_path(line) for line in lines if line.startswith("curl ")]
    assert [reason for reason in wrong if reason] == []


@pytest.mark.parametrize("name", RUNBOOKS)
def test_a_runbook_has_its_sections_in_order(name):
    assert re.findall(r"^## (.*)$", TEXTS[name], re.MULTILINE) == SECTIONS
    assert all(section(TEXTS[name], title).strip() for title in SECTIONS)


@pytest.mark.parametrize("name", RUNBOOKS)
def test_looking_changes_nothing(name):
    commands = [
        line.removeprefix("gpuorch ") for line in shell_lines(section(TEXTS[name], "Look")) if "gpuorch" in line
    ]
    assert [command for command in commands if not command.startswith(READ_ONLY)] == []


def test_the_index_lists_every_runbook():
    listed = set(re.findall(r"\]\(([a-z-]+\.md)\)", TEXTS["runbooks/README.md"]))
    assert {f"runbooks/{name}" for name in listed} == set(RUNBOOKS)


def test_the_index_lists_every_design_page():
    pages = {path for path in TEXTS if path.startswith("docs/design/")} - {"docs/design/README.md"}
    listed = re.findall(r"^\| \[[a-z]+\]\(([a-z]+\.md)\)", TEXTS["docs/design/README.md"], re.MULTILINE)
    assert {f"docs/design/{name}" for name in listed} == pages


def test_every_module_of_the_folders_that_it_names_is_on_the_page_of_modules():
    parts = r"^Modules of `([a-z.]+)`(.*?)(?=^Modules of|\Z)"
    folders = dict(re.findall(parts, TEXTS["docs/design/modules.md"], re.MULTILINE | re.DOTALL))
    assert {"store", "worker", "placement", "warmth"} <= folders.keys()
    missing = [
        path.relative_to(ROOT).as_posix()
        for name, text in folders.items()
        for path in (ROOT / ("" if name == "worker" else "orchestrator") / name.replace(".", "/")).glob("[!_]*.py")
        if f"`{path.stem}`" not in text
    ]
    assert missing == []


# Each check is able to fail.


def test_a_link_that_leads_nowhere_is_seen():
    assert broken_links("docs/settings.md", "[a](../README.md#x) [b](https://x.test/y) [c](gone.md)") == [
        "docs/settings.md → gone.md"
    ]


@pytest.mark.parametrize(
    "line",
    [
        "gpuorch frobnicate",
        "gpuorch jobs",
        "gpuorch leader --force",
        "gpuorch jobs burn X",
        "gpuorch run --gpus 1 -- true",
    ],
)
def test_a_command_that_does_not_exist_is_seen(line):
    assert wrong_command(line)


def test_a_command_in_a_sentence_is_seen():
    text = "see `gpuorch dlq`\nand (`gpuorch jobs\nshow ID`) or\n```sh\ngpuorch x\n```\n"
    assert [wrong_command(command) for command in inline_commands(text)] == ["no such command: gpuorch jobs show ID"]


@pytest.mark.parametrize("path", ["/jobz", "/jobs/x/y", "/leases/t/renew"])
def test_a_path_that_does_not_exist_is_seen(path):
    assert wrong_path(f"curl -s 'localhost:8008{path}?wait=1'")


def test_there_is_something_to_check():
    assert len(RUNBOOKS) >= 5
    assert len(metric_labels()) > 15
    assert sum(len(shell_lines(text)) for text in TEXTS.values()) > 30
