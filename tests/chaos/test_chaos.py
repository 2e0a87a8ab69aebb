"""The short run of `make test`: a few hundred jobs, a dozen faults, every invariant checked."""

import os
import subprocess
import sys
import time

import pytest

from tests.chaos import broken
from tests.chaos.clock import COMPILER, Clock
from tests.chaos.faults import FAULTS
from tests.chaos.run import Plan, run

#: The faults that find most: processes killed and frozen, servers lost, answers lost, entries forged.
SHORT = (
    "kill_worker",
    "stop_worker",
    "kill_leader",
    "flush_redis",
    "kill_mariadb",
    "lose_replies",
    "duplicate_entries",
)
JOBS, COUNT = 600, 12


@pytest.mark.timeout(240)
def test_nothing_is_lost_done_twice_or_hung(tmp_path):
    faults = [fault for fault in FAULTS if fault.name in SHORT]
    report = run(Plan(seed=1, jobs=JOBS, faults=COUNT, calm_s=(0.2, 1.5), only=faults), folder=tmp_path)
    concerned = [violation.job_id for violation in report.violations if violation.job_id]
    told = "\n".join(map(str, report.violations[:20])) + "".join(f"\n{report.history.of(job)}" for job in concerned[:3])
    assert not report.violations, told
    assert report.figures["jobs_accepted"] == JOBS
    assert report.figures["faults"] >= COUNT


@pytest.mark.parametrize("name", broken.BUILDS)
def test_a_broken_build_still_finds_what_it_breaks(name, tmp_path):
    broken.build(name, tmp_path)


@pytest.mark.skipif(not COMPILER, reason="no C compiler here")
def test_a_clock_is_wrong_in_the_running_process_and_its_pauses_stay_right(tmp_path):
    clock = Clock(tmp_path / "clock")
    program = "import sys, time\nfor _ in sys.stdin: time.sleep(0.01); print(time.time(), flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, **clock.environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        for error_s in (0, 3600, -3600, 0):
            clock.put_wrong(error_s)
            process.stdin.write("now\n")
            process.stdin.flush()
            assert abs(float(process.stdout.readline()) - time.time() - error_s) < 60
        process.stdin.close()


def test_every_fault_has_a_number_and_a_name_of_its_own():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert all(fault.number.startswith(("F-", "BI-")) for fault in FAULTS)
