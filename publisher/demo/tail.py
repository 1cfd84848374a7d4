"""The demo's `kvevents tail`: the command itself, except that it ends with its parent."""

from __future__ import annotations

import sys

from publisher.cli import main as kvevents
from publisher.demo.child import ParentPipe

__all__ = ["main"]


def main() -> int:
    """Takes the arguments of `kvevents tail`."""
    ParentPipe()
    return kvevents(["tail", "-q", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
