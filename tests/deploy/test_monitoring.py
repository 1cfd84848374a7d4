"""Alerts and dashboard ask for metrics that a sidecar has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from deploy_rig import DOCKER, commands, get, output_of, running_sidecar, yaml_of
from prometheus_client.parser import text_string_to_metric_families

from publisher import Sidecar

MONITORING = DOCKER / "monitoring"
DASHBOARD = json.loads((MONITORING / "grafana/dashboards/kvevents.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
RULES = [rule for group in yaml_of(MONITORING / "alerts.yaml")["groups"] for rule in group["rules"]]
_SELECTOR = re.compile(r"\b(kv_events_\w+|up)\b(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!=|!~|=)\s*"([^"]*)"')
_BY = re.compile(r"\b(?:by|on) \(([^)]*)\)")
_OF_THE_SCRAPE = {"job", "instance"}
_VARIABLE = re.compile(r"^(\$\w+|\(\.\+/\)\?kvevents)$")


def queries() -> Iterator[tuple[str, str]]:
    """Each with what asks for it."""
    for rule in RULES:
        yield rule["alert"], rule["expr"]
    for panel in PANELS:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for one in DASHBOARD["templating"]["list"]:
        if one["type"] == "query":
            yield one["name"], one["definition"]
    for one in DASHBOARD["annotations"]["list"]:
        yield one["name"], one["expr"]


@pytest.fixture(scope="module")
def sidecar() -> Iterator[Sidecar]:
    """A real one."""
    with running_sidecar() as sidecar:
        yield sidecar


@pytest.fixture(scope="module")
def series(sidecar: Sidecar) -> dict[str, list[dict[str, str]]]:
    """What a real sidecar shows: by name, the labels of each series."""
    status, text = get(f"{sidecar.http_endpoint}/metrics")
    assert status == 200
    found: dict[str, list[dict[str, str]]] = {"up": [{}]}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


@pytest.mark.integration
def test_every_metric_that_is_asked_for_is_there(series: dict[str, list[dict[str, str]]]) -> None:
    """By name, with each label that a selector or a `by` names, and each value that it names."""
    asked = 0
    for who, query in queries():
        selectors = _SELECTOR.findall(query)
        assert selectors, f"{who}: {query}"
        known = set(_OF_THE_SCRAPE)
        for name, matchers in selectors:
            asked += 1
            assert name in series, f"{who}: {name}"
            labels = {label for one in series[name] for label in one} | _OF_THE_SCRAPE
            known |= labels
            for label, operator, value in _MATCHER.findall(matchers):
                assert label in labels, f"{who}: {name} has no {label}"
                values = {one.get(label) for one in series[name]}
                plain = not _VARIABLE.match(value) and operator in ("=", "!=")
                assert not plain or value in values, f"{who}: {name} is never {label}={value}"
        for names in _BY.findall(query):
            assert {one.strip() for one in names.split(",")} <= known, f"{who}: {names}"
    assert asked > 50


@pytest.mark.integration
def test_what_an_alert_says_it_knows(series: dict[str, list[dict[str, str]]]) -> None:
    """Labels in a summary are labels of the metric; each alert has a severity and says what to do."""
    for rule in RULES:
        (name, _), *_ = _SELECTOR.findall(rule["expr"])
        labels = {label for one in series[name] for label in one} | _OF_THE_SCRAPE
        said = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        assert said <= labels, rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}


def test_every_alert_is_tested_firing_and_still() -> None:
    """alerts_test.yaml has both for each."""
    seen: dict[str, set[bool]] = {}
    for test in yaml_of(MONITORING / "alerts_test.yaml")["tests"]:
        for one in test.get("alert_rule_test", []):
            seen.setdefault(one["alertname"], set()).add(bool(one["exp_alerts"]))
    assert seen == {rule["alert"]: {True, False} for rule in RULES}


def test_promtool_takes_and_tests_the_rules() -> None:
    """Where it is installed (Debian's prometheus has it)."""
    commands("promtool")
    output_of("promtool", "check", "config", MONITORING / "prometheus.yml")
    output_of("promtool", "test", "rules", MONITORING / "alerts_test.yaml")


def test_promtool_takes_the_job_for_a_cluster(tmp_path: Path) -> None:
    """Under the name that the alerts look for, of the port that is scraped; but for the discovery, which
    Debian's promtool is built without.
    """
    config = yaml_of(MONITORING / "prometheus-kubernetes.yml")
    (job,) = config["scrape_configs"]
    assert (
        job["job_name"] == yaml_of(MONITORING / "prometheus.yml")["scrape_configs"][0]["job_name"]
    )
    assert job.pop("kubernetes_sd_configs") == [{"role": "pod"}]
    monitor = yaml_of(DOCKER / "kubernetes/monitoring/podmonitor.yaml")
    (scraped,) = monitor["spec"]["podMetricsEndpoints"]
    kept = [one["regex"] for one in job["relabel_configs"] if one.get("action") == "keep"]
    assert kept == [scraped["port"]]
    commands("promtool")
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    (tmp_path / "alerts.yaml").write_text((MONITORING / "alerts.yaml").read_text())
    output_of("promtool", "check", "config", tmp_path / "prometheus.yml")


def test_panels_do_not_lie_on_each_other() -> None:
    """Each has a place of its own in the 24 columns, an id of its own, and says what it shows."""
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {
            (at["x"] + across, at["y"] + down)
            for across in range(at["w"])
            for down in range(at["h"])
        }
        assert at["x"] + at["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert all(panel["description"] for panel in PANELS)


def test_the_dashboard_asks_the_source_that_is_chosen() -> None:
    """Every panel and variable by ${datasource}, which any Prometheus can be."""
    sources = [panel["datasource"] for panel in PANELS]
    sources += [target["datasource"] for panel in PANELS for target in panel["targets"]]
    assert {one["uid"] for one in sources} == {"${datasource}"}
    assert DASHBOARD["templating"]["list"][0]["name"] == "datasource"
