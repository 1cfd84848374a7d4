"""What `python -m benchmarks` and each work are told."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["RESULTS", "Options", "parse"]

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Options:
    """`rounds`: None for the work's own number. `quick`: small sizes, to see that a work runs. `out`:
    where the results go; None: nowhere.
    """

    rounds: int | None = None
    quick: bool = False
    peers: bool = True
    out: Path | None = None

    def rounds_or(self, usual: int) -> int:
        """How many rounds: as told; one of a quick run; or as the work usually has it."""
        return self.rounds or (1 if self.quick else usual)

    def size(self, usual: int, quick: int) -> int:
        """The size of a work."""
        return quick if self.quick else usual


def parse(
    arguments: Sequence[str] | None, program: str, about: str, names: Sequence[str] = ()
) -> tuple[Options, list[str]]:
    """The options and, where there are `names`, those that were chosen."""
    parser = ArgumentParser(program, description=about)
    if names:
        parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--rounds", type=int, help="instead of each work's own number")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--no-peers", action="store_true", help="ours alone")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help=f"for the results; {RESULTS.relative_to(RESULTS.parents[1])}, and nowhere when quick",
    )
    read = parser.parse_args(arguments)
    chosen: list[str] = getattr(read, "names", [])
    if unknown := [name for name in chosen if name not in names]:
        parser.error(f"no such work: {', '.join(unknown)}; there are {', '.join(names)}")
    out = read.out or (None if read.quick else RESULTS)
    return Options(read.rounds, read.quick, not read.no_peers, out), chosen
