"""Which backend a node gets, and that processes of their own find the library as they would find the real one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.cli import doctor
from orchestrator.errors import GpuUnavailable
from orchestrator.gpu.backends import choose
from orchestrator.gpu.simulated import ROOT_VARIABLE, allocated

A = "GPU-aaaa"
ROOT = Path(__file__).parents[2]
ASK = """
import sys
from pathlib import Path
from orchestrator.errors import GpuUnavailable
from orchestrator.gpu.backends import choose
backend = choose(sys.argv[1], "node", Path("data"))
try:
    print(backend.name, *(f"{gpu.uuid}={gpu.free_mb}:{gpu.health}" for gpu in backend.sample()))
except GpuUnavailable as error:
    print(backend.name, error)
"""


def ask(spec: str, environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", ASK, spec],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.strip()


@pytest.mark.parametrize("spec", ["auto", "nvml"])
def test_another_process_finds_the_gpus(driver, spec):
    driver.add_gpu(A, 10_000)
    driver.set_used(A, 4000)
    assert ask(spec, driver.environment()) == f"nvml {A}=6000:ok"


@pytest.mark.parametrize("spec", ["auto", "nvml"])
@pytest.mark.parametrize("code", [4, 9, 18, 999])
def test_a_driver_that_is_ill_does_not_pass_for_no_gpus(driver, spec, code):
    driver.fail("init", code)
    assert ask(spec, driver.environment()).startswith("nvml ")


def test_without_the_library_auto_is_none_and_nvml_says_why(tmp_path):
    # Not merely absent, since this machine may have a real one: found first, and not to be loaded.
    (tmp_path / "libnvidia-ml.so.1").write_text("")
    environment = {"LD_LIBRARY_PATH": str(tmp_path)}
    assert ask("auto", environment) == "none"
    assert ask("nvml", environment).startswith("nvml libnvidia-ml.so.1 cannot be loaded; install the NVIDIA driver")


def test_simulated_gpus_answer_the_same_questions(tmp_path, monkeypatch):
    backend = choose("sim:2x1000", "node", tmp_path)
    monkeypatch.setenv(ROOT_VARIABLE, backend.environment()[ROOT_VARIABLE])
    first, second = (gpu.uuid for gpu in backend.sample())
    with allocated(first, 300):
        assert backend.free_mb([first, second]) == {first: 700, second: 1000}
        assert [process.pid for process in backend.holders([first])[first] or ()] == [os.getpid()]
    assert backend.holders([first]) == {first: ()}
    assert backend.about() == "SIMULATED"


def test_a_node_without_gpus_has_nothing_to_start_on(tmp_path):
    backend = choose("none", "node", tmp_path)
    assert (backend.sample(), backend.free_mb([]), backend.holders([])) == ([], {}, {})
    with pytest.raises(GpuUnavailable, match="no GPU of this node is GPU-x"):
        backend.free_mb(["GPU-x"])


def test_the_stand_in_frees_what_the_dead_held(driver, gpus):
    driver.add_gpu(A, 10_000)
    child = subprocess.Popen(["sleep", "60"])
    try:
        with driver.allocated(A, 4000, pid=child.pid):
            assert gpus.free_mb([A]) == {A: 6000}
            child.kill()
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            assert gpus.free_mb([A]) == {A: 10_000}  # a zombie holds nothing
    finally:
        child.wait()


def test_the_doctor_looks_at_every_gpu(driver, settings, tmp_path):
    driver.add_gpu(A, 10_000)
    driver.add_gpu("GPU-bbbb", bus=0x81, ecc=3)
    findings = list(doctor._gpus(settings(gpu_backend="nvml", data_dir=tmp_path)))
    assert [(finding.check, finding.ok) for finding in findings] == [("gpus", True), ("gpu 0", True), ("gpu 1", False)]
    assert findings[0].detail == "nvml: driver 580.65.06, NVML 13.580.65.06; this node has 2"
    assert findings[1].detail == f"{A}, NVIDIA A10, 10000 of 10000 MB free, ok"
    assert "unhealthy: 3 uncorrectable memory errors" in findings[2].detail


def test_the_doctor_says_why_there_are_no_gpus(driver, settings, tmp_path):
    driver.fail("init", 18)
    (finding,) = doctor._guarded("gpus", lambda: doctor._gpus(settings(gpu_backend="nvml", data_dir=tmp_path)))
    assert (finding.check, finding.ok) == ("gpus", False)
    assert "versions differ" in finding.detail
