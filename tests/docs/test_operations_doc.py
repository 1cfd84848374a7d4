"""docs/operations.md and docs/metrics.md name all that a sidecar says: log lines, findings, metrics."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from docs_pages import DOCS, ROOT, between, flat
from prometheus_client.parser import text_string_to_metric_families
from publisher_sidecar_rig import WORKER, config, get

from publisher import spawn

PAGE = DOCS / "operations.md"
LEVELS = {"debug", "info", "warning", "error", "exception", "critical", "log"}

# ------------------------------------------------------------------------------------- log lines

PASSED_ON = {
    ("publisher/worker/attendant.py", "_forward"): "what its sidecar logs",
    ("publisher/sidecar/loop.py", "_update_status"): "not one event: is prefix caching on",
    ("publisher/sidecar/process.py", "_say_started"): "without CURVE, whoever reaches this network",
    ("publisher/sidecar/process.py", "_serve_all"): "`http_endpoint: …`",
    ("publisher/sidecar/process.py", "_serve_one"): "it cannot start (exit code 2)",
}
"""Lines that only pass a text on, by who writes them; and what the page has of each."""


@dataclass(frozen=True)
class LogCall:
    """A line that is logged. `text`: with … for what differs."""

    module: str
    function: str
    text: str


@cache
def log_calls() -> list[LogCall]:
    """All of the packages."""
    found: list[LogCall] = []
    for package in ("publisher", "hicache", "kvevents"):
        for path in sorted((ROOT / package).rglob("*.py")):
            found += _log_calls(path)
    return found


def _log_calls(path: Path) -> Iterator[LogCall]:
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for node in ast.walk(function):
            match node:
                case ast.Call(func=ast.Attribute(attr=attr, value=logger), args=args) if (
                    attr in LEVELS and "log" in ast.unparse(logger).rpartition(".")[2].lower()
                ):
                    text = args[1] if attr == "log" else args[0]
                    if function.name == "_say":  # its callers' texts count
                        continue
                    assert isinstance(text, ast.Constant), ast.unparse(node)
                    yield LogCall(str(path.relative_to(ROOT)), function.name, _told(text.value))
                case ast.Call(
                    func=ast.Attribute(attr="_say"), args=[ast.Constant(value=str(said)), *_]
                ):
                    yield LogCall(str(path.relative_to(ROOT)), function.name, _told(said))


def _told(template: object) -> str:
    return re.sub(r"%(\.\d+)?[sdgrfx]", "…", str(template))


def test_every_log_line_is_on_the_page() -> None:
    """Each call that logs has its line in the tables, with … for what differs; those that pass on a text
    of another have that.
    """
    told = flat(between(PAGE, "log lines"))
    calls = log_calls()
    assert len(calls) > 30
    missing = [call for call in calls if call.text != "…" and f"`{call.text}`" not in told]
    passing = {(call.module, call.function) for call in calls if call.text == "…"}
    assert missing == []
    assert passing == PASSED_ON.keys()
    assert [text for text in PASSED_ON.values() if text not in told] == []
    assert "`… log lines found no room and were dropped`" in told  # made without a call


def test_the_page_has_no_line_that_is_gone() -> None:
    """Each row with a line in it is one that some module can say."""
    rows = re.findall(r"^\| [\w ]+ \| `(.*?)` \|", between(PAGE, "log lines"), re.MULTILINE)
    assert len(rows) > 30
    calls = {call.text for call in log_calls()}
    sources = "".join(path.read_text() for path in sorted((ROOT / "publisher").rglob("*.py")))
    for row in rows:
        pieces = [piece for piece in re.split("…", row) if len(piece) > 3]
        assert row in calls or all(piece[:24].strip() in sources for piece in pieces), row


# -------------------------------------------------------------------------------------- findings


def findings() -> set[str]:
    """What `kvevents doctor` can say, with … for what differs."""
    found: set[str] = set()
    for path in sorted((ROOT / "publisher/tools/doctor").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Assign(targets=[ast.Name(id="text" | "late" | "what")], value=value):
                    found.add(_template(value))
                case ast.AugAssign(target=ast.Name(id="text"), value=value):
                    found.add(_template(value))
                case ast.Call(func=ast.Name(id="Finding"), args=[_, _, value, *_]):
                    found.add(_template(value))
                case ast.Call(func=ast.Name(id="_wrong"), args=[_, value, *_]):
                    found.add(_template(value))
                case ast.Call(func=ast.Attribute(attr="wrong"), args=[value, *_]):
                    found.add(_template(value))
                case _:
                    pass
    return {one for one in found if any(map(str.isalpha, one)) and " " in one}


def _template(value: ast.expr) -> str:
    match value:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            parts = [str(part.value) if isinstance(part, ast.Constant) else "…" for part in values]
            return re.sub("…+", "…", "".join(parts))
        case ast.Call(func=ast.Name(id="one_line"), args=[inner]):
            return _template(inner)
        case _:
            return ""


def test_every_finding_of_the_doctor_is_in_the_runbook() -> None:
    """Each sentence that a probe can come to is on the page, well or not; advice need not be."""
    told = flat(between(PAGE, "findings"))
    found = findings()
    assert len(found) > 70
    assert [one for one in sorted(found) if one not in told] == []


# --------------------------------------------------------------------------------------- metrics


@pytest.mark.integration
def test_every_metric_of_a_real_sidecar_is_on_the_page(tmp_path: Path) -> None:
    """What a sidecar serves at /metrics is what docs/metrics.md lists, no more and no less; and the
    alerts ask for metrics, and values of their labels, that are served.
    """
    with spawn(WORKER, config(tmp_path)) as sidecar:
        code, body = get(f"{sidecar.client.http_endpoint}/metrics")
    assert code == 200
    samples: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(body):
        for sample in family.samples:
            name = re.sub("_(bucket|sum|count|created)$", "", sample.name)
            labels = {f'{key}="{value}"' for key, value in sample.labels.items()}
            samples.setdefault(name, set()).update(labels)
    listed = set(
        re.findall(r"^\| `(kv_events_\w+)` \|", (DOCS / "metrics.md").read_text(), re.MULTILINE)
    )
    assert {name for name in samples if name.startswith("kv_events_")} == listed
    for name, label in re.findall(r"(kv_events_\w+)(?:\{([^}]*)\})?", PAGE.read_text()):
        assert name in samples, name
        if label:
            assert label.replace("!=", "=") in samples[name], (name, label)


def test_every_alert_is_on_the_page() -> None:
    """The rules of docker/monitoring/alerts.yaml and the table of alerts are the same."""
    rules = re.findall(r"alert: (\w+)", (ROOT / "docker/monitoring/alerts.yaml").read_text())
    told = re.findall(r"^\| `(\w+)` \|", between(PAGE, "alerts"), re.MULTILINE)
    assert len(rules) > 10
    assert sorted(told) == sorted(rules)
