"""Draws what the dashboard's queries answer, without Grafana: to check the queries, not a picture of it.

    python docker/monitoring/draw_queries.py http://127.0.0.1:9090 OUT.png [MINUTES]

A query that is refused, or answers nothing, is said on stderr, and the exit code is 1. Needs matplotlib.
"""

from __future__ import annotations

import json
import re
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

_DASHBOARD = Path(__file__).parent / "grafana/dashboards/kvevents.json"
_COLUMNS = 3
_STEPS = 120
_VARIABLES = {"$__rate_interval": "30s", "$instance": ".+", "$sink": ".+"}
_LEGEND_LINES = 6


def filled(query: str) -> str:
    """The query with values for Grafana's variables."""
    for name, value in _VARIABLES.items():
        query = query.replace(name, value)
    return query


def answer(prometheus: str, query: str, minutes: float) -> list[dict[str, Any]]:
    """The series of a query over the last minutes. Raises OSError; HTTPError for one that is refused."""
    now = time.time()
    told = {
        "query": filled(query),
        "start": now - 60 * minutes,
        "end": now,
        "step": 60 * minutes / _STEPS,
    }
    url = f"{prometheus}/api/v1/query_range?{urllib.parse.urlencode(told)}"
    with urllib.request.urlopen(url, timeout=30) as response:
        found: list[dict[str, Any]] = json.load(response)["data"]["result"]
    return found


def named(legend: str, labels: dict[str, str]) -> str:
    """A series as Grafana's legend would call it."""
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda label: labels.get(label[1], ""), legend).strip()


def main() -> int:
    prometheus, out = sys.argv[1], sys.argv[2]
    minutes = float(sys.argv[3]) if len(sys.argv) > 3 else 5.0
    panels = [one for one in json.loads(_DASHBOARD.read_text())["panels"] if one["type"] != "row"]
    rows = -(-len(panels) // _COLUMNS)
    figure = Figure(figsize=(5.4 * _COLUMNS, 2.7 * rows), layout="constrained")
    figure.suptitle(
        "What the dashboard's queries answer, drawn with matplotlib. Grafana shows them in its own way.",
        fontsize=13,
    )
    empty = 0
    for place, panel in enumerate(panels):
        axes = figure.add_subplot(rows, _COLUMNS, place + 1)
        axes.set_title(panel["title"], fontsize=9)
        axes.tick_params(labelsize=7)
        unit = panel["fieldConfig"]["defaults"]["unit"]
        axes.set_ylabel("" if unit == "short" else unit, fontsize=7)
        count = 0
        for target in panel["targets"]:
            series = answer(prometheus, target["expr"], minutes)
            if not series and "> 0" not in target["expr"]:
                empty += 1
                print(f"{panel['title']}: no answer to {filled(target['expr'])}", file=sys.stderr)
            for one in series:
                seconds = [point[0] for point in one["values"]]
                since = [(second - time.time()) / 60 for second in seconds]
                values = [float(point[1]) for point in one["values"]]
                axes.plot(
                    since, values, linewidth=1, label=named(target["legendFormat"], one["metric"])
                )
                count += 1
        if 1 < count <= _LEGEND_LINES:
            axes.legend(fontsize=6)
    figure.savefig(out, dpi=80)
    return 1 if empty else 0


if __name__ == "__main__":
    sys.exit(main())
