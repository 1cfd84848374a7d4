"""docs/consumers.md says what there is."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from kvevents.dialect import DIALECTS, NAMESPACES, PRESETS, Preset
from kvevents.events import StorageMedium
from publisher import SidecarConfig, read_config

DOC = Path(__file__).parent.parent.parent / "docs" / "consumers.md"
HEADINGS = re.findall(r"^## (.*)$", DOC.read_text(), re.MULTILINE)


def section(heading: str) -> str:
    return DOC.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]


def media_of(preset: Preset) -> str:
    """As the table has it."""
    told = preset.dialect.media
    if [(medium.value, text) for medium, text in told] == [
        (m.value, m.value) for m in StorageMedium
    ]:
        return "all as they are"
    by_text: dict[str, list[str]] = {}
    for medium, text in told:
        by_text.setdefault(text, []).append(medium.value)
    return ", ".join(
        " and ".join(media) + ("" if media == [text] else f" as {text}")
        for text, media in by_text.items()
    )


@pytest.mark.parametrize("name", DIALECTS)
def test_the_table_is_the_presets(name: str) -> None:
    """Each preset has a row, and a section; the row says all that it sets."""
    preset = PRESETS[name]
    dialect = preset.dialect
    names = "all" if dialect.namespaces == NAMESPACES else ", ".join(dialect.namespaces) or "none"
    wanted = [
        f"`{name}`",
        dialect.event_form,
        dialect.hash_form,
        media_of(preset),
        names,
        str(dialect.blocks_per_event or ""),
        f"`{preset.topic}`" if preset.topic else "",
        str(preset.replay_frames),
        str(preset.replay_padding or ""),
        str(preset.rebase_after or ""),
        "yes" if preset.reset_sentinel else "",
        "yes" if preset.tells_joiners else "",
        str(preset.coalesce_s or ""),
    ]
    (row,) = [
        line for line in section("What each preset says").splitlines() if f"| `{name}` |" in line
    ]
    assert [cell.strip() for cell in row.strip("|").split("|")] == wanted
    assert name in HEADINGS
    assert (dialect.token_ids, dialect.object_key) == (True, "{digest}")


def test_every_configuration_is_one() -> None:
    """The TOML of each section can be read, and is of the section's dialect; that at the top is two."""
    for heading in HEADINGS:
        for block in re.findall(r"```toml\n(.*?)```", section(heading), re.DOTALL):
            config = read_config(SidecarConfig, tomllib.loads(block))
            assert [sink.dialect for sink in config.sinks] == [heading]
    (top,) = re.findall(r"```toml\n(.*?)```", DOC.read_text().split("\n## ")[0], re.DOTALL)
    config = read_config(SidecarConfig, tomllib.loads(top))
    assert [sink.dialect for sink in config.sinks] == ["aibrix", "dynamo"]
    assert all("```toml" in section(name) for name in DIALECTS)
