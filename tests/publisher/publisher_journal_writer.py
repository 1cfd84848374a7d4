"""Entries that can be told by their number, and a process that writes them until it is killed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from publisher.stream.journal import Entry, Head, HeadSink, Journal, Kind, read_journal

__all__ = ["entry", "head"]


def entry(number: int) -> Entry:
    """A different one for every number."""
    return Entry(Kind.INPUT, f"body {number}".encode() * (number % 4), number, number % 8)


def head(expected: int) -> Head:
    """Of a generation that begins with the entry `expected`."""
    sinks = (HeadSink("a", "spelling", 7, telling=False),)
    return Head(b"l" * 16, b"worker", sinks, expected, True, False, b"")


def write(folder: Path, stride: int) -> None:
    """Go on where the folder's history ends, telling the number of each entry once it is kept."""
    journal, number = Journal(folder, limit_bytes=2000), 0
    for found in read_journal(folder):
        number = found.head.expected + sum(1 for _ in found.entries)
        journal.resume()
        break
    while True:
        if not journal.active or journal.due:
            journal.begin(head(number), iter([b"piece", str(number).encode()]))
        journal.append(entry(number))
        os.write(1, number.to_bytes(8, "little"))
        number += 1
        if number % stride == 0:
            journal.advance(30)


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]))
