"""The ports that tests are given, which run in several processes at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ports_rig import free_ports

COUNT = 300
GIVE = f"from ports_rig import free_ports; print(*free_ports({COUNT}), flush=True); input()"


def test_no_process_is_given_what_another_is() -> None:
    """A port is often bound a while after it was given out, or once more after a restart."""
    others = [
        subprocess.Popen(
            [sys.executable, "-c", GIVE],
            cwd=Path(__file__).with_name("rigs"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    given = free_ports(COUNT)
    for other in others:
        assert other.stdout is not None
        given += map(int, other.stdout.readline().split())
    for other in others:
        other.communicate("\n")
    assert len(given) == len(set(given)) == 3 * COUNT
