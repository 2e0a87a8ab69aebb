"""Modules of handlers are looked up before anything starts, and nothing of them runs meanwhile."""

import pytest

from orchestrator import modules
from orchestrator.errors import ConfigError
from orchestrator.modules import require_modules

RAN = "open('it-ran', 'w').close()\n"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Where somebody starts a worker: a module and a package that must not run."""
    (tmp_path / "alone.py").write_text(RAN)
    (tmp_path / "outer").mkdir()
    (tmp_path / "outer" / "__init__.py").write_text(RAN)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not (tmp_path / "it-ran").exists()


@pytest.mark.parametrize(
    "names",
    [
        [],
        ["alone"],
        ["outer"],
        ["outer.made"],  # by what it runs, perhaps
        ["alone", "found_by_then"],
        ["worker.builtin"],
        ["sys"],
        ["os.path"],
        ["__main__"],  # whose spec nobody can tell
    ],
)
def test_what_may_be_there_is_not_refused(names):
    require_modules(names)


@pytest.mark.parametrize("name", ["no_such_module", "no_such_package.handlers"])
def test_what_is_certainly_not_there_is_named_with_what_to_do(name, here):
    with pytest.raises(ConfigError, match=r"there is no module 'no_such_\w+'; correct the name") as refused:
        require_modules([name])
    assert f"worker_handlers = {name!r}" in str(refused.value) and str(here) in str(refused.value)


def test_a_file_in_place_of_a_module_is_told_as_such():
    with pytest.raises(ConfigError, match=r"write 'alone', without \.py"):
        require_modules(["alone.py"])


def test_the_path_of_the_workers_counts(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "distant.py").write_text(RAN)
    require_modules(["distant"], str(elsewhere))
    with pytest.raises(ConfigError, match="distant"):
        require_modules(["distant"])


def test_without_an_answer_nothing_is_refused(monkeypatch):
    monkeypatch.setattr(modules, "PATIENCE_S", 0.0)
    require_modules(["no_such_module"])
