"""`gpuorch run`: a command under a lease behaves as if it had been started without, and leaves nothing behind."""

import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from orchestrator.cli import run
from orchestrator.client import lease
from tests.client.conftest import NODE, Orchestrator
from tests.processes import alive, status
from tests.proxy import Proxy
from tests.servers import free_port
from tests.waiting import wait_until

PATIENCE_S = 30.0
#: Seconds that a lease lives: one whose end is waited for; and one that the server ends, which says so with the next
#: heartbeat, a third of it later, long before a busy machine makes its holder give it up.
TTL_S, KEPT_S = 3.0, 9.0
GPUORCH = [sys.executable, "-m", "orchestrator"]


@pytest.fixture
def start(server: Orchestrator, spawn: Callable[..., Any]) -> Callable[..., Any]:
    """`start("sh", "-c", …, flags=["--ttl", "3"])`: the command under a lease of 4000 MB.

    Forked; with `program` as a user starts it, where what a program begins with may count.
    """

    def begin(*command: str, flags: tuple[str, ...] = (), program: bool = False, **given: Any) -> Any:
        words = ["run", "--min-memory-mb", "4000", *flags, "--", *command]
        if program:
            return spawn([*GPUORCH, *words], **given)
        return spawn(words, loaded="orchestrator.cli.leased", **given)

    return begin


def line(child: Any) -> str:
    found: str = child.stdout.readline()
    return found.rstrip("\n")


def ended(child: Any, told: str = "") -> tuple[int, str, str]:
    """When its input ended, after this; what it says fits into its pipes."""
    if child.stdin is not None and not child.stdin.closed:
        with child.stdin:
            child.stdin.write(told)
    code = child.wait(PATIENCE_S)
    return code, child.stdout.read(), child.stderr.read()


# --- as if it had been started without ---


def test_the_command_sees_its_gpu_and_its_streams(start, server: Orchestrator):
    script = "echo $CUDA_VISIBLE_DEVICES $CUDA_DEVICE_ORDER; cat; echo oops >&2; exit 7"
    child = start("sh", "-c", script, stdin=subprocess.PIPE, program=True)
    assert line(child) == "GPU-0 PCI_BUS_ID"
    [row] = server.leases()
    assert (row.memory_mb, row.ttl_seconds) == (4000, 60)
    assert ended(child, "through\n") == (7, "through\n", "oops\n")
    assert server.leases() == []


@pytest.mark.parametrize("text", [f'node_id = "{NODE}"', "node_id = 7"])
def test_the_machine_is_the_one_that_the_settings_name(start, monkeypatch: pytest.MonkeyPatch, tmp_path, text: str):
    (tmp_path / "orchestrator.toml").write_text(text)
    monkeypatch.setenv("ORCH_CONFIG", str(tmp_path / "orchestrator.toml"))
    monkeypatch.setenv("ORCH_NODE_ID", "elsewhere")
    code, said, complaint = ended(start("echo", "ran", flags=("--wait", "0")))
    if NODE in text:
        assert (code, said, complaint) == (0, "ran\n", "")
    else:
        assert (code, said) == (1, "") and "node_id = 7" in complaint
    named = start("echo", "ran", flags=("--node", NODE, "--wait", "0"))
    assert ended(named) == (0, "ran\n", ""), "who names it needs no settings"


def test_flags_reach_the_lease_and_arguments_the_command(start, server: Orchestrator):
    flags = ("--agent", "ann", "--ttl", "9", "--cpu-fallback", "--gpu-count", "2")
    child = start("sh", "-c", 'echo "[$CUDA_VISIBLE_DEVICES]" "$@"; read x', "sh", "--wait", "-h", flags=flags)
    assert line(child) == "[] --wait -h"
    code, _, _ = ended(child)
    assert code == 1  # end of input
    [row] = server.leases("released")
    assert (row.agent_name, row.ttl_seconds, row.mode) == ("ann", 9, "cpu")


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("exit 3", 3),
        ("kill -SEGV $$", 139),
        # A pipe that nobody reads any more ends its writer silently, as in any shell.
        ("yes | head -n 1", 141),
    ],
)
def test_the_exit_code_is_the_command_s(start, server: Orchestrator, script, code):
    found, _, err = ended(start("bash", "-c", f"set -o pipefail; {script}"))
    assert (found, err) == (code, "")
    assert server.leases() == []


def ignored_and_blocked(status: str) -> list[int]:
    """Below 32: libc keeps two more for itself."""
    return [int(found, 16) & 0x7FFFFFFF for found in re.findall(r"^Sig(?:Blk|Ign):\s*(\w+)", status, re.MULTILINE)]


def test_what_the_interpreter_does_to_signals_is_not_passed_on(start):
    plain = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True, check=True).stdout
    child = start("cat", "/proc/self/status", program=True)
    assert ignored_and_blocked(ended(child)[1]) == ignored_and_blocked(plain)


def test_open_files_are_passed_on(start, tmp_path):
    (tmp_path / "file").write_text("inherited\n")
    with (tmp_path / "file").open() as file:
        child = start("bash", "-c", f"cat <&{file.fileno()}", pass_fds=[file.fileno()], program=True)
        assert ended(child)[:2] == (0, "inherited\n")


def test_commands_that_cannot_be_started_take_no_lease(server: Orchestrator, tmp_path, monkeypatch, capsys):
    (tmp_path / "plain").write_text("#!/bin/sh\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for command, code in (("no-such-command", 127), ("./no/such/file", 127), ("plain", 126), (str(tmp_path), 126)):
        assert run(["run", "--min-memory-mb", "1", command]) == code
        assert command in capsys.readouterr().err
    assert server.leases() + server.leases("released") == []


def test_a_command_that_the_kernel_refuses(start, server: Orchestrator, tmp_path):
    (tmp_path / "broken").write_text("#!/no/such/interpreter\n")
    (tmp_path / "broken").chmod(0o755)
    code, _, err = ended(start(str(tmp_path / "broken")))
    assert code == 127 and "No such file" in err and "Traceback" not in err
    assert len(server.leases("released")) == 1


# --- denied ---


def test_denied_without_waiting(start, server: Orchestrator):
    with lease(min_memory_mb=9000):
        code, out, err = ended(start("echo", "ran", flags=("--wait", "0")))
    assert (code, out) == (1, "")
    assert "needs 4000 MB" in err and "0 of 9000 MB free" in err and "Traceback" not in err


def test_waiting_says_why_once_and_then_runs(start, server: Orchestrator):
    with lease(min_memory_mb=9000):
        child = start("echo", "ran")
        assert child.stderr is not None
        told = child.stderr.readline()
        assert "waiting: needs 4000 MB" in told and "0 of 9000 MB free" in told
    assert ended(child) == (0, "ran\n", "")


def test_a_wait_has_an_end(start, server: Orchestrator):
    with lease(min_memory_mb=9000):
        code, out, err = ended(start("echo", "ran", flags=("--wait", "4")))
    assert (code, out) == (1, "") and err.count("needs 4000 MB") == 2  # why it waits, and why it gave up


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_wait(start, server: Orchestrator, number):
    with lease(min_memory_mb=9000):
        child = start("echo", "ran")
        assert child.stderr is not None and "waiting" in child.stderr.readline()
        child.send_signal(number)
        code, out, err = ended(child)
        assert (code, out) == (128 + number, "") and "Traceback" not in err
        assert len(server.leases()) == 1


def test_what_was_ignored_stays_so(server: Orchestrator, spawn):
    """SIGHUP by nohup; SIGCHLD by a careless parent, and still the command's end is heard of."""
    command = [
        "env",
        "--ignore-signal=HUP,CHLD",
        *GPUORCH,
        "run",
        "--min-memory-mb",
        "4000",
        "--",
        "sh",
        "-c",
        "exit 9",
    ]
    with lease(min_memory_mb=9000):
        child = spawn(command)
        assert child.stderr is not None and "waiting" in child.stderr.readline()
        child.send_signal(signal.SIGHUP)
    assert ended(child)[0] == 9


def test_a_server_that_is_not_there(start):
    code, _, err = ended(start("echo", "ran", flags=("--url", f"http://127.0.0.1:{free_port()}")))
    assert code == 3 and "gpuorch dev" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["true"],
        ["--min-memory-mb", "1"],
        ["--min-memory-mb", "0", "true"],
        ["--min-memory-mb", "1", "--ttl", "0", "true"],
        ["--min-memory-mb", "1", "--no-such-flag", "true"],
        ["--min-memory-mb", "1", "--url", "nonsense", "true"],
    ],
)
def test_wrong_usage_is_2(arguments, capsys):
    assert run(["run", *arguments]) == 2
    assert "Error" in capsys.readouterr().err


# --- signals ---


def test_signals_are_passed_on(start):
    names = ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "WINCH")
    traps = "".join(f"trap 'echo {name}' {name}; " for name in names)
    child = start("bash", "-c", f"{traps} trap 'exit 5' ALRM; echo $$; while :; do sleep 0.05; done")
    pid = int(line(child))
    for name in names:
        child.send_signal(getattr(signal, f"SIG{name}"))
        assert line(child) == name
    os.kill(pid, signal.SIGALRM)
    assert ended(child)[0] == 5


def test_a_command_that_dies_of_a_signal(start, server: Orchestrator):
    child = start("sh", "-c", "echo ready; exec sleep 600")
    assert line(child) == "ready"
    child.send_signal(signal.SIGTERM)
    assert ended(child) == (143, "", "")
    assert server.leases() == []


def test_a_command_dies_with_us(start, server: Orchestrator):
    """However we end, and with what it started."""
    child = start("sh", "-c", "sleep 600 & echo $$ $!; wait", flags=("--ttl", str(TTL_S)))
    command, started = map(int, line(child).split())
    assert alive(command) and alive(started)
    child.kill()
    wait_until(lambda: not alive(command) and not alive(started), what="both are gone")
    wait_until(lambda: server.leased_mb() == 0, timeout=PATIENCE_S, what="its memory is free")


# --- nothing is left behind ---


@pytest.mark.parametrize("how", ["", "setsid "])
def test_what_the_command_left_behind_is_ended_before_the_release(start, server: Orchestrator, how, tmp_path):
    """Also when it moved to a session of its own: it would go on using the GPU."""
    seen = tmp_path / "leases-at-its-end"
    program = (
        "import os, signal, sys, time, urllib.request\n"
        "asked = []\n"
        "def look(*_):\n"
        "    asked.append(1)\n"
        "    body = urllib.request.urlopen(os.environ['GPUORCH_URL'] + '/leases', timeout=10).read()\n"
        f"    open({str(seen)!r}, 'wb').write(body)\n"
        "    time.sleep(0.5)\n"
        "    assert len(asked) == 1, 'asked again in the middle of it'\n"
        "    os._exit(0)\n"
        "signal.signal(signal.SIGTERM, look)\n"
        "print(os.getpid(), flush=True)\n"
        "time.sleep(600)\n"
    )
    (tmp_path / "orphan.py").write_text(program)
    orphan = f"{how}{sys.executable} {tmp_path / 'orphan.py'} &"
    child = start("bash", "-c", f"{orphan} read x; exit 6", flags=("--grace", "30"), stdin=subprocess.PIPE)
    pid = int(line(child))
    code, _, err = ended(child)
    assert code == 6 and "left processes behind" in err
    assert not alive(pid)
    assert seen.exists() and "AssertionError" not in err, err
    assert b'"active"' in seen.read_bytes()
    assert server.leases() == []


def test_what_does_not_hear_is_killed(start, server: Orchestrator):
    stubborn = "(trap '' TERM; setsid sh -c 'trap \"\" TERM; echo $$; while :; do sleep 1; done') &"
    child = start("bash", "-c", f"{stubborn} read x", flags=("--grace", "0.5"), stdin=subprocess.PIPE)
    pid = int(line(child))
    assert ended(child)[0] == 1  # read met the end
    assert not alive(pid)
    assert server.leases() == []


# --- lost ---


def test_a_lost_lease_ends_the_command(start, server: Orchestrator):
    child = start(
        "bash", "-c", "trap 'echo bye; exit 0' TERM; echo ready; sleep 600 & wait", flags=("--ttl", str(KEPT_S))
    )
    assert line(child) == "ready"
    server.end_leases()
    code, out, err = ended(child)
    assert (code, out) == (75, "bye\n")
    assert "the lease is lost (410 lease_ended" in err


def test_a_command_that_is_stopped_hears_of_it_too(start, server: Orchestrator):
    child = start("bash", "-c", "trap 'echo bye; exit 0' TERM; echo $$; sleep 600 & wait", flags=("--ttl", str(KEPT_S)))
    os.kill(int(line(child)), signal.SIGSTOP)
    server.end_leases()
    assert ended(child)[:2] == (75, "bye\n")


def test_a_command_that_does_not_end_by_itself_is_killed(start, server: Orchestrator):
    deaf = "trap '' TERM; echo $$; while :; do sleep 0.1; done"
    child = start("bash", "-c", deaf, flags=("--ttl", str(KEPT_S), "--grace", "0.5"))
    pid = int(line(child))
    server.end_leases()
    assert ended(child)[0] == 75
    assert not alive(pid)


def test_a_server_that_is_away_for_too_long_ends_the_command(start, server: Orchestrator):
    with Proxy(int(server.url.rpartition(":")[2])) as proxy:
        flags = ("--ttl", str(TTL_S), "--url", f"http://127.0.0.1:{proxy.port}")
        child = start("sh", "-c", "echo ready; exec sleep 600", flags=flags)
        assert line(child) == "ready"
        proxy.refuse()
        code, _, err = ended(child)
    assert code == 75 and "no heartbeat" in err


# --- on a terminal ---


class Shell:
    """An interactive bash on a terminal of its own."""

    def __init__(self) -> None:
        self._fd, terminal = pty.openpty()
        environment = os.environ | {"PS1": "$ ", "TERM": "dumb", "PYTHONPATH": os.pathsep.join(sys.path)}
        bash = ["setsid", "--ctty", "bash", "--norc", "--noprofile", "-i"]
        self._process = subprocess.Popen(bash, env=environment, stdin=terminal, stdout=terminal, stderr=terminal)
        os.close(terminal)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def expect(self, pattern: str) -> re.Match[str]:
        """Wait for output after what was matched last."""
        deadline = time.monotonic() + PATIENCE_S
        while (found := re.search(pattern, self.seen)) is None:
            ready = select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))[0]
            assert ready, f"no {pattern!r} in {self.seen!r}"
            self.seen += os.read(self._fd, 65536).decode(errors="replace")
        self.seen = self.seen[found.end() :]
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)
        os.close(self._fd)


@pytest.fixture
def shell(server: Orchestrator) -> Iterator[Shell]:
    opened = Shell()
    yield opened
    opened.close()


def leased(command: str) -> str:
    return f"{shlex.join([*GPUORCH, 'run', '--min-memory-mb', '4000', '--'])} {command}"


def test_the_command_has_the_terminal(shell: Shell, server: Orchestrator):
    look = "import os; print('foreground', os.tcgetpgrp(0) == os.getpgrp())"
    shell.type(f"{leased(shlex.join([sys.executable, '-c', look]))}\n")
    shell.expect(r"\nforeground True")
    shell.expect(r"\$ ")
    shell.type(f"{leased('cat')}; echo code=$?\n")
    wait_until(server.leases, timeout=PATIENCE_S)
    shell.type("hello\n")
    shell.expect(r"hello\r\nhello")  # the terminal's echo, and cat's
    shell.type("\x03")
    shell.expect(r"code=130")
    assert server.leases() == []


def test_ctrl_z_and_back(shell: Shell, server: Orchestrator):
    shell.type(f"{leased('cat')} | cat\n")
    wait_until(server.leases, timeout=PATIENCE_S)
    shell.type("one\n")
    shell.expect(r"one\r\none")
    shell.type("\x1a")
    shell.expect(r"Stopped")
    shell.type("echo in the shell\n")
    shell.expect(r"in the shell\r\nin the shell")
    shell.type("fg\n")
    shell.expect(r"cat")
    shell.type("two\n")
    shell.expect(r"two\r\ntwo")
    shell.type("\x04")
    shell.expect(r"\$ ")
    shell.type("echo back=$?\n")
    shell.expect(r"back=0")
    wait_until(lambda: not server.leases(), what="released")


def test_from_the_background_to_the_foreground(shell: Shell, server: Orchestrator):
    shell.type(f"{leased('cat')} & echo pid=$!\n")
    pid = int(shell.expect(r"pid=(\d+)")[1])
    wait_until(
        lambda: (known := status(pid)) and known.state == "T",
        timeout=PATIENCE_S,
        what="stopped: cat reads, and others have the terminal",
    )
    assert len(server.leases()) == 1
    shell.type("fg\n")
    shell.expect(r"fg\r\n.*cat")
    shell.type("hello\n")
    shell.expect(r"hello\r\nhello")
    shell.type("\x04")
    shell.expect(r"\$ ")
    shell.type("echo back=$?\n")
    shell.expect(r"back=0")


def test_brought_to_the_foreground_before_it_reads(shell: Shell, server: Orchestrator, tmp_path):
    """A shell does not continue what it never stopped: the command finds out by reading."""
    waiting = f"sh -c 'until test -e {tmp_path}/go; do sleep 0.05; done; cat'"
    shell.type(f"{leased(waiting)} &\n")
    wait_until(server.leases, timeout=PATIENCE_S)
    shell.type("fg\n")
    shell.expect(r"fg\r\n.*cat")
    (tmp_path / "go").touch()
    shell.type("hello\n")
    shell.expect(r"hello\r\nhello")
    shell.type("\x03")
    shell.expect(r"\$ ")
    shell.type("echo back=$?\n")
    shell.expect(r"back=130")
