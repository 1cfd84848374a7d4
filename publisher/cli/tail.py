"""`kvevents tail`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

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
from publisher.config.checks import shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from publisher.tools.source import Address
    from publisher.tools.start import Start
    from publisher.tools.tail.lines import Lines
    from publisher.tools.tail.stream import Stream
    from publisher.tools.tail.tail import Limits, Tail, Writer

__all__ = ["add_options", "run"]

_DESCRIPTION = """\
Print a stream, one line per event: time, seq, event, medium, how many blocks,
the first block's hash and its parent's, and how many tokens. With several
sources or ranks, the source and the rank come first. What is wrong with the
stream is said where it is wrong. Any engine's form is read: SGLang's, vLLM's,
a store's, our own."""

_EPILOG = """\
examples:
  kvevents tail tcp://10.0.0.5:5557           what comes from now on
  kvevents tail tcp://10.0.0.5:5557,5558      the state now, then what comes
  kvevents tail a=tcp://h1:5557 b=tcp://h2:5557    two workers side by side
  kvevents tail tcp://h:5557,5558 --from -20 --exit-at-end   these and no more
  kvevents tail tcp://h:5557,5558 --from 118 --until 121      these batches
  kvevents tail tcp://h:5557 -n 5 --timeout 30     the next 5 events, then end
  kvevents tail tcp://h:5557 --event stored --medium host --rank 0
  kvevents tail tcp://h:5557,5558 --token-prefix 1,2,3    who holds this prompt
  kvevents tail day.capture -o json | jq 'select(.type == "BlockRemoved")'
  kvevents tail day.capture --format '%6s %-7e %-10m %4n %H'

the last N batches: --from -N --exit-at-end
-n counts events that are printed; one that cannot be read is one, too, and so
is a batch of which nothing can be read. With -o raw and hex it counts batches.
A clear is of every medium. With --hash, --token-prefix and --lora it is shown
only where blocks that they ask for were stored since the clear before.

letters for --format (and \\n, \\t, \\r, \\0, \\\\ and %%; %8e is right-aligned in 8
columns, %-8e left-aligned):
{letters}

JSON: one object a line, for each event and each thing that is wrong. Hashes
are strings, as JSON numbers lose their low bits: decimal, or hex where the wire
has bytes. -o raw: each batch as a MessagePack array [topic, seq, payload], one
behind the other.

exit codes: 0 ok (also after Ctrl-C, and of a capture that was cut off); {findings}
when a capture is damaged (what is whole was printed), and with --strict when
something is wrong with the stream; {usage} usage; {no_connection} when nothing came."""


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
        help="state: what tells what is held now (a snapshot, or, where nothing has rolled off yet, all"
        " that was told), then what comes (default where there is a replay endpoint);"
        " live: what comes from now on (default where there is none); beginning: all that is retained,"
        " then what comes; SEQ: from this batch on; -N: from the last N batches on, heartbeats not"
        " counted",
    )
    where.add_argument("--until", type=int, metavar="SEQ", help="the last batch to show, then end")
    where.add_argument("-n", "--count", type=int, metavar="N", help="end after N events, see below")
    where.add_argument(
        "--exit-at-end",
        action="store_true",
        help="end once all there is was told; without it, more is waited for",
    )
    where.add_argument(
        "--timeout", type=float, metavar="S", help="end once nothing was shown for S seconds"
    )
    where.add_argument("--for", dest="for_s", type=float, metavar="S", help="end after S seconds")
    _add_filters(parser)
    _add_output(parser)


def _add_filters(parser: Parser) -> None:
    only = parser.add_argument_group(
        "which events (lists with commas; what is wrong is always shown)"
    )
    only.add_argument(
        "--event", metavar="KIND", help="stored, removed, cleared; or BlockStored and so on"
    )
    only.add_argument(
        "--medium",
        metavar="MEDIUM",
        help="GPU, CPU_PINNED, DISK, EXTERNAL; or device, host, cpu, storage, remote",
    )
    only.add_argument(
        "--hash",
        metavar="HASH",
        help="a block's or parent's: first hex digits, as shown, or the number",
    )
    only.add_argument(
        "--token-prefix",
        metavar="IDS",
        help="blocks of this prompt, and of all that go on from it; their stores must have been seen."
        " 1,2,3 or '1 2 3' or '[1, 2, 3]'",
    )
    only.add_argument("--lora", metavar="NAME", help="blocks of these adapters")
    only.add_argument("--rank", metavar="N", help="of these data-parallel ranks")


def _add_output(parser: Parser) -> None:
    how = parser.add_argument_group("how")
    how.add_argument(
        "-o",
        "--output",
        choices=("text", "json", "jsonl", "raw", "hex"),
        default="text",
        metavar="FORM",
        help="text, json (or jsonl), raw, hex",
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
    return _EPILOG.format(
        letters=letters, findings=FINDINGS, usage=USAGE, no_connection=NO_CONNECTION
    )


def run(options: argparse.Namespace) -> int:
    """Returns the exit code."""
    from publisher.cli.hint import doctor_command
    from publisher.tools.colour import painter, wants_colour
    from publisher.tools.interrupt import Interrupt
    from publisher.tools.source import Sources
    from publisher.tools.tail.filters import parse_filter
    from publisher.tools.tail.footer import footer
    from publisher.tools.tail.lines import Lines
    from publisher.tools.tail.tail import Printer, Tail, streams_of

    limits = _limits(options)
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
    doctors = [doctor_command(options, text) for text in options.sources]
    with ExitStack() as stack:
        with Interrupt() as interrupt:  # as in `run`: Ctrl-C ends it, and what came is told
            sources = stack.enter_context(
                Sources(
                    addresses,
                    topic=options.topic,
                    start=start.asked,
                    server_key=server_key,
                    client_keys=client_keys,
                )
            )
            streams = streams_of(sources, start, check=not options.no_check)
            _watch(streams, options.topic, start, doctors)
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
                plain=Lines(streams, painter(colours=False), options.verbose),
                notes=options.verbose > 0,
                header=stdout.isatty() and options.output == "text" and options.format is None,
            )
            interrupt.wait(tail.run)
        damaged = tail.read_all and _say_torn(streams)
        came = _say_silent(streams, options, tail)
    if came and not options.quiet:
        asked = chosen.given if options.count is None else (*chosen.given, "count")
        whole = options.output in ("raw", "hex")
        for line in footer(streams, tail.seconds, written=tail.written, whole=whole, asked=asked):
            say(line)
    if damaged:
        return FINDINGS
    if not came:
        return NO_CONNECTION
    return FINDINGS if options.strict and any(one.troubles for one in streams) else 0


def _limits(options: argparse.Namespace) -> Limits:
    """Raises ValueError for what cannot be."""
    from publisher.tools.tail.tail import Limits

    check_count("--count", options.count)
    check_seconds("--timeout", options.timeout)
    check_seconds("--for", options.for_s)
    if options.until is not None and options.until < 0:
        raise ValueError(f"--until: {options.until} is below 0")
    return Limits(
        count=options.count,
        until=options.until,
        timeout_s=options.timeout,
        for_s=options.for_s,
        at_end=options.exit_at_end,
    )


def _watch(streams: Sequence[Stream], topic: str, start: Start, doctors: Sequence[str]) -> None:
    """`doctors`: the command for each."""
    from publisher.tools.tail.hints import Watch

    first = start.number if start.kind == "seq" else None
    for one, doctor in zip(streams, doctors, strict=True):
        if one.live is not None:
            one.watch = Watch(
                one.live.address, topic=topic, doctor=doctor, now=time.monotonic(), first=first
            )


def _start(options: argparse.Namespace, addresses: list[Address | Path]) -> Start:
    """Where to begin. Raises ValueError for what the sources cannot do."""
    from publisher.tools.source import Address
    from publisher.tools.start import Start, parse_start

    for one in addresses:
        if isinstance(one, Path) and not _is_there(one):
            raise ValueError(
                f"SOURCE: {shown(str(one))} is neither an ENDPOINT, tcp://HOST:PORT, nor a file"
            )
    live = [one for one in addresses if isinstance(one, Address)]
    deaf = next((one for one in live if one.replay_endpoint is None), None)
    if options.exit_at_end and deaf is not None:
        raise ValueError(
            f"--exit-at-end: {deaf.endpoint} has no replay endpoint, so where its end is cannot be told;"
            f" {_how_to_name(live)}"
        )
    if options.start is None:
        return Start("state")  # without a replay endpoint nothing is asked for
    start = parse_start(options.start)
    if start.kind in ("state", "live") and not live:
        raise ValueError(f"--from: a capture has no {start.kind}: beginning, a seq or -N")
    if start.kind == "live" and options.exit_at_end:
        raise ValueError("--from: with live and --exit-at-end nothing would be left to tell")
    if start.kind != "live" and deaf is not None:
        raise ValueError(
            f"--from: {deaf.endpoint} has no replay endpoint to be asked for that; {_how_to_name(live)}"
        )
    if start.kind == "seq" and options.until is not None and options.until < start.number:
        raise ValueError(f"--until: {options.until} is before --from {start.number}")
    return start


def _how_to_name(live: Sequence[Address]) -> str:
    """A replay endpoint."""
    how = "give it as SOURCE,REPLAY"
    return how if len(live) > 1 else f"{how} or with --replay-endpoint"


def _is_there(file: Path) -> bool:
    try:
        return file.exists()
    except OSError:
        return True  # why it cannot be read is said when it is


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


def _say_torn(streams: Sequence[Stream]) -> bool:
    """What could not be read of captures. Returns whether one of them is damaged, not just cut off."""
    from publisher.tools.source import Capture

    captures = [(one, one.source) for one in streams if isinstance(one.source, Capture)]
    for stream, capture in captures:
        if (fault := capture.fault(stream.batches)) is not None:
            say(f"kvevents tail: {fault}")
    return any(capture.damaged is not None for _, capture in captures)


def _say_silent(streams: Sequence[Stream], options: argparse.Namespace, tail: Tail) -> bool:
    """Name sources of which nothing came, and, unless it was over, what came and was not shown; of what
    it ended before, nothing can be said. Returns whether anything came at all.
    """
    came = any(one.begun for one in streams)
    is_early = came and (tail.full or not tail.read_all)
    for one in streams:
        live, watch = one.live, one.watch
        name = one.source.name if live is None else live.address.endpoint
        if one.passed is not None and not one.batches_shown:
            text = f"nothing of {name}: it goes on with seq {one.passed}, and --until is {options.until}"
        elif one.last_seq is not None and not one.batches_shown:
            if is_early and live is None:
                continue
            text = f"nothing of {name}: it has come to seq {one.last_seq}, and --from is {options.start}"
        elif one.begun:
            if watch is None or not one.seen.held or tail.over:
                continue
            text = f"not all of {name}: {watch.waited(one.seen)}"
        elif is_early and not one.refused:
            continue
        else:
            seconds = options.timeout if options.timeout is not None else options.for_s
            after = f" in {seconds:g} s" if live is not None and seconds is not None else ""
            why = "" if watch is None else f": {watch.why(one.seen)}"
            text = f"nothing came from {name}{after}{why}"
        say(f"kvevents tail: {text}")
    return came
