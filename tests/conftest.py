"""How tests run: Hypothesis profiles, and which tests wait for a GPU or for the stress profile."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

PROFILE = os.environ.get("KVEVENTS_PROFILE", "default")
STRESS_TIMEOUT_S = 3600

settings.register_profile(
    "default",
    max_examples=100,
    stateful_step_count=100,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "stress",
    max_examples=5000,
    stateful_step_count=100,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(PROFILE)

for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        # In the background of a script, or under nohup, whatever a test starts would ignore it too; what
        # has a handler here is as ever there.
        signal.signal(number, lambda *_: None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this run cannot or should not do; give the rest of a stress run its time."""
    for item in items:
        if PROFILE == "stress":
            item.add_marker(pytest.mark.timeout(STRESS_TIMEOUT_S))
        elif item.get_closest_marker("stress"):
            item.add_marker(pytest.mark.skip(reason="runs under KVEVENTS_PROFILE=stress"))
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))


@pytest.fixture(autouse=True)
def _process_as_it_was() -> Generator[None, None, None]:
    """A test that leaves the process another than it was makes a later one fail, which depends on the
    order of files. What wider fixtures change is there before.
    """
    before = _state_of_process()
    yield
    assert _state_of_process() == before


def _state_of_process() -> tuple[object, ...]:
    ours = sorted(signal.valid_signals() - {signal.SIGALRM})  # which is pytest-timeout's
    handlers = [signal.getsignal(number) for number in ours]
    theirs = "PYTEST_CURRENT_TEST", "MC_"  # the last of Mooncake's client, which sets them for good
    environment = {key: of for key, of in os.environ.items() if not key.startswith(theirs)}
    return Path.cwd(), environment, handlers, signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note what a test has shown of a consumer, where KVEVENTS_CONFORMANCE names a file for it."""
    report = yield
    row = item.get_closest_marker("conformance")
    ended = report.when == "call" or report.outcome != "passed"
    if row is not None and ended and (path := os.environ.get("KVEVENTS_CONFORMANCE")):
        told = {**row.kwargs, "test": item.nodeid, "outcome": report.outcome}
        with Path(path).open("a") as file:
            file.write(json.dumps(told) + "\n")
    return report


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
