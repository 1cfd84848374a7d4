"""Runs a command as on a machine that is never quiet: now one, now another of the processes below it
stands still for a moment.

`jitter.py [--longest-ms N] [--pause-ms N] COMMAND...` ends with the exit code of the command, and ends it
when it is ended. A test that takes its turn of the machine for granted fails under it sooner or later;
one that stops a process itself may, once in a long while, find it going again.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from stress_child import adopt_orphans, descendants


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--longest-ms", type=float, default=150.0, help="of a stop (150)")
    parser.add_argument("--pause-ms", type=float, default=30.0, help="on average, between two (30)")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if not options.command:
        parser.error("COMMAND: there is none")
    adopt_orphans()
    ending: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):  # and nobody stays stopped
        signal.signal(number, lambda number, _: ending.append(number))
    process = subprocess.Popen(options.command)
    stops = 0
    while process.returncode is None:
        if ending:
            process.terminate()
            process.wait()
            return 128 + ending[0]
        if running := [pid for pid in descendants(os.getpid()) if _runs(pid)]:
            stops += _hold_up(random.choice(running), options.longest_ms / 1000)
        time.sleep(random.uniform(0, options.pause_ms / 500))
        _reap(process)
    print(f"{stops} stops", file=sys.stderr)
    code: int = process.returncode
    return code if code >= 0 else 128 - code


def _runs(pid: int) -> bool:
    """Whether it is neither over nor stopped by somebody else."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "RSD"
    return False


def _hold_up(pid: int, longest_s: float) -> bool:
    """Returns whether it was there."""
    try:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(random.uniform(0.005, max(0.005, longest_s)))
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return False
    return True


def _reap(process: subprocess.Popen[bytes]) -> None:
    """What has ended: the command, and whoever had lost its parent."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == process.pid:
                process.returncode = os.waitstatus_to_exitcode(ended[1])


if __name__ == "__main__":
    sys.exit(main())
