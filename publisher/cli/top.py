"""`kvevents top`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from publisher.cli.parsing import (
    FINDINGS,
    NO_CONNECTION,
    Parser,
    add_color,
    add_sources,
    check_seconds,
    read_keys,
    read_sources,
    say,
)

if TYPE_CHECKING:
    from publisher.tools.fleet.top import Board
    from publisher.tools.source import Sources

__all__ = ["add_options", "run"]

_ONCE_S = 2.0
_HOTTEST = 10
_SORTS = (
    *("worker", "rank", "ev/s", "stored/s", "removed/s", "GPU", "CPU", "DISK", "EXT", "lag", "seq"),
    *("gaps", "lost", "replays", "restarts", "findings"),
)
"""As `Board` has them; here, so that the help imports no sockets."""
_LONGEST_JOIN_S = 15.0
"""How long a look waits for what is being replayed."""
_TICK_S = 0.05

_DESCRIPTION = """\
A live table of workers: rates, blocks, gaps; and the hottest prefixes.
Ctrl-C ends it.

A row for each worker and rank:
  rank        data-parallel rank, of whoever has several
  link        up, down, or file: a capture
  ev/s        events a second that came live in the last 10 s; -: its replay is
              not over
  stored/s    blocks stored a second; removed/s: removed
  GPU ... EXT blocks held now: on the device, CPU (host), DISK, EXT(ernal)
  lag p50     from a batch's own time to its arrival, median; p99: of the
              slowest 1 %; clocks that differ show in it
  seq         number of the last batch
  gaps        times that batches did not come live
  lost        batches that nobody has any more; a note says where that may be
              our own fault, because we read too slowly
  replays     times that the replay endpoint was asked
  restarts    times that the publisher began anew
  findings    what kvevents check would call a violation
Of a stream's rows the first alone has what is of the whole stream. A row is
one line: where a terminal is narrow, columns are left out, first those in
which all is 0, then those that tell least. All are there where it is wide, in
-o json, and where --once goes to a file. Rows come first, then two lines of
notes, then as many prefixes as have room; notes that are alike are one.

Below, the prefixes beneath which most blocks were stored in the last minute:
  prefix from, to   hashes of its first block, and of the last before it forks
  blocks, tokens    how long it is
  beneath           blocks held that begin with it, its own too
  held by           ranks that hold all of it
  stores, again     blocks stored in that minute; those that had been dropped
"""

_EPILOG = """\
examples:
  kvevents top w1=tcp://10.0.0.5:5557,5558 w2=tcp://10.0.0.6:5557,5558
  kvevents top tcp://10.0.0.5:5557,5558 --once --for 10
  kvevents top tcp://10.0.0.5:5557,5558 -o json | jq '.rows[] | {worker, lost}'
  kvevents top w1=tcp://10.0.0.5:5557,5558 w2=tcp://10.0.0.6:5557,5558 \\
    --sort stored/s --prefixes 0
  kvevents top monday.capture

A capture shows how it ends, with rates over all of its time. Where the output
is no terminal, --once is implied. Its rates are of the time since a stream was
in step: a replay that is under way is waited for, 15 s at the most.

-o json: {at_s, window_s (null: all the time), rows: [{worker, rank, link ("up",
  "down", "file"), events_per_s, stored_per_s, removed_per_s (null: it was never
  in step), blocks: {MEDIUM: count}, held, block_size, lag_p50_s, lag_p99_s,
  seq, gaps, lost, lost_perhaps_ours, replays, restarts, findings, notes}],
  hottest: [{root, tip, blocks, tokens, beneath, workers, stores, again}],
  left_out}; hashes are strings, signed 64 bits

exit codes: 0 ok; 1 a capture is damaged, or what came waits for a replay; 2
  usage; 3 no connection to any, or nothing came
"""


def add_options(parser: Parser) -> None:
    """Of `top`."""
    add_sources(parser)
    parser.add_argument(
        "--once",
        action="store_true",
        help="look for --for seconds from when all is in step, print it once, and end",
    )
    parser.add_argument(
        "--for",
        dest="for_s",
        type=float,
        metavar="S",
        help=f"end after so long ({_ONCE_S:g} with --once, else never)",
    )
    parser.add_argument(
        "--interval",
        dest="interval_s",
        type=float,
        default=1.0,
        metavar="S",
        help="show it anew so often (1)",
    )
    parser.add_argument(
        "--sort",
        choices=_SORTS,
        metavar="COLUMN",
        help=f"the rows with most of it first: {', '.join(_SORTS)} (as they are given)",
    )
    parser.add_argument(
        "--prefixes",
        type=int,
        default=_HOTTEST,
        metavar="N",
        help=f"at most so many prefixes, 0: none ({_HOTTEST})",
    )
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    parser.add_argument(
        "--json", dest="output", action="store_const", const="json", help="the same as -o json"
    )
    add_color(parser)
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def run(options: argparse.Namespace) -> int:
    """Returns the exit code."""
    import math
    import os
    import sys
    import time

    from rich.console import Console

    from publisher.cli.hint import damages, unheard
    from publisher.tools.colour import wants_colour
    from publisher.tools.fleet.screen import watch
    from publisher.tools.fleet.top import Board
    from publisher.tools.source import Sources

    check_seconds("--for", options.for_s)
    check_seconds("--interval", options.interval_s)
    if options.prefixes < 0:
        raise ValueError(f"--prefixes: {options.prefixes} is below 0")
    colours = wants_colour(options.color, sys.stdout, os.environ)
    console = Console(no_color=not colours, highlight=False)
    once = options.once or not sys.stdout.isatty() or console.is_dumb_terminal
    if options.output == "json" and not once:
        raise ValueError("-o json: on a terminal it goes with --once")
    addresses = read_sources(options)
    server_key, client_keys = read_keys(options)
    with Sources(
        addresses, topic=options.topic, server_key=server_key, client_keys=client_keys
    ) as sources:
        once = once or not sources.live
        board = Board(sources.all, windowed=not once, hottest=options.prefixes, sort=options.sort)
        if once:
            _gather(sources, board, _ONCE_S if options.for_s is None else options.for_s)
            _write(board, options, colours=colours)
        else:
            until = math.inf if options.for_s is None else time.monotonic() + options.for_s
            watch(sources, board, console, interval_s=options.interval_s, until=until)
        faults, damaged = damages(sources, board.fleet)
        for line in [*faults, *unheard(options, sources, board.fleet)]:
            say(f"kvevents top: {line}")
        if board.came or board.waits or damaged:
            return FINDINGS if damaged or not board.came else 0
        if not sources.live:
            say("kvevents top: no batch is in what was read")
        return NO_CONNECTION


def _gather(sources: Sources, board: Board, for_s: float) -> None:
    """For so long since the last of them was in step, or until Ctrl-C. A replay is waited for while
    something comes of it, but not for ever.
    """
    import time

    joined, until = 0, time.monotonic() + for_s
    try:
        for one in sources.steps(until + _LONGEST_JOIN_S, _TICK_S):
            if one is not None:
                board.take(*one)
                continue
            now = time.monotonic()
            if board.joined > joined:
                joined, until = board.joined, now + for_s
            if now >= until and not board.joins:
                break
    except KeyboardInterrupt:
        pass
    for one in sources.rest():
        board.take(*one)


def _write(board: Board, options: argparse.Namespace, *, colours: bool) -> None:
    import msgspec

    from publisher.tools.colour import painter
    from publisher.tools.columns import painted
    from publisher.tools.fleet.top import lines
    from publisher.tools.text import json_text

    snapshot = board.snapshot()
    if options.output == "json":
        print(json_text(msgspec.json.format(msgspec.json.encode(snapshot), indent=2)))
        return
    paint = painter(colours=colours)
    for line in lines(snapshot, _width()):
        print(painted(line, paint))


def _width() -> int | None:
    """Of the terminal, also where the output goes to a pipe before it comes there; None: there is none,
    and lines may be of any length.
    """
    import os
    import sys

    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    for stream in (sys.stdout, sys.stderr, sys.stdin):
        try:
            return os.get_terminal_size(stream.fileno()).columns or None
        except (OSError, ValueError):
            continue
    return None
