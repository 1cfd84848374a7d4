"""kvevents.events: how media are spelled."""

from __future__ import annotations

from typing import Any

import pytest

from kvevents import StorageMedium

SPELLINGS = {
    StorageMedium.GPU: ["GPU", "gpu", "Device", ""],
    StorageMedium.CPU: ["CPU_PINNED", "cpu_pinned", "CPU", "cpu", "CPU_TIER1"],
    StorageMedium.DISK: ["DISK", "disk", "STORAGE", "NVMe", "cpu_tier2"],
    StorageMedium.EXTERNAL: ["EXTERNAL", "external", "REMOTE", "network", "shared"],
}


@pytest.mark.parametrize(("medium", "spellings"), SPELLINGS.items())
def test_other_spellings_are_understood(medium: StorageMedium, spellings: list[str]) -> None:
    """Case 102: media are read in any case and in other systems' words."""
    assert {StorageMedium(text) for text in spellings} == {medium}


@pytest.mark.parametrize("bad", ["HBM3", "GPU ", "unknown", None, 0, b"GPU"])
def test_an_unknown_medium_is_never_the_gpu(bad: Any) -> None:
    """Case 102: what is not in the list is no medium at all."""
    with pytest.raises(ValueError, match="is not a valid StorageMedium"):
        StorageMedium(bad)


def test_our_spelling_is_the_wires() -> None:
    """Case 20: what we send is one of four fixed strings."""
    assert [str(medium) for medium in StorageMedium] == ["GPU", "CPU_PINNED", "DISK", "EXTERNAL"]
