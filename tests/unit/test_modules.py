"""Modules of handlers are looked up before anything starts, and nothing of them runs meanwhile."""

import os
import sys
import zipfile
from pathlib import Path

import pytest

from orchestrator.errors import ConfigError
from orchestrator.modules import require_modules

RAISES = "raise RuntimeError('this ran')\n"


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """A directory along the path, with packages in it that must not run."""
    files = {
        "alone.py": RAISES,
        "outer/__init__.py": RAISES,
        "outer/inner/__init__.py": RAISES,
        "outer/inner/deep.py": RAISES,
        "spread/wide/far.py": RAISES,
        "moving/__init__.py": "__path__.append('elsewhere')\n",
        "compiled/__init__.pyc": "",
        "garbled/__init__.py": "# coding: no-such-coding\n",
        "making/__init__.py": "import sys\nsys.modules[__name__ + '.made'] = sys\n",
    }
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.syspath_prepend(str(tmp_path / "root"))
    return tmp_path / "root"


@pytest.mark.parametrize(
    "name",
    [
        "alone",
        "outer",
        "outer.inner",
        "outer.inner.deep",
        "spread.wide.far",  # no __init__ anywhere
        "worker.builtin",
        "sys",  # built in
        "zipimport",  # frozen
        "os.path",  # no file is called that
        "moving.unseen",  # whose package looks elsewhere once it runs
        "making.made",  # whose package makes it
        "compiled.unseen",  # whose package nobody can read
        "garbled.unseen",
    ],
)
def test_what_can_be_imported_is_found_and_does_not_run(root, name):
    before = set(sys.modules)
    require_modules([name])
    assert not {one for one in set(sys.modules) - before if one.split(".")[0] == name.split(".")[0]}


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("no_such_module", "no_such_module"),
        ("no_such.module", "no_such"),
        ("outer.typo", "outer.typo"),
        ("outer.inner.typo", "outer.inner.typo"),
        ("outer.typo.deep", "outer.typo"),
        ("spread.wide.near", "spread.wide.near"),
        ("alone.inner", "alone.inner"),  # no package
    ],
)
def test_what_is_missing_is_named_with_the_setting_and_what_to_do(root, name, missing):
    with pytest.raises(ConfigError) as refused:
        require_modules(["alone", name])
    assert str(refused.value) == (
        f"worker_handlers = {name!r}: there is no module {missing!r}; correct the name, or install it,"
        f" or start where its file is (this is {Path.cwd()})"
    )


def test_a_file_in_place_of_a_module_is_told_its_name(root):
    with pytest.raises(ConfigError, match=r"write 'alone', without \.py"):
        require_modules(["alone.py"])


def test_the_working_directory_counts_even_off_the_path(root):
    seen = Path.cwd().stat()
    with pytest.raises(ConfigError):
        require_modules(["beside"])
    Path("beside.py").write_text(RAISES)
    os.utime(Path.cwd(), ns=(seen.st_atime_ns, seen.st_mtime_ns))  # as if it came within one tick of the clock
    require_modules(["beside"])


def test_a_package_may_be_spread_over_the_path_and_one_with_a_file_of_its_own_comes_first(root, tmp_path, monkeypatch):
    more = tmp_path / "more"
    for path in (more / "spread" / "near.py", more / "outer" / "stray.py"):
        path.parent.mkdir(parents=True)
        path.write_text(RAISES)
    monkeypatch.syspath_prepend(str(more))
    require_modules(["spread.near", "spread.wide.far", "outer.inner.deep"])
    with pytest.raises(ConfigError):
        require_modules(["outer.stray"])


def test_a_module_in_an_archive_is_found(root, monkeypatch):
    with zipfile.ZipFile(root / "some.zip", "w") as archive:
        archive.writestr("packed/__init__.py", RAISES)
        archive.writestr("packed/inner.py", RAISES)
    monkeypatch.syspath_prepend(str(root / "some.zip"))
    require_modules(["packed.inner"])
    with pytest.raises(ConfigError):
        require_modules(["packed.typo"])


class Editable:
    """As installers leave it behind for packages that stay where they are edited: not along the path."""

    def __init__(self, error: type[Exception] | None = None) -> None:
        self.error = error

    def find_spec(self, name: str, path: object, target: object = None) -> object:
        if name == "edited" and self.error:
            raise self.error
        return object() if name == "edited" else None


@pytest.mark.parametrize("error", [None, KeyError])
def test_what_another_finder_knows_is_not_refused_nor_what_it_fails_at(root, monkeypatch, error):
    """One that fails cannot say that there is none; the import will tell."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Editable(error)])
    require_modules(["edited"])
    with pytest.raises(ConfigError):
        require_modules(["unedited"])
