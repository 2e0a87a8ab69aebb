"""What happens before anything of ours is installed: the recipe of `make run`, and scripts/ensure-servers."""

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "ensure-servers"
SH = shutil.which("sh") or "sh"
PACKAGES = {"mariadb-server": "mariadbd", "redis-server": "redis-server", "prometheus": "prometheus", "gcc": "cc"}
ALL = "mariadb-server redis-server prometheus gcc libc6-dev"
#: What it writes there meanwhile; 101 is "no".
FORBIDDEN = "a service may start: 101"


def test_make_run_installs_the_locked_versions_and_starts_the_installed_command(tmp_path):
    """The recipe, on a machine without any of it; tests/e2e/test_dev.py runs its last line."""
    make = ["make", "-n", f"VENV={tmp_path}", "run", "PORT=8123", "DATA_DIR=/srv/my data"]
    ours = {
        key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))
    }  # of the `make` that runs us
    told = subprocess.run(make, cwd=ROOT, env=ours, capture_output=True, text=True, check=True).stdout.splitlines()
    creating, locked, editable, last = (
        next(number for number, line in enumerate(told) if part in line)
        for part in (f"-m venv --clear {tmp_path}", "--requirement requirements.lock", "--editable .", "exec ")
    )
    assert creating < locked < editable < last
    assert told[last] == f'exec {tmp_path}/bin/gpuorch dev --port 8123 --data-dir "/srv/my data"'
    assert "requirements-dev" not in "\n".join(told)


def test_make_run_leaves_what_nobody_gave_it_to_the_settings():
    """An ORCH_PORT that it passed over would be told by nobody."""
    make = ["make", "-n", "run"]
    ours = {
        key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS", "PORT", "DATA_DIR"))
    }
    told = subprocess.run(make, cwd=ROOT, env=ours, capture_output=True, text=True, check=True).stdout
    assert told.splitlines()[-1].strip() == "exec .venv/bin/gpuorch dev"


class Machine:
    """Programs, and a policy of services, of its own: the script runs as it is, but for two paths."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.calls = folder / "bin", folder / "calls"
        self.bin.mkdir()
        self.calls.touch()
        self.policy = folder / "sbin" / "policy-rc.d"
        self.policy.parent.mkdir()
        for tool in ("rm", "mv", "chmod", "sed", "grep", "touch"):
            (self.bin / tool).symlink_to(shutil.which(tool) or tool)
        self.program("id", "echo 0")
        self.program("systemctl", f'echo "systemctl $*" >>{self.calls}')
        self.apt_get("exit 0")
        self.script = SCRIPT.read_text()
        for real, ours in ((":/usr/local/sbin:/usr/sbin:/sbin", ""), ("/usr/sbin/policy-rc.d", str(self.policy))):
            assert self.script.count(real) == 1
            self.script = self.script.replace(real, ours)
        assert "/usr" not in self.script

    def program(self, name: str, body: str = "") -> None:
        path = self.bin / name
        path.write_text(f"#!{SH}\n{body}\n")
        path.chmod(0o755)

    def apt_get(self, then: str) -> None:
        """It tells how it was called, asks whether it may start a service, installs programs, and ends as told."""
        packages = "\n".join(
            f'case "$*" in *"install "*{package}*) touch {self.bin / program}; chmod 755 {self.bin / program};; esac'
            for package, program in PACKAGES.items()
        )
        asking = f'"{self.policy}"; echo "a service may start: $?" >>{self.calls}'
        self.program("apt-get", f'echo "apt-get $*" >>{self.calls}\n{asking}\n{then}\n{packages}')

    def run(self) -> subprocess.CompletedProcess:
        return subprocess.run(
            [SH, "-c", self.script],
            env={"PATH": str(self.bin)},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    def told(self) -> list[str]:
        return self.calls.read_text().splitlines()


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def skipped(*packages: str) -> list[str]:
    reason = "the tests that need it are skipped (install it, or run as root on Debian)"
    return [f"ensure-servers: {package} is not installed: {reason}" for package in packages]


def test_what_is_there_is_left_alone(machine):
    for program in PACKAGES.values():
        machine.program(program)
    ended = machine.run()
    assert (ended.returncode, ended.stdout, ended.stderr, machine.told()) == (0, "", "", [])


def test_what_is_missing_is_installed_and_no_service_starts_now_or_at_the_next_boot(machine):
    machine.apt_get("")
    ended = machine.run()
    assert (ended.returncode, ended.stderr) == (0, f"ensure-servers: installing with apt-get: {ALL}\n")
    assert machine.told() == [
        "apt-get update",
        FORBIDDEN,
        f"apt-get install -y --no-install-recommends {ALL}",
        FORBIDDEN,
        *(f"systemctl disable {unit}" for unit in ("mariadb", "redis-server", "prometheus", "gcc", "libc6-dev")),
    ]
    assert list(machine.policy.parent.iterdir()) == []


def test_only_what_is_missing_is_installed(machine):
    machine.apt_get("")
    for program in ("mariadbd", "prometheus", "cc"):
        machine.program(program)
    assert machine.run().returncode == 0
    assert "apt-get install -y --no-install-recommends redis-server" in machine.told()


def test_the_machine_s_own_policy_comes_back_as_it_was(machine):
    machine.policy.write_text("#!/bin/sh\nexit 104\n")
    machine.policy.chmod(0o750)
    machine.apt_get("")
    assert machine.run().returncode == 0
    assert machine.told().count(FORBIDDEN) == 2
    assert machine.policy.read_text() == "#!/bin/sh\nexit 104\n"
    assert stat.S_IMODE(machine.policy.stat().st_mode) == 0o750
    assert list(machine.policy.parent.iterdir()) == [machine.policy]


@pytest.mark.parametrize("before", [None, "#!/bin/sh\nexit 104\n"])
def test_a_policy_left_by_a_run_that_was_killed_is_not_kept(machine, before):
    if before:
        machine.policy.write_text(before)
    machine.apt_get("kill -KILL $PPID")
    machine.run()
    assert "101" in machine.policy.read_text()
    machine.apt_get("")
    assert machine.run().returncode == 0
    assert [path.read_text() for path in machine.policy.parent.iterdir()] == ([before] if before else [])


@pytest.mark.parametrize("failing", ["update", "install"])
def test_a_failing_apt_get_fails_nothing(machine, failing):
    machine.apt_get(f'[ "$1" != {failing} ] || exit 100')
    ended = machine.run()
    assert ended.returncode == 0
    assert ended.stderr.splitlines()[1:] == ["ensure-servers: that failed", *skipped(*ALL.split())]
    assert list(machine.policy.parent.iterdir()) == []
    assert not [call for call in machine.told() if "systemctl" in call]


def test_without_a_policy_nothing_is_installed(machine):
    """It cannot be written: the packages would start their services."""
    machine.policy.parent.rmdir()
    ended = machine.run()
    assert (ended.returncode, machine.told()) == (0, [])
    assert ended.stderr.splitlines()[-5:] == skipped(*ALL.split())


def test_who_is_not_root_is_told_what_is_skipped(machine):
    machine.program("id", "echo 1000")
    machine.program("redis-server")
    ended = machine.run()
    assert (ended.returncode, machine.told()) == (0, [])
    assert ended.stderr.splitlines() == skipped("mariadb-server", "prometheus", "gcc", "libc6-dev")


def test_without_apt_get_too(machine):
    (machine.bin / "apt-get").unlink()
    ended = machine.run()
    assert (ended.returncode, ended.stderr.splitlines()) == (0, skipped(*ALL.split()))


def test_a_signal_ends_it_with_the_policy_restored(machine):
    machine.apt_get("kill -TERM $PPID")
    assert machine.run().returncode == 130
    assert machine.told() == ["apt-get update", FORBIDDEN]
    assert list(machine.policy.parent.iterdir()) == []
