"""`kvevents record`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from publisher.cli.following import nothing_came, say_begun, unreached
from publisher.cli.parsing import (
    NO_CONNECTION,
    USAGE,
    Parser,
    add_keys,
    add_limits,
    check_limits,
    read_keys,
    read_sources,
    say,
)
from publisher.config.checks import shown

if TYPE_CHECKING:
    from publisher.tools.captures.record import Recorded
    from publisher.tools.source import Address

__all__ = ["add_options", "run"]

_EPILOG = f"""\
examples:
  kvevents record -w today.capture tcp://10.0.0.5:5557,5558
  kvevents record -w hour.capture tcp://10.0.0.5:5557 --for 3600
  kvevents record -w some.capture tcp://10.0.0.5:5557 -n 1000
  kvevents record -w - tcp://10.0.0.5:5557 | ssh desk 'cat > today.capture'

Until Ctrl-C, unless told. -n counts batches, those of replays too. Tokens of
prompts are in a capture: its owner alone may read the file. It is packed (zcat
reads it), and what came is in it at once: a kill costs at most what came last.
tail, state, top, check, lint, plot and play read it.

exit codes: 0 ok, {USAGE} usage or the file cannot be written, {NO_CONNECTION} nothing came
"""


def add_options(parser: Parser) -> None:
    """Of `record`."""
    parser.description = "Write what a publisher sends to a capture, with the time of each message."
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "%(prog)s [options] -w FILE SOURCE"
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="a publisher's PUB endpoint, e.g. tcp://10.0.0.5:5557, or with its replay endpoint"
        " tcp://10.0.0.5:5557,5558; w1=... is taken too, but no name is in a capture",
    )
    parser.add_argument(
        "--replay-endpoint",
        metavar="ENDPOINT",
        help="the replay endpoint, apart: ask for what is retained, and close gaps",
    )
    parser.add_argument("--topic", default="", help="only topics that begin so")
    add_keys(parser)
    parser.add_argument(
        "-w",
        "--write",
        metavar="FILE",
        required=True,
        help="the capture, which must not be there yet; - is standard output",
    )
    parser.add_argument("-o", "--output", type=_other_option, help=argparse.SUPPRESS)
    parser.add_argument(
        "--from",
        dest="start",
        metavar="WHERE",
        help="what is asked for first, of a replay endpoint: state (what is held now), beginning (all it"
        " has), live (nothing), or a seq; state unless told",
    )
    add_limits(parser)
    parser.epilog = _EPILOG


def run(options: argparse.Namespace) -> int:
    """Returns the exit code."""
    import time

    from kvevents.capture import CaptureHead
    from publisher.tools.captures.record import STDOUT, record
    from publisher.tools.source import Live

    check_limits(options)
    address = _address(options)
    server_key, client_keys = read_keys(options)
    start = _start(options.start, address.replay_endpoint)
    file = _file(options.write)
    if file == STDOUT:
        _check_stdout()
    head = CaptureHead(
        endpoint=address.endpoint,
        replay_endpoint=address.replay_endpoint,
        topic=options.topic,
        started_ns=time.time_ns(),
    )
    with Live(
        address,
        topic=options.topic,
        start=start,
        hwm=20_000,
        server_key=server_key,
        client_keys=client_keys,
    ) as live:
        recorded = record(
            *(live, head, file),
            for_s=options.for_s,
            count=options.count,
            begun=lambda: say_begun(options, "recording", [live], f" to {_name(options.write)}"),
        )
        for line in unreached(options, [live]):
            say(f"kvevents record: {line}")
        nothing = nothing_came(options, [live])
    if recorded.left_out:
        what = "1 message is" if recorded.left_out == 1 else f"{recorded.left_out} messages are"
        say(f"kvevents record: {what} too large for a capture, and not in it")
    if recorded.behind:
        say(
            "kvevents record: it was too slow or stopped at times: what is missing of then may be"
            " missing in the capture only"
        )
    if not recorded.batches:
        say(f"kvevents record: {nothing}")
        return NO_CONNECTION
    what = "1 batch is" if recorded.batches == 1 else f"{recorded.batches} batches are"
    say(f"kvevents record: {what} in {_name(options.write)}: {_account(recorded)}")
    return 0


def _other_option(text: str) -> NoReturn:
    raise argparse.ArgumentTypeError(f"the file is given with -w: -w {text}")


def _address(options: argparse.Namespace) -> Address:
    """Whom to record. Raises ValueError unless it is one endpoint."""
    from publisher.tools.source import Address

    first, *others = read_sources(options)
    if others:
        raise ValueError("SOURCE: one endpoint is recorded at a time")
    if not isinstance(first, Address):
        what = "a file already" if _is_there(first) else "no endpoint, as tcp://10.0.0.5:5557 is"
        raise ValueError(f"SOURCE: {shown(str(first))} is {what}; what is recorded is an endpoint")
    return first


def _is_there(file: Path) -> bool:
    try:
        return file.exists()
    except (OSError, ValueError):  # a name that none can have
        return False


def _name(file: str) -> str:
    return "standard output" if file == "-" else file


def _account(recorded: Recorded) -> str:
    """How long it took, how large it is, and what is missing in it."""
    from publisher.tools.columns import byte_size, of_batches

    gaps, lost = recorded.gaps, recorded.lost
    missing = "no gap" if not gaps else "1 gap" if gaps == 1 else f"{gaps:,} gaps"
    if lost:
        missing += f", {of_batches(lost)} lost"
    return f"{recorded.seconds:.1f} s, {byte_size(recorded.size)}, {missing}"


def _start(text: str | None, replay_endpoint: str | None) -> int | None:
    """What to ask for first. Raises ValueError for what is none, and where nobody can be asked."""
    from publisher.tools.start import Start, parse_start

    start = Start("state") if text is None else parse_start(text)
    if start.kind == "last":
        raise ValueError(f"--from: {text} is not state, beginning, live, nor a seq")
    if text is not None and start.asked is not None and replay_endpoint is None:
        raise ValueError(f"--from: {text} can be had of a replay endpoint only, and there is none")
    return start.asked


def _file(text: str) -> Path:
    """Raises ValueError for what can be no file."""
    if not text or "\0" in text:
        raise ValueError(f"-w: {text!r} is no file")
    return Path(text)


def _check_stdout() -> None:
    import sys

    if sys.__stdout__ is None:  # what stands for it by now takes anything, and keeps nothing
        raise ValueError("-w: -: standard output is closed")
    if sys.stdout.isatty():
        raise ValueError("-w: -: standard output is a terminal, and a capture is no text")
