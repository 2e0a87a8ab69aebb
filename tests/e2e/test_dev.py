"""`gpuorch dev` as a user has it: one command, real processes, a job from submit to result."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.plain import http
from tests.processes import status
from tests.servers import free_port
from tests.waiting import wait_until

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
#: Seconds for the whole system to start or stop on a busy two-core machine.
PATIENCE_S = 45.0
#: It stops within a second or two: jobs get less time to end.
SOON = MappingProxyType({"ORCH_WORKER_GRACE_S": "1"})
#: As a user has it.
BY_DEFAULT: Mapping[str, str] = MappingProxyType({})


class Dev:
    """One `gpuorch dev` in a session of its own, so that a Ctrl-C can be sent to its whole group."""

    def __init__(self, directory: Path, port: int, *more: str, given: Mapping[str, str] = SOON) -> None:
        self.port, self.directory = port, directory
        self.url = f"http://127.0.0.1:{port}"
        self.log = directory / f"dev-{os.urandom(4).hex()}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*self.command(), *more],
                cwd=self.cwd(),
                env={**self.environment(), **given},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def command(self) -> list[str]:
        return [sys.executable, "-m", "orchestrator", "dev", "--port", str(self.port)]

    def cwd(self) -> Path:
        return self.directory

    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    @property
    def pid(self) -> int:
        """Of `gpuorch dev` itself."""
        return self.process.pid

    @property
    def output(self) -> str:
        return self.log.read_text()

    def ready(self) -> "Dev":
        wait_until(self._announced, timeout=PATIENCE_S, what="gpuorch dev is ready")
        return self

    def _announced(self) -> bool:
        assert self.process.poll() is None, self.output
        return "gpuorch is ready at" in self.output and "Ctrl-C stops" in self.output

    def run(self, job_id: str) -> dict:
        """Submit an echo job and wait for its end."""
        body = {"job_id": job_id, "type": "echo", "payload": {"text": job_id}}
        http.post(f"{self.url}/jobs/submit", json=body).raise_for_status()
        return http.get(f"{self.url}/jobs/{job_id}?wait=30", timeout=PATIENCE_S).json()

    def interrupt(self, number: int = signal.SIGINT) -> int:
        os.killpg(self.process.pid, number)
        return self.process.wait(PATIENCE_S)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class Made(Dev):
    """The README's `make run` on a machine where nothing else is installed: no program at all is found by its name.

    What it installs is there already: these tests run in it, and its stamp is not looked at (-o).
    """

    def command(self) -> list[str]:
        make = shutil.which("make") or "make"
        data = self.directory / ".data"
        return [make, "-o", ".venv/.runtime", "run", f"PORT={self.port}", f"DATA_DIR={data}"]

    def cwd(self) -> Path:
        return ROOT

    def environment(self) -> dict[str, str]:
        ours = ("MAKE", "MFLAGS", "PYTHON")  # of the `make test` that runs us, and of its tests
        return {key: value for key, value in os.environ.items() if not key.startswith(ours)} | {"PATH": "/nowhere"}

    @property
    def pid(self) -> int:
        lines = alive(descendants(self.process.pid))
        (pid,) = (pid for pid, line in lines.items() if ".venv/bin/gpuorch dev " in line)
        return pid

    def kill(self) -> None:
        """With what make started: it dies without that."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture
def start(tmp_path) -> Iterator:
    started: list[Dev] = []

    def begin(*more: str, given: Mapping[str, str] = SOON) -> Dev:
        started.append(Dev(tmp_path, free_port(), *more, given=given))
        return started[-1]

    yield begin
    for dev in started:
        dev.kill()


def descendants(root: int) -> set[int]:
    parents = {int(path.name): status(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit()}
    found, level = set(), {root}
    while level:
        level = {pid for pid, known in parents.items() if known is not None and known.parent in level}
        found |= level
    return found


def alive(pids: set[int]) -> dict[int, str]:
    """Those that still run, with their command lines; zombies that wait for init do not."""
    states = {pid: status(pid) for pid in pids}
    running = [pid for pid, known in states.items() if known is not None and known.state != "Z"]
    return {pid: (Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()) for pid in running}


def sleeping_job(dev: Dev) -> None:
    """Submit a job that outlasts the test, and wait until it runs."""
    body = {"job_id": "sleeps", "type": "sleep", "payload": {"seconds": 600}}
    http.post(f"{dev.url}/jobs/submit", json=body).raise_for_status()
    runs = lambda: http.get(f"{dev.url}/jobs/sleeps").json()["status"] == "running"
    wait_until(runs, timeout=PATIENCE_S, what="the long job runs")


def test_ctrl_c_leaves_no_process_and_a_restart_keeps_the_jobs(start, tmp_path):
    first = start().ready()
    assert "open, no authentication, loopback only" in first.output
    assert "SIMULATED GPUs (2x24576 MB)" in first.output
    assert str(tmp_path / ".data") in first.output
    job = first.run("kept")
    assert (job["status"], job["result"]) == ("done", {"text": "kept"})
    sleeping_job(first)
    children = descendants(first.process.pid)
    assert len(children) >= 3, alive(children)  # Valkey, the worker and at least one slot
    assert first.interrupt() == 0, first.output
    assert alive(children) == {}
    assert "Traceback" not in first.output and first.output.count("gpuorch dev stops") == 1

    second = start().ready()
    kept = http.get(f"{second.url}/jobs/kept").json()
    assert (kept["status"], kept["result"]) == ("done", {"text": "kept"})
    handed_back = http.get(f"{second.url}/jobs/sleeps").json()
    assert handed_back["status"] in {"pending", "claimed", "running"} and handed_back["attempts"] <= 1
    assert second.run("after")["status"] == "done"
    assert second.interrupt(signal.SIGTERM) == 0, second.output


def test_killing_it_takes_its_children_along_and_loses_nothing_and_a_closed_terminal_leaves_none(start):
    dev = start().ready()
    dev.run("kept")
    children = descendants(dev.process.pid)
    dev.kill()
    wait_until(lambda: not alive(children), timeout=PATIENCE_S, what="no child is left")
    again = start(given=BY_DEFAULT).ready()
    assert http.get(f"{again.url}/jobs/kept").json()["status"] == "done"
    assert again.run("after")["status"] == "done"
    children = descendants(again.process.pid)
    assert again.interrupt(signal.SIGHUP) == 0, again.output
    assert alive(children) == {}


def catches_sigterm(pid: int) -> bool:
    """The kernel's word that the command itself has begun, not only the interpreter."""
    caught = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) & 1 << signal.SIGTERM - 1)


@pytest.mark.parametrize("after_s", [0.0, 0.5, 1.5])
def test_ctrl_c_while_it_starts_is_quiet_too(start, after_s):
    dev = start()
    wait_until(lambda: catches_sigterm(dev.process.pid), timeout=PATIENCE_S, what="the command begins")
    # From here on there is no fact to wait for: any moment of the start is meant.
    with pytest.raises(subprocess.TimeoutExpired):
        dev.process.wait(after_s)
    children = descendants(dev.process.pid)
    # Python 3.11 ends by the signal, 130 to a shell as well, if it came inside an exec() of text (dataclasses use it).
    assert dev.interrupt() in {0, 130, -signal.SIGINT}, dev.output
    wait_until(lambda: not alive(children), what="no child is left")
    assert "Traceback" not in dev.output


# --- one instance for those that only look at it ---


@pytest.fixture(scope="module")
def running(tmp_path_factory) -> Iterator[Dev]:
    own = Path(sys.prefix) == ROOT / ".venv"  # elsewhere there is no such command
    dev = (Made if own else Dev)(tmp_path_factory.mktemp("dev"), free_port())
    try:
        yield dev.ready()
    finally:
        dev.kill()


def test_the_curl_lines_of_the_readme_and_those_printed_work_as_pasted(running):
    readme = (ROOT / "README.md").read_text().partition("\ncurl ")[2].partition("```")[0]
    written = f"curl {readme}".replace("localhost:8008", f"localhost:{running.port}")
    printed = running.output[running.output.index("  curl") : running.output.index("Ctrl-C")]
    for block, created in ((written, "true"), (printed, "false")):
        pasted = subprocess.run(["sh", "-c", block], capture_output=True, text=True, timeout=60, check=True)
        assert f'"created":{created}' in pasted.stdout and '"status":"done"' in pasted.stdout, pasted


def blocks_of(section: str, language: str) -> list[str]:
    """What a reader of that section of the README may paste."""
    text = (ROOT / "README.md").read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_the_python_of_the_readme_works_as_pasted(running):
    [program] = blocks_of("From Python", "python")
    command = [sys.executable, "-c", program.replace("127.0.0.1:8008", f"127.0.0.1:{running.port}")]
    pasted = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert pasted.stdout.count(" done {'text': ") == 3, pasted


def test_the_first_handler_of_the_readme_works_as_pasted(start, tmp_path):
    (tmp_path / "my_handlers.py").write_text(blocks_of("Handlers", "python")[0])
    begin, submit = blocks_of("Handlers", "sh")[0].splitlines()
    setting, _, rest = begin.partition(" ")
    assert rest.startswith("make run ")
    dev = start(given={**SOON, **dict([setting.split("=")])}).ready()
    line = submit.replace("gpuorch", f"{sys.executable} -m orchestrator", 1)
    environment = dev.environment() | {"GPUORCH_URL": dev.url}
    pasted = subprocess.check_output(["sh", "-c", line], env=environment, text=True, timeout=PATIENCE_S)
    assert '{"text": "HELLO"}' in pasted


def test_a_second_one_on_the_same_data_is_refused(running):
    second = Dev(running.log.parent, free_port())
    assert second.process.wait(PATIENCE_S) == 1
    assert re.search(rf"data_dir \.data is in use by process {running.pid};", second.output), second.output
    assert running.run("still-works")["status"] == "done"


def test_a_taken_port_is_named(running):
    port = int(running.url.rpartition(":")[2])
    second = Dev(running.log.parent, port, "--data-dir", "other")
    assert second.process.wait(PATIENCE_S) == 1
    assert str(port) in second.output and "--port" in second.output and "Traceback" not in second.output


@pytest.mark.parametrize(("child", "command"), [("worker", "orchestrator worker"), ("valkey", "valkey-server")])
def test_a_child_that_dies_is_started_again(running, child, command):
    running.run(f"before-{child}")
    (pid,) = (pid for pid, line in alive(descendants(running.process.pid)).items() if command in line)
    os.kill(pid, signal.SIGKILL)
    assert running.run(f"after-{child}")["status"] == "done"
    assert re.search(rf"child process ended, starting it again.*child={child}", running.output), running.output


def test_a_worker_whose_handlers_are_not_there_ends_everything_and_names_them(start):
    dev = start("--handlers", "tests.no_such_module")
    assert dev.process.wait(PATIENCE_S) == 1
    assert "worker_handlers = 'tests.no_such_module': there is no module 'tests.no_such_module'; correct" in dev.output
    assert dev.output.endswith("gpuorch: the worker refuses to run; what it says above tells why\n")
    assert "starting it again" not in dev.output and "Traceback" not in dev.output


def gpuorch(url: str, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "GPUORCH_URL": url}
    command = [sys.executable, "-m", "orchestrator", *arguments]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def test_doctor_beside_it_looks_at_its_servers(running):
    shown = gpuorch(running.url, "doctor", "--gpus", "none", cwd=running.log.parent)
    assert shown.returncode == 0, shown
    assert re.search(r"✓ redis: redis://:\*+@127.0.0.1:\d+/0, valkey ", shown.stdout), shown.stdout
    assert "this node has 0; by this shell's settings; those of the `gpuorch dev` here: gpuorch gpus" in shown.stdout
    named = gpuorch(running.url, "doctor", "--redis-url", "redis://127.0.0.1:1/0", cwd=running.log.parent)
    assert named.returncode == 1 and "✗ redis: redis://127.0.0.1:1/0" in named.stdout, "who names one means it"
    assert "by this shell's settings" not in named.stdout


def test_a_command_of_our_own_under_a_lease(running):
    look = f"{sys.executable} -m orchestrator gpus; echo seen=$CUDA_VISIBLE_DEVICES; exit 5"
    shown = gpuorch(running.url, "run", "--min-memory-mb", "8000", "--", "sh", "-c", look)
    assert shown.returncode == 5, shown
    assert re.search(r"seen=SIM-\S+-\d", shown.stdout) and "8000 leased" in shown.stdout, shown.stdout
    free = lambda: "leased" not in gpuorch(running.url, "gpus").stdout.rpartition("█ leased")[0]
    wait_until(free, timeout=PATIENCE_S, what="a sample shows that its processes are gone")
