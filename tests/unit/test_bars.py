"""`gpuorch gpus`: bars that fit, and reasons for what is closed."""

import json
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.cli import bars
from orchestrator.cli.bars import BAR_MAX, print_gpus, why_closed


def gpu(index: int = 0, **fields: Any) -> dict[str, Any]:
    base = {"node_id": "node-1", "gpu_index": index, "name": "NVIDIA H100", "total_mb": 1000, "usable_mb": 900}
    return base | {"leased_mb": 0, "foreign_mb": 0, "health": "ok", "fresh": True} | fields


def drawn(*gpus: dict[str, Any], width: int = 400) -> list[str]:
    return [click.unstyle(line) for line in [*bars.gpu_lines(list(gpus), width), bars.legend(width)]]


def test_a_bar_is_to_scale_with_the_whole_memory():
    _, line, legend = drawn(gpu(leased_mb=250, foreign_mb=125))
    bar = line.split()[3]
    assert {mark: bar.count(mark) for mark in "█▓░·"} == {"█": 10, "▓": 5, "░": 21, "·": 4}
    assert len(bar) == BAR_MAX
    assert line.endswith("525 of 900 MB free, 250 leased, 125 foreign")
    assert legend.split() == ["█", "leased", "▓", "foreign", "░", "free", "·", "kept", "back", "╱", "closed"]


def test_what_there_is_shows_be_it_ever_so_little():
    _, line, _ = drawn(gpu(leased_mb=1, foreign_mb=1))
    assert "█▓░" in line


def test_gpus_of_a_node_stand_together():
    lines = drawn(gpu(0), gpu(1), gpu(0, node_id="node-2"))
    assert [line for line in lines if line.startswith("node")] == ["node-1", "node-2"]
    assert lines[0] == "node-1" and lines[3] == "node-2"


def test_load_and_heat_are_shown_where_they_are_known():
    _, line, _ = drawn(gpu(utilization=0.97, temperature_c=61))
    assert line.endswith("97 % busy, 61 C")
    assert "busy" not in drawn(gpu(utilization=None, temperature_c=None))[1]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"health_reason": None, "quarantined_at": None, "gate_closed_at": None, "reserved_for": None}, None),
        ({"health": "lost", "health_reason": "fell off the bus"}, "lost: fell off the bus"),
        ({"health": "unknown"}, "unknown"),
        ({"fresh": False, "sampled_at": "2026-08-01T10:00:00.123456Z"}, "not measured since 2026-08-01 10:00:00 UTC"),
        (
            {"quarantined_at": "2026-08-01T10:00:00Z", "quarantine_reason": "pid 4711 does not go", "health": "lost"},
            "quarantined since 2026-08-01 10:00:00 UTC: pid 4711 does not go",
        ),
        (
            {"gate_closed_at": "2026-08-01T12:00:01.000000Z"},
            "more memory in use than the gate allows, last at 2026-08-01 12:00:01 UTC",
        ),
        ({"reserved_for": "job-7"}, "reserved for job-7"),
    ],
)
def test_why_a_gpu_is_closed(fields, reason):
    assert why_closed(gpu(**fields)) == reason
    _, line, _ = drawn(gpu(**fields))
    assert line.endswith(reason or "900 of 900 MB free")
    assert ("╱" in line) == (reason is not None)


def test_escapes_do_not_reach_the_terminal():
    assert "\x1b" not in "".join(drawn(gpu(name="\x1b[31mred", node_id="\x1b]0;x", health="\x1b[2J")))


@given(
    width=st.integers(40, 300),
    gpus=st.lists(
        st.builds(
            gpu,
            index=st.integers(0, 127),
            name=st.text(max_size=60),
            total_mb=st.integers(0, 200_000),
            usable_mb=st.integers(0, 200_000),
            leased_mb=st.integers(0, 300_000),
            foreign_mb=st.integers(0, 300_000),
            health=st.sampled_from(["ok", "lost"]),
            health_reason=st.none() | st.text(max_size=200),
            utilization=st.none() | st.floats(0, 1),
        ),
        min_size=1,
        max_size=5,
    ),
)
def test_every_line_fits(width, gpus):
    assert max(map(len, drawn(*gpus, width=width))) <= width


def test_colour_is_for_terminals_only(capsys, monkeypatch):
    print_gpus([gpu(leased_mb=500)])
    assert "\x1b" not in capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    print_gpus([gpu(leased_mb=500)])
    assert "\x1b[36m" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    print_gpus([gpu(leased_mb=500)])
    assert "\x1b" not in capsys.readouterr().out


def test_plain_marks_where_nothing_else_can_be_printed(monkeypatch):
    monkeypatch.setattr(bars, "_has_blocks", lambda: False)
    line = drawn(gpu(leased_mb=500))[1]
    assert line.isascii() and "####" in line and "...." in line


def test_no_gpus(capsys):
    print_gpus([])
    assert capsys.readouterr().out == "no gpus\n"


def test_json_is_what_the_server_said(capsys, monkeypatch):
    from orchestrator.cli import run
    from orchestrator.client.api import Api

    answer = {"gpus": [gpu(surprise="kept")]}
    monkeypatch.setattr(Api, "get", lambda *_: answer)
    assert run(["gpus", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == answer
