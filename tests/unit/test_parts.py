"""`python -m tests` itself: if a failure in one of its parts were lost, nothing else here would count."""

import os
import subprocess
import sys

import pytest

from tests.__main__ import PARTS

#: As `make test` runs it, of other files.
PROGRAM = """
import pathlib, sys, pytest
import tests.__main__ as parts
parts.ROOT = pathlib.Path(sys.argv[1])
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", sys.argv[1]], plugins=[parts]))
"""
#: Plugins that libraries bring take longer to load than all of this.
ALONE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
SOUND = "def test_sound(request):\n    open(os.path.join(os.environ['RAN'], request.node.path.name), 'x').close()\n"


@pytest.fixture
def run(tmp_path):
    """Run these files beside more sound ones than there are parts."""
    folder, ran = tmp_path / "files", tmp_path / "ran"
    folder.mkdir()
    ran.mkdir()

    def start(**files: str) -> tuple[subprocess.CompletedProcess[str], set[str]]:
        sound = {f"test_sound_{number}": "import os\n" + SOUND for number in range(2 * PARTS)}
        for name, source in (sound | files).items():
            (folder / f"{name}.py").write_text(source)
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(folder)],
            env={**os.environ, **ALONE, "RAN": str(ran), "PYTHONPATH": os.pathsep.join(sys.path)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done, {path.name for path in ran.iterdir()}

    return start


def test_every_file_runs_in_one_of_the_parts(run):
    done, ran = run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert ran == {f"test_sound_{number}.py" for number in range(2 * PARTS)}
    assert f"{PARTS} parts in" in done.stdout and "failed: none" in done.stdout
    assert "no tests ran" not in done.stdout.rpartition("part")[2]


@pytest.mark.parametrize(
    ("source", "code", "told"),
    [
        ("def test_wrong():\n    assert 2 + 2 == 5", 1, "assert (2 + 2) == 5"),
        ("import os\ndef test_gone():\n    os._exit(3)", 1, "ended with 3"),
        ("import os\ndef test_left():\n    os._exit(0)", 1, f" of {2 * PARTS + 1} tests ran"),
        ("import os, signal\ndef test_killed():\n    os.kill(os.getpid(), signal.SIGKILL)", 1, "ended with -9"),
        ("import no_such_module", 2, "errors during collection"),
    ],
)
def test_what_goes_wrong_in_any_part_fails_the_whole(run, source, code, told):
    done, _ = run(test_fails=source)
    assert (done.returncode, told in done.stdout) == (code, True), done.stdout


def test_what_a_test_printed_is_shown_where_it_failed(run):
    done, _ = run(test_says="def test_says():\n    print('he' + 'ard')\n    assert False")
    assert done.stdout.count("heard") == 1, done.stdout
