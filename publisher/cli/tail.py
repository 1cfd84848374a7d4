"""`kvevents tail`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from publisher.checks import shown
from publisher.cli.parsing import (
    FINDINGS,
    NO_CONNECTION,
    USAGE,
    Parser,
    add_color,
    add_sources,
    check_count,
    check_seconds,
    read_keys,
    read_sources,
    say,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from publisher.tools.source import Address
    from publisher.tools.start import Start
    from publisher.tools.tail.lines import Lines
    from publisher.tools.tail.stream import Stream
    from publisher.tools.tail.tail import Writer

__all__ = ["add_options", "run"]

_DESCRIPTION = """\
Print a stream, one line per event: time, seq, event, medium, how many blocks, the first
block's hash and its parent's, and how many tokens. With several sources or ranks, the
source and the rank come first. What is wrong with the stream is said where it is wrong.
Any engine's form is read: SGLang's, vLLM's, a store's, our own."""

_EPILOG = """\
examples:
  kvevents tail tcp://10.0.0.5:5557                  what comes from now on
  kvevents tail tcp://10.0.0.5:5557,5558             the state now, then what comes
  kvevents tail a=tcp://h1:5557 b=tcp://h2:5557      two workers side by side
  kvevents tail tcp://h:5557,5558 --from -20 --exit-at-end
  kvevents tail tcp://h:5557 --event stored --medium CPU_PINNED --rank 0
  kvevents tail tcp://h:5557,5558 --token-prefix 1,2,3    who holds this prompt
  kvevents tail day.capture -o json | jq 'select(.type == "BlockRemoved")'
  kvevents tail day.capture --format '%s %e %m %n %H'

letters for --format (and \\n, \\t, \\r, \\0, \\\\ and %%):
{letters}

JSON: one object a line, for each event and each thing that is wrong. Hashes are strings,
as JSON numbers lose their low bits: decimal, or hex where the wire has bytes.
-o raw: each batch as a MessagePack array [topic, seq, payload], one behind the other.

exit codes: 0 ok (also after Ctrl-C); {findings} with --strict, when something is wrong;
2 usage; {no_connection} when nothing came."""


def add_options(parser: Parser) -> None:
    """Of `tail`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = _DESCRIPTION
    parser.names = _help
    add_sources(parser)
    where = parser.add_argument_group("which part of the stream")
    where.add_argument(
        "--from",
        dest="start",
        metavar="WHERE",
        help="state: the state now, then what comes (default with a replay endpoint); beginning: all"
        " that is retained; SEQ: from there; -N: the last N batches that say something; live: what"
        " comes from now on (default without a replay endpoint)",
    )
    where.add_argument("--until", type=int, metavar="SEQ", help="the last batch to show")
    where.add_argument("-n", "--count", type=int, metavar="N", help="end after N events")
    where.add_argument("--exit-at-end", action="store_true", help="end once all there is was told")
    where.add_argument("--timeout", type=float, metavar="S", help="end after S seconds of silence")
    where.add_argument("--for", dest="for_s", type=float, metavar="S", help="end after S seconds")
    _add_filters(parser)
    _add_output(parser)


def _add_filters(parser: Parser) -> None:
    only = parser.add_argument_group(
        "which events (lists with commas; what is wrong with the stream is always shown)"
    )
    only.add_argument("--event", metavar="KIND", help="stored, removed, cleared")
    only.add_argument("--medium", metavar="MEDIUM", help="GPU, CPU_PINNED, DISK, EXTERNAL")
    only.add_argument(
        "--hash", metavar="HASH", help="a block's or parent's: first hex digits, or the number"
    )
    only.add_argument(
        "--token-prefix",
        metavar="IDS",
        help="blocks of this prompt, and of all that go on from it; their stores must have been seen",
    )
    only.add_argument("--lora", metavar="NAME", help="blocks of these adapters")
    only.add_argument("--rank", metavar="N", help="of these data-parallel ranks")


def _add_output(parser: Parser) -> None:
    how = parser.add_argument_group("how")
    how.add_argument(
        "-o", "--output", choices=("text", "json", "jsonl", "raw", "hex"), default="text"
    )
    how.add_argument("--format", metavar="TEXT", help="a line of your own, see below")
    how.add_argument(
        "-v",
        "--verbose",
        action="count",
        default=0,
        help="more of each event: all hashes, topic, lag, first tokens; notes; -vv: all tokens",
    )
    how.add_argument("-q", "--quiet", action="store_true", help="no summary at the end")
    add_color(how)
    how.add_argument("--no-check", action="store_true", help="do not look for contradictions")
    how.add_argument(
        "--strict", action="store_true", help=f"exit code {FINDINGS} when something is wrong"
    )


def _help() -> str:
    from publisher.tools.tail.formats import LETTERS

    cells = [f"%{letter} {what}" for letter, what in LETTERS.items()]
    rows = [cells[at : at + 2] for at in range(0, len(cells), 2)]
    letters = "\n".join("".join(f"  {cell:<34}" for cell in row).rstrip() for row in rows)
    return _EPILOG.format(letters=letters, findings=FINDINGS, no_connection=NO_CONNECTION)


def run(options: argparse.Namespace) -> int:
    """Returns the exit code."""
    from publisher.tools.colour import painter, wants_colour
    from publisher.tools.source import Sources
    from publisher.tools.tail.filters import parse_filter
    from publisher.tools.tail.footer import footer
    from publisher.tools.tail.lines import Lines
    from publisher.tools.tail.tail import Limits, OutputError, Printer, Tail, streams_of

    check_count("--count", options.count)
    check_seconds("--timeout", options.timeout)
    check_seconds("--for", options.for_s)
    if options.until is not None and options.until < 0:
        raise ValueError(f"--until: {options.until} is below 0")
    limits = Limits(
        count=options.count,
        until=options.until,
        timeout_s=options.timeout,
        for_s=options.for_s,
        at_end=options.exit_at_end,
    )
    chosen = parse_filter(
        event=options.event,
        medium=options.medium,
        hash_=options.hash,
        token_prefix=options.token_prefix,
        lora=options.lora,
        rank=options.rank,
    )
    addresses = read_sources(options)
    start = _start(options, addresses)
    server_key, client_keys = read_keys(options)
    stdout = _stdout(options)
    colours = wants_colour(options.color, stdout, os.environ)
    with Sources(
        addresses,
        topic=options.topic,
        start=start.asked,
        server_key=server_key,
        client_keys=client_keys,
    ) as sources:
        streams = streams_of(sources, start, check=not options.no_check)
        lines = Lines(streams, painter(colours=colours), options.verbose)
        tail = Tail(
            sources,
            streams,
            start=start,
            limits=limits,
            chosen=chosen,
            writer=_writer(options, lines),
            out=Printer(stdout),
            aside=say,
            lines=lines,
            notes=options.verbose > 0,
            header=stdout.isatty() and options.output == "text" and options.format is None,
        )
        try:
            tail.run()
        except OutputError:
            return USAGE  # which of them it is, is said when it is flushed
        if tail.read_all:
            _say_torn(streams)
        came = _say_silent(streams, options)
    if came and not options.quiet:
        for line in footer(streams, tail.seconds, None if chosen.open else tail.written):
            say(line)
    if not came:
        return NO_CONNECTION
    return FINDINGS if options.strict and any(one.troubles for one in streams) else 0


def _start(options: argparse.Namespace, addresses: list[Address | Path]) -> Start:
    """Where to begin. Raises ValueError for what the sources cannot do."""
    from publisher.tools.source import Address
    from publisher.tools.start import Start, parse_start

    for one in addresses:
        if isinstance(one, Path) and not one.exists():
            raise ValueError(
                f"SOURCE: {shown(str(one))} is neither an ENDPOINT, tcp://HOST:PORT, nor a file"
            )
    live = [one for one in addresses if isinstance(one, Address)]
    deaf = next((one for one in live if one.replay_endpoint is None), None)
    if options.exit_at_end and deaf is not None:
        raise ValueError(
            f"--exit-at-end: {deaf.endpoint} has no --replay-endpoint, so where its end is cannot be told"
        )
    if options.start is None:
        return Start("state")  # without a replay endpoint nothing is asked for
    start = parse_start(options.start)
    if start.kind in ("state", "live") and not live:
        raise ValueError(f"--from: a capture has no {start.kind}: beginning, a seq or -N")
    if start.kind == "live" and options.exit_at_end:
        raise ValueError("--from: with live and --exit-at-end nothing would be left to tell")
    if start.kind != "live" and deaf is not None:
        raise ValueError(f"--from: {deaf.endpoint} has no --replay-endpoint to be asked for that")
    return start


def _stdout(options: argparse.Namespace) -> TextIO:
    """Raises ValueError for raw bytes on a terminal."""
    if sys.stdout is None:
        return Path(os.devnull).open("w", encoding="utf-8")  # until the process ends
    if options.output == "raw" and sys.stdout.isatty():
        raise ValueError("--output: raw is no text for a terminal; send it to a file or a pipe")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    return sys.stdout


def _writer(options: argparse.Namespace, lines: Lines) -> Writer:
    """Raises ValueError for a format that is none."""
    if options.format is not None:
        if options.output != "text":
            raise ValueError(f"--format: it is of no use with -o {options.output}")
        from publisher.tools.tail.formats import Format

        return Format(options.format)
    match options.output:
        case "json" | "jsonl":
            from publisher.tools.tail.objects import Objects

            return Objects()
        case "raw" | "hex":
            from publisher.tools.tail.hexdump import Hex, Raw

            return Raw() if options.output == "raw" else Hex(lines)
    return lines


def _say_torn(streams: Sequence[Stream]) -> None:
    """What could not be read of captures."""
    from publisher.tools.source import Capture

    for one in streams:
        if isinstance(one.source, Capture) and (fault := one.source.fault(one.batches)):
            say(f"kvevents tail: {fault}")


def _say_silent(streams: Sequence[Stream], options: argparse.Namespace) -> bool:
    """Name sources of which nothing came. Returns whether anything came at all."""
    for one in streams:
        live = one.live
        if one.begun:
            continue
        silence = f"nothing came from {one.source.name if live is None else live.address.endpoint}"
        seconds = options.timeout if options.timeout is not None else options.for_s
        if live is not None and seconds is not None:
            silence += f" in {seconds:g} s"
        if one.refused:
            silence += ": it has refused us; --server-key and --client-key are not what it wants"
        elif live is not None and live.connected:
            silence += (
                f": it is there, but idle; `kvevents doctor {live.address.endpoint}` looks further"
            )
        elif live is not None and live.address.replay_endpoint is not None:
            silence += f": it is not there, or {live.address.replay_endpoint} does not answer"
        say(f"kvevents tail: {silence}")
    return any(one.begun for one in streams)
