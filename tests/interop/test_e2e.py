"""The whole picture, small: two example engines behind the real vllm-router, one of them killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from interop_process import venv_python

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
REQUESTS = 60


def test_requests_go_to_their_prefix_and_no_credit_is_wrong() -> None:
    """`kvevents demo --router`, with one JSON object and exit code 0: by kv_aware nearly all requests go
    to the longest prefix, and more is hit than by round_robin, with the same tokens; of the killed engine
    only what it still holds is counted, and something is.
    """
    program = venv_python("vllm-router").parent / "vllm-router"
    command = [sys.executable, "-m", "publisher.cli", "demo", "--json"]
    done = subprocess.run(
        [*command, "--router", str(program), "--requests", str(REQUESTS), "--page-size", "8"],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    ours, theirs = found["kv_aware"], found["round_robin"]
    assert ours["answered"] == theirs["answered"] == REQUESTS
    assert ours["to_longest_prefix"] >= 0.9 > theirs["to_longest_prefix"]
    assert ours["hit_rate"] > theirs["hit_rate"]
    assert ours["decidable"] > 10
    assert found["same_answers"] is True
    assert found["outage"]["worker"] == "worker0"
    after = found["afterwards"]
    assert after["wrong"] == 0
    assert 0 < after["credited"] <= after["worth"]
    assert found["problems"] == []
