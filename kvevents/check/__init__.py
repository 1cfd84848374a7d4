"""The stream checker: what a stream says, against what must hold of every stream."""

from kvevents.check.checker import Checker
from kvevents.check.finding import Finding, Place, Severity

__all__ = ["Checker", "Finding", "Place", "Severity"]
