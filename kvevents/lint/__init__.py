"""Which consumers would lose what of a stream, and why: as they were observed, on the raw bytes."""

from kvevents.lint.catalogue import CONSUMERS
from kvevents.lint.consumer import Consumer
from kvevents.lint.finding import Finding
from kvevents.lint.stream import Lint, Tally

__all__ = ["CONSUMERS", "Consumer", "Finding", "Lint", "Tally"]
