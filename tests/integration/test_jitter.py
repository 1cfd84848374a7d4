"""The command that holds processes up is one that can be trusted."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

JITTER = [sys.executable, str(Path(__file__).with_name("jitter.py")), "--longest-ms", "10"]
STOPPED = """
import os, signal, subprocess, sys, time
below = subprocess.Popen(["sleep", "60"])
os.kill(below.pid, signal.SIGSTOP)
os.waitid(os.P_PID, below.pid, os.WSTOPPED | os.WNOWAIT)
until = time.monotonic() + 0.5
while time.monotonic() < until:
    assert open(f"/proc/{below.pid}/stat").read().rpartition(")")[2].split()[0] == "T"
    time.sleep(0.001)
below.kill()
sys.exit(7)
"""


def test_it_ends_as_its_command_does() -> None:
    """With that exit code, having stopped what ran, and left alone what another had stopped."""
    done = subprocess.run(
        [*JITTER, sys.executable, "-c", STOPPED], capture_output=True, text=True, check=False
    )
    count, _, rest = done.stderr.partition(" ")
    assert (done.returncode, rest) == (7, "stops\n"), done.stderr
    assert int(count) > 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_its_command(number: signal.Signals) -> None:
    """As it is ended itself, and nobody stays stopped."""
    for _ in range(3):
        with subprocess.Popen([*JITTER, "sleep", "60"]) as process:
            below = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            deadline = time.monotonic() + 30.0
            while not (pid := below.read_text().strip()):
                assert time.monotonic() < deadline
            process.send_signal(number)
            assert process.wait(30.0) == 128 + number
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < deadline, Path(f"/proc/{pid}/stat").read_text()


def test_a_killed_command_is_128_and_the_signal() -> None:
    """As a shell has it."""
    done = subprocess.run([*JITTER, "sh", "-c", "kill -9 $$"], check=False)
    assert done.returncode == 137
