"""The stand-in driver, built once and loaded into this process once; each test has GPUs of its own."""

import ctypes
from pathlib import Path

import pytest

from orchestrator.gpu import processes
from orchestrator.gpu.real import NvmlGpus
from tests.gpu.driver import VARIABLE, Driver


@pytest.fixture
def driver(driver_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """What the binding finds in this process from now on: a library that is loaded is found by its name alone."""
    ctypes.CDLL(str(driver_library))
    driver = Driver(tmp_path / "gpus", driver_library)
    monkeypatch.setenv(VARIABLE, str(driver.path))
    # Tests may run in a container, where this is not so; one test says otherwise.
    monkeypatch.setattr(processes, "driver_ids_are_ours", lambda: True)
    return driver


@pytest.fixture
def gpus(driver: Driver):
    """Without the pause between two attempts to open the driver anew."""
    backend = NvmlGpus(reopen_s=0.0)
    yield backend
    driver.heal()
    backend._close()
