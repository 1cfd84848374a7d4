"""The stream checker: what a stream says, against what must hold of every stream."""

from kvevents.check.checker import Checker, Resident
from kvevents.check.finding import Finding, Place, Severity
from kvevents.check.hashes import SCHEMES, Verifier
from kvevents.check.rules import RULES, Rule

__all__ = [
    "RULES",
    "SCHEMES",
    "Checker",
    "Finding",
    "Place",
    "Resident",
    "Rule",
    "Severity",
    "Verifier",
]
