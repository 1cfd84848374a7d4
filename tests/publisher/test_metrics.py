"""What a scrape shows."""

from __future__ import annotations

import re
from pathlib import Path

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families
from publisher_status_rig import full_status

from publisher.sidecar.metrics import StatusCollector, scrape
from publisher.stream.status import SidecarStatus

DOCS = Path(__file__).parent.parent.parent / "docs" / "metrics.md"
Label = tuple[tuple[str, str], ...]


def values(status: SidecarStatus) -> dict[tuple[str, Label], float]:
    """Every sample of a scrape, by name and labels."""
    families = text_string_to_metric_families(scrape(lambda: status).decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_what_is_counted_is_what_is_shown() -> None:
    """Source, sinks, histograms and handshakes come out as they went in."""
    shown = values(full_status())
    sink = ("sink", "sink1")
    for name, labels, value in [
        ("kv_events_messages_offered_total", (), 100),
        ("kv_events_messages_total", (("result", "published"),), 80),
        ("kv_events_queue_depth", (), 10),
        ("kv_events_received_total", (("event", "stored"), ("medium", "GPU")), 1),
        ("kv_events_blocks_received_total", (("event", "stored"), ("medium", "GPU")), 2),
        ("kv_events_published_total", (("event", "removed"), ("medium", ""), sink), 1),
        ("kv_events_blocks_published_total", (("event", "removed"), ("medium", "GPU"), sink), 2),
        ("kv_events_dropped_total", (("reason", "filtered"), sink), 2),
        ("kv_events_sequence", (sink,), 42),
        ("kv_events_replay_requests_total", (("result", "served"), sink), 3),
        ("kv_events_replay_buffer_oldest_sequence", (sink,), 12),
        ("kv_events_subscribers", (sink,), 2),
        ("kv_events_live_blocks", (("medium", "GPU"),), 7),
        ("kv_events_publish_latency_seconds_count", (sink,), 4),
        ("kv_events_publish_latency_seconds_bucket", (("le", "0.00025"), sink), 2),
        ("kv_events_publish_latency_seconds_bucket", (("le", "10.0"), sink), 3),
        ("kv_events_publish_latency_seconds_bucket", (("le", "+Inf"), sink), 4),
        ("kv_events_curve_handshakes_total", (("result", "denied"),), 1),
    ]:
        assert shown[name, tuple(sorted(labels))] == value, name
    assert shown["kv_events_event_age_seconds_sum", (sink,)] == pytest.approx(120.0088)


def test_every_message_offered_is_in_the_metrics() -> None:
    """offered == published + refused + pending, from one scrape alone (89)."""
    shown = values(full_status())
    results = ("published", "missed", "skipped", "unreadable")
    told = sum(shown["kv_events_messages_total", (("result", one),)] for one in results)
    assert (
        shown["kv_events_messages_offered_total", ()] == told + shown["kv_events_queue_depth", ()]
    )


def test_all_metrics_are_documented_and_all_that_is_documented_is_there() -> None:
    """docs/metrics.md and a scrape agree on names, kinds, labels and help texts."""
    documented = {
        (name, kind, tuple(re.findall(r"`(\w+)`", labels)), told.strip())
        for name, kind, labels, told in re.findall(
            r"^\| `(\w+)` \| (\w+) \| (.*?) \| (.*?) \|$", DOCS.read_text(), re.MULTILINE
        )
    }
    shown = set()
    for family in StatusCollector(full_status, pause=lambda: None).collect():
        labels = {name for sample in family.samples for name in sample.labels} - {"le"}
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        kind = "gauge" if family.type == "info" else family.type
        shown.add((family.name + suffix, kind, tuple(sorted(labels)), family.documentation))
    assert documented == shown


def test_names_keep_to_the_rules() -> None:
    """One prefix, snake case, counters in _total, times and sizes in base units, a help text each."""
    for family in StatusCollector(full_status, pause=lambda: None).collect():
        assert re.fullmatch(r"kv_events(_[a-z]+)+", family.name)
        assert family.documentation.endswith(".")
        assert not re.search(r"_(ms|us|milliseconds|kib|mb)\b", family.name)


def test_labels_are_few() -> None:
    """One sink adds a fixed number of lines, whatever was published on it."""
    lines = [len(values(full_status(sinks))) for sinks in (0, 1, 2, 5)]
    assert lines[2] - lines[1] == lines[1] - lines[0] < 120
    assert lines[3] - lines[2] == 3 * (lines[1] - lines[0])


def test_a_label_value_cannot_break_the_format() -> None:
    """A model name with a quote and a newline in it is escaped."""
    status = full_status()
    nasty = 'a"b\nc\\d'
    status.worker = type(status.worker)(block_size=1, model=nasty)
    families = list(text_string_to_metric_families(scrape(lambda: status).decode()))
    build = next(one for one in families if one.name == "kv_events_build_info")
    assert build.samples[0].labels["model"] == nasty


def test_nothing_is_registered_for_the_whole_process() -> None:
    """An engine's own metrics, in the default registry, stay what they were."""
    before = prometheus_client.generate_latest()
    scrape(full_status)
    assert [
        line for line in prometheus_client.generate_latest().split(b"\n") if b"kv_events" in line
    ] == []
    assert b"kv_events" not in before


def test_the_loop_may_run_between_any_two_metrics() -> None:
    """A scrape lets go of the interpreter after every metric, not once at its end."""
    pauses: list[int] = []
    collector = StatusCollector(full_status, pause=lambda: pauses.append(1))
    for number, _ in enumerate(collector.collect()):
        assert len(pauses) == number
    assert len(pauses) > 30
