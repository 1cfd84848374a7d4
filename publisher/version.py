"""The installed version."""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["VERSION"]

try:
    VERSION = version("kvevents")
except PackageNotFoundError:
    VERSION = "unknown"
