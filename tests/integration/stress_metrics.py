"""What the sidecar says of itself over HTTP, when all is quiet."""

from __future__ import annotations

import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sized

__all__ = ["check_metrics"]

_PATIENCE_S = 10.0
_RETRY_S = 0.05
_sample = re.compile(r"^(kv_events_\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


def check_metrics(port: int, blocks: Mapping[str, Sized]) -> Iterator[str]:
    """What does not add up. `blocks`: of each medium, what the cache holds."""
    if (ready := _get(port, "readyz")) is None:
        yield "R5: /readyz does not say yes"
    if (text := _get(port, "metrics")) is None:
        yield "R5: there are no metrics"
    if ready is None or text is None:
        return
    samples: dict[str, dict[str, float]] = {}
    for name, labels, value in _sample.findall(text):
        samples.setdefault(name, {})[labels] = float(value)
    offered = sum(samples["kv_events_messages_offered_total"].values())
    pending = sum(samples["kv_events_queue_depth"].values())
    results = samples["kv_events_messages_total"]
    if offered != sum(results.values()) + pending:
        yield f"R5: {offered:.0f} offered, but {results} and {pending:.0f} pending"
    if pending:
        yield f"R5: {pending:.0f} pending after a flush"
    for labels, value in samples["kv_events_live_blocks"].items():
        medium = labels.removeprefix('medium="').removesuffix('"')
        if value != len(blocks.get(medium, ())):
            yield f"R5: {value:.0f} live blocks on {medium}, not {len(blocks.get(medium, ()))}"
    for name in ("kv_events_worker_up", "kv_events_in_step", "kv_events_ready"):
        if list(samples[name].values()) != [1.0]:
            yield f"R5: {name}: {samples[name]}"


def _get(port: int, path: str) -> str | None:
    """Until it answers 200: those who asked nonsense may still have all the room."""
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=1.0) as answer:
                return str(answer.read().decode())
        except (OSError, urllib.error.HTTPError):
            time.sleep(_RETRY_S)
    return None
