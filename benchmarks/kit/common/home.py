"""Where install.sh puts the peers."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["bench_home"]


def bench_home() -> Path:
    """BENCH_HOME, or a folder among the user's caches."""
    return Path(os.environ.get("BENCH_HOME") or Path.home() / ".cache/kvevents-bench").absolute()
