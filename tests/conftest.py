"""How tests run: Hypothesis profiles, and which tests wait for a GPU or for the stress profile."""

from __future__ import annotations

import os

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this run cannot or should not do; give the rest of a stress run its time."""
    for item in items:
        if PROFILE == "stress":
            item.add_marker(pytest.mark.timeout(STRESS_TIMEOUT_S))
        elif item.get_closest_marker("stress"):
            item.add_marker(pytest.mark.skip(reason="runs under KVEVENTS_PROFILE=stress"))
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
