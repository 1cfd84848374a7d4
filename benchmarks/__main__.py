"""All benchmarks, one after the other."""

from __future__ import annotations

import sys

from benchmarks import requests, sidecar, storage

if __name__ == "__main__":
    sys.exit(requests.main() or storage.main() or sidecar.main())
