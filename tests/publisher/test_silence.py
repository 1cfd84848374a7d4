"""Events are on and none come."""

from __future__ import annotations

from math import inf

from publisher.sidecar.silence import SilenceWatch


def test_messages_without_events_are_said_once() -> None:
    """Traffic for so long and not one event: one warning that says how much came, then none (106)."""
    watch = SilenceWatch(60.0, began=1000.0)
    assert watch.check(1059.9, messages=500, events=0) is None
    assert watch.wake_at == 1060.0
    said = watch.check(1060.0, messages=510, events=0)
    assert said is not None
    assert "510 messages in 60 s" in said
    assert "\n" not in said
    assert watch.check(9999.0, messages=900, events=0) is None
    assert watch.wake_at == inf


def test_a_worker_that_never_said_anything_is_another_fault() -> None:
    """Nothing at all in that time points at the worker, not at its cache (106)."""
    said = SilenceWatch(5.0, began=0.0).check(5.0, messages=0, events=0)
    assert said is not None
    assert "nothing has come from the worker in 5 s" in said


def test_one_event_is_enough() -> None:
    """A worker that has told an event may be idle for ever: nothing is said, and no wake-up left."""
    watch = SilenceWatch(60.0, began=0.0)
    assert watch.check(10.0, messages=1, events=1) is None
    assert watch.wake_at == inf
    assert watch.check(1e6, messages=1, events=1) is None
