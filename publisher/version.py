"""The installed version."""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["UNKNOWN", "VERSION"]

UNKNOWN = "unknown"

try:
    VERSION = version("kvevents")
except PackageNotFoundError:
    VERSION = UNKNOWN
