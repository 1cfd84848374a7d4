"""`kvevents plot`: a capture as a picture, or as a page with a picture of each."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvevents.capture import CaptureHead
from kvevents.follower import Told
from kvevents.profile import Profile
from kvevents.reading import read
from publisher.checks import shown
from publisher.tools.source import Capture

__all__ = ["SUFFIXES", "Plotted", "check_output", "plot", "profile_of"]

SUFFIXES = (".html", ".png", ".svg")


@dataclass(frozen=True, slots=True)
class Plotted:
    """A capture in numbers. `fault`: what is said of an end that was not read."""

    name: str
    head: CaptureHead | None
    profile: Profile
    fault: str | None
    damaged: bool


def profile_of(file: Path) -> Plotted:
    """All of a capture that is whole. Raises ValueError for a file that is none."""
    capture, profile = Capture(file), Profile()
    batches = 0
    for message, arrivals in capture.steps():
        batches += message.is_batch
        for one in arrivals:
            profile.take(message.at_ns, read(one) if isinstance(one, Told) else one)
    fault = capture.fault(batches)
    return Plotted(capture.name, capture.head, profile, fault, capture.damaged is not None)


def check_output(text: str, files: Sequence[Path]) -> Path:
    """Where the picture goes. Raises ValueError unless it can be one, and is not what is read."""
    output = Path(text)
    if output.suffix.lower() not in SUFFIXES:
        raise ValueError(f"-o: {shown(text)} does not end in {', '.join(SUFFIXES)}")
    if len(files) > 1 and output.suffix.lower() != ".html":
        raise ValueError(f"FILE: {len(files)} captures fit on a page of .html only")
    if output.exists() and not output.is_file():
        raise ValueError(f"-o: {shown(text)} is there already, and is no file")
    for file in files:
        if file.exists() and output.exists() and output.samefile(file):
            raise ValueError(f"-o: {shown(text)} is the capture itself")
    return output


def plot(files: Sequence[Path], output: Path, warn: Callable[[str], None]) -> list[Plotted]:
    """Draw them; the output is replaced once all is drawn. Raises ValueError for what cannot be read or
    written, and then leaves the output as it was.
    """
    made = output.with_name(f".{output.name[:100]}.{os.getpid()}")
    try:
        fd = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            with os.fdopen(fd, "wb") as file:
                plotted = _read(files, warn)
                file.write(_drawn(plotted, output.suffix.lower()))
            made.replace(output)
        except BaseException:
            made.unlink(missing_ok=True)
            raise
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
