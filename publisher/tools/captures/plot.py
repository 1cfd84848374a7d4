"""`kvevents plot`: a capture as a picture, or as a page with a picture of each."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvevents.capture import CaptureHead
from kvevents.follower import Told
from kvevents.message import Channel
from kvevents.profile import Profile
from kvevents.reading import read
from publisher.config.checks import shown
from publisher.tools.source import Capture
from publisher.tools.text import printable

__all__ = ["SUFFIXES", "Plotted", "check_output", "plot", "profile_of"]

SUFFIXES = (".html", ".png", ".svg")


@dataclass(frozen=True, slots=True)
class Plotted:
    """A capture in numbers. `fault`: what is said of an end that was not read; `behind`: its recorder was
    too slow or stopped at times.
    """

    name: str
    head: CaptureHead | None
    profile: Profile
    fault: str | None
    damaged: bool
    behind: bool


def profile_of(file: Path) -> Plotted:
    """All of a capture that is whole. Raises ValueError for a file that is none."""
    capture, profile = Capture(file, "FILE"), Profile()
    behind = False
    for message, arrivals in capture.steps():
        behind = behind or message.channel == Channel.BEHIND
        for one in arrivals:
            profile.take(message.at_ns, read(one) if isinstance(one, Told) else one)
    return Plotted(
        name=printable(str(file)),
        head=capture.head,
        profile=profile,
        fault=capture.fault(capture.batches),
        damaged=capture.damaged is not None,
        behind=behind,
    )


def check_output(text: str, files: Sequence[Path]) -> Path:
    """Where the picture goes. Raises ValueError unless it can be one, and is not what is read."""
    try:
        return _check_output(text, files)
    except OSError as error:
        raise ValueError(f"-o: {shown(text)}: {error.strerror}") from None


def _check_output(text: str, files: Sequence[Path]) -> Path:
    output = Path(text)
    if output.suffix.lower() not in SUFFIXES:
        raise ValueError(f"-o: {shown(text)} does not end in {', '.join(SUFFIXES)}")
    if len(files) > 1 and output.suffix.lower() != ".html":
        raise ValueError(f"FILE: {len(files)} captures fit on a page of .html only")
    if output.exists() and not output.is_file():
        raise ValueError(f"-o: {shown(text)} is there already, and is no file")
    for file in files if output.exists() else ():
        if _is_there(file) and output.samefile(file):
            raise ValueError(f"-o: {shown(text)} is the capture itself")
    return output


def _is_there(file: Path) -> bool:
    try:
        return file.exists()
    except OSError:  # for `plot` to say
        return False


def plot(files: Sequence[Path], output: Path, warn: Callable[[str], None]) -> list[Plotted]:
    """Draw them; the output is replaced once all is drawn. Raises ValueError for what cannot be read or
    written, and then leaves the output as it was.
    """
    made = output.with_name(f".kvevents-plot-{os.getpid()}")
    try:
        try:
            with made.open("xb") as file:
                plotted = _read(files, warn)
                file.write(_drawn(plotted, output.suffix.lower()))
            made.replace(output)
        finally:
            made.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(f"-o: {output}: {error.strerror}") from None
    return plotted


def _read(files: Sequence[Path], warn: Callable[[str], None]) -> list[Plotted]:
    plotted = []
    for file in files:
        plotted.append(profile_of(file))
        if (fault := plotted[-1].fault) is not None:
            warn(fault)
    return plotted


def _drawn(plotted: Sequence[Plotted], suffix: str) -> bytes:
    from publisher.tools.captures.plot_figure import png, svg
    from publisher.tools.captures.plot_page import page

    match suffix:
        case ".png":
            return png(plotted[0].profile, plotted[0].name)
        case ".svg":
            return svg(plotted[0].profile, plotted[0].name)
        case _:
            return page(plotted)
