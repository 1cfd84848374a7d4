"""`kvevents plot`."""

from __future__ import annotations

import argparse

from publisher.cli.parsing import FINDINGS, NO_CONNECTION, USAGE, Parser, say

__all__ = ["add_options", "run"]


def add_options(parser: Parser) -> None:
    """Of `plot`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "A picture of a capture: resident blocks of each tier over time, with gaps,\n"
        "losses, restarts and clears; events and blocks per second; how long blocks\n"
        "stay; which are stored again, and how much larger a tier would have kept them.\n"
        "A page (.html) has the numbers too, and needs no network."
    )
    parser.epilog = f"""\
examples:
  kvevents record tcp://10.0.0.5:5557,5558 -w worker.capture --for 600
  kvevents plot worker.capture -o worker.html
  kvevents plot before.capture after.capture -o both.html
  kvevents plot worker.capture -o worker.png

exit codes: 0 drawn; {FINDINGS} drawn, but a capture is damaged and its end left out;
{USAGE} usage, or not a capture; {NO_CONNECTION} drawn, but no batch is in it"""
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="a capture that `kvevents record` wrote"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="OUT",
        required=True,
        help="ends in .html, .png (1200 × 1080) or .svg; several captures fit on .html only; what is"
        " there is replaced",
    )


def run(options: argparse.Namespace) -> int:
    """Returns the exit code."""
    import logging
    import warnings

    from publisher.tools.captures.ending import like_ctrl_c
    from publisher.tools.captures.plot import check_output, plot
    from publisher.tools.source import parse_file

    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # nobody minds that it looks for fonts
    files = [parse_file(file, "FILE") for file in options.files]
    output = check_output(options.output, files)
    with like_ctrl_c(), warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # they are for who writes the drawing, and not for who sees it
        plotted = plot(files, output, lambda text: say(f"kvevents plot: {text}"))
    if any(one.damaged for one in plotted):
        return FINDINGS
    if not any(one.profile.batches for one in plotted):
        say("kvevents plot: no batch is in it")
        return NO_CONNECTION
    return 0
