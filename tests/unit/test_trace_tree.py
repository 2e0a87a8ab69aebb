"""The receiver for the terminal: spans in, trees out."""

import os
import subprocess
import sys
from pathlib import Path

from orchestrator.store.claim import Claim
from orchestrator.store.settle import End, Outcome
from orchestrator.telemetry import exporting, traceparent, tracing
from orchestrator.telemetry.spans import Spans

PROGRAM = Path(__file__).parents[2] / "examples" / "trace_tree.py"


def test_without_the_extra_it_says_what_to_install(tmp_path):
    (tmp_path / "opentelemetry.py").write_text("")  # a module that has nothing below it
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    found = subprocess.run([sys.executable, str(PROGRAM)], env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 1 and "pip install '/path/to/clone[tracing]'" in found.stderr
    assert found.stderr.count("\n") == 1


def test_a_trace_is_printed_as_a_tree(monkeypatch):
    # All of them in one request, at the end: a trace is printed when nothing more came of it for a while.
    monkeypatch.setattr(exporting, "LINGER_MS", 60_000)
    monkeypatch.setattr(exporting, "CLOSE_S", 60.0)
    with subprocess.Popen(
        [sys.executable, str(PROGRAM), "--port", "0", "--quiet", "0.5", "--traces", "1"],
        stdout=subprocess.PIPE,
        text=True,
    ) as printing:
        assert printing.stdout is not None
        endpoint = printing.stdout.readline().split()[-1]
        spans = Spans(exporting.exporter_to(endpoint), "test")
        with spans.submitting(None, {}) as submit:
            claim = Claim("j", 1, "t", "{}", "a", None, None, submit.context, None)
            lost = [End("j", n, Outcome.FAILED, error="killed", trace_context=submit.context) for n in (1, 2)]
            spans.claimed([claim], tracing.moment(), tracing.moment(), "w")
            spans.died(lost[:1], 0.0, "w")
            spans.died(lost[1:], 0.0, "w")
        spans.close()
        lines = [line.rstrip() for line in printing.stdout.read().splitlines() if line]
    assert lines[0] == f"trace {traceparent.trace_id(submit.context)}: 5 spans"
    tree = [line[23:] for line in lines[2:]]
    assert tree[0] == "submit  (test)"
    assert sorted(tree[1:3]) == ["├─ claim attempt=1 lease=none (test)", "├─ wait attempt=1 (test)"]
    assert tree[3:] == [
        "├─ job attempt=1 outcome=failed ERROR 'killed' (test)",
        "└─ job attempt=2 outcome=failed ERROR 'killed' (test)  ↩ job attempt=1",
    ]
