"""All works, one after the other, or those that are named: see report.py for what comes of it."""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module

from benchmarks.figures import Figure
from benchmarks.options import Options, parse
from benchmarks.report import run

WORKS = (
    *(
        "busy_loop",
        "pace",
        "flood",
        "replays",
        "late_join",
        "requests",
        "tiers",
        "memory",
        "growth",
    ),
    *("block_index", "storage"),
)
ALONE = ("sidecar", "segments")
"""Run by name only: they compare us with ourselves, and have tables of their own."""


def main() -> int:
    options, chosen = parse(None, "python -m benchmarks", __doc__ or "", (*WORKS, *ALONE))
    names = [name for name in (*WORKS, *ALONE) if name in (chosen or WORKS)]
    code = 0
    for name in ALONE:
        if name in names:
            code |= import_module(f"benchmarks.{name}").main()
    works = {name: partial(_measure, name) for name in names if name in WORKS}
    return code | (run(works, options, whole=not chosen) if works else 0)


def _measure(name: str, options: Options) -> list[Figure]:
    found: list[Figure] = import_module(f"benchmarks.{name}").measure(options)
    return found


if __name__ == "__main__":
    sys.exit(main())
