"""docs/configuration.md says what there is."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from publisher.config import CurveConfig, RelayConfig, SidecarConfig, SinkConfig, read_config
from publisher.topic import FIELDS

DOC = Path(__file__).parent.parent.parent / "docs" / "configuration.md"


def rows(section: str) -> dict[str, str]:
    """The table under a heading: defaults by key."""
    text = DOC.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", text, re.MULTILINE))


@pytest.mark.parametrize(
    ("section", "kind"),
    [
        ("The sidecar", SidecarConfig),
        ("A sink", SinkConfig),
        ("An engine's own publisher: relay", RelayConfig),
        ("CURVE", CurveConfig),
    ],
)
def test_every_key_is_there_with_its_default(section: str, kind: type[msgspec.Struct]) -> None:
    """Keys and defaults of the tables are those of the configuration, no more and no fewer."""
    told = rows(section)
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    assert told.keys() == fields.keys()
    for name, default in told.items():
        field = fields[name]
        if name in ("sinks", "name"):  # said in words
            continue
        if field.required:
            assert default == "needed", name
        elif field.default is None:
            assert default == "none", name
        else:
            assert default == f"`{msgspec.json.encode(field.default).decode()}`", name


def test_topic_fields_are_all_told() -> None:
    """The table names every field that a topic may have."""
    (row,) = re.findall(r"^\| `topic` .*$", DOC.read_text(), re.MULTILINE)[:1]
    assert set(re.findall(r"`\{(\w+)\}`", row)) == set(FIELDS)


def test_the_example_is_one() -> None:
    """The TOML at the top can be read."""
    import tomllib

    example = re.search(r"```toml\n(.*?)```", DOC.read_text(), re.DOTALL)
    assert example is not None
    config = read_config(SidecarConfig, tomllib.loads(example[1]))
    assert [sink.name for sink in config.sinks] == ["routers", "llm-d"]
