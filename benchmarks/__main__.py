"""All benchmarks, one after the other."""

from __future__ import annotations

import sys

from benchmarks import requests

if __name__ == "__main__":
    sys.exit(requests.main())
