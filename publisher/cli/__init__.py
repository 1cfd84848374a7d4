"""The `kvevents` command. Each command has a module here: its options, and what it runs.

Exit codes: 0 ok, 1 findings (what was looked for is not so), 2 usage, 3 no connection, 70 a fault of
ours, 130 Ctrl-C.

It imports nothing at first, not even `typing`: Ctrl-C while Python imports would be a traceback.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. None: with the arguments of this process."""
    try:
        from publisher.cli.process import run

        return run(arguments)
    except KeyboardInterrupt:
        return 130
