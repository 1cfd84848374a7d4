"""publisher.config.topic: templates, and what cannot be one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from publisher.config.checks import ConfigError
from publisher.config.sink_config import SinkConfig
from publisher.config.topic import FIELDS, check_topic, render_topic, topic_fields

FACTS = {field: f"<{field}>" for field in FIELDS}
LLM_D = "kv@{pod_ip}:{port}@{model}"


@pytest.mark.parametrize(
    ("template", "topic"),
    [
        ("", b""),
        ("kv-events", b"kv-events"),
        (LLM_D, b"kv@<pod_ip>:<port>@<model>"),
        ("kv@w@m", b"kv@w@m"),
        ("".join(f"{{{field}}}/" for field in FIELDS), "".join(f"<{f}>/" for f in FIELDS).encode()),
        ("{{{model}}} {{model}}", b"{<model>} {model}"),
        ("a@b@c@d", b"a@b@c@d"),
        ("é{dp_rank}", "é<dp_rank>".encode()),
    ],
)
def test_a_topic_is_its_template_filled_in(template: str, topic: bytes) -> None:
    """Fields become their values, doubled braces braces, and all else stays."""
    check_topic("topic", template)
    assert render_topic("topic", template, FACTS) == topic


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "None is not a string"),
        ("{", "'{' has a { alone; {{ is the sign itself"),
        ("a}", "'a}' has a } alone; }} is the sign itself"),
        ("{a{b}}", "'{a{b}}' has a { alone"),
        ("{}", "'' in '{}' is not one of pod_ip, port,"),
        ("{0}", "'0' in '{0}' is not one of"),
        ("{model!r}", "'model!r' in '{model!r}' is not one of"),
        ("{model.__class__}", "'model.__class__' in"),
        ("{pod-ip}", "'pod-ip' in '{pod-ip}' is not one of"),
        ("\ud800", "'\\ud800' cannot be encoded"),
        ("x" * 4097, "4097 bytes are above 4096"),
    ],
)
def test_what_is_no_topic_is_named(template: object, said: str) -> None:
    """Case 106: an unknown field, or a brace alone, is refused."""
    with pytest.raises(ConfigError) as error:
        check_topic("sinks[0].topic", template)
    assert str(error.value).startswith(f"sinks[0].topic: {said}")


@pytest.mark.parametrize(("topic", "signs"), [("kv@{model}", 1), ("kv@b@m@x", 3)])
def test_parts_that_llm_d_would_not_take(topic: str, signs: int) -> None:
    """Case 106: its own sink refuses them; to others they are a topic like any."""
    with pytest.raises(ConfigError) as error:
        SinkConfig(dialect="llm-d", topic=topic)
    reason = f"has {signs} @, and llm-d wants 2: kv@POD@MODEL"
    assert str(error.value) == f"topic: {topic!r} {reason}"
    for dialect in ("sglang", "vllm", "dynamo"):
        assert SinkConfig(dialect=dialect, topic=topic).topic == topic
    assert render_topic("topic", "kv@{model}", {"model": "a@b"}) == b"kv@a@b"


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_needs_a_value(field: str) -> None:
    """A field that nobody gave, or gave nothing, is refused: its topic would match no filter."""
    for facts in ({}, {field: ""}):
        with pytest.raises(ConfigError) as error:
            render_topic("topic", f"a/{{{field}}}", facts)
        assert str(error.value) == f"topic: {{{field}}} of 'a/{{{field}}}' has no value"


def test_a_sign_that_llm_d_splits_at_is_refused_where_it_would() -> None:
    """`@` in a model breaks kv@POD@MODEL, and no other topic."""
    with pytest.raises(ConfigError) as error:
        render_topic("topic", LLM_D, FACTS | {"model": "org/m@v1"})
    assert str(error.value) == (
        "topic: {model} of 'kv@{pod_ip}:{port}@{model}' is 'org/m@v1'; llm-d splits a topic at every @"
    )
    assert render_topic("topic", "kv-{model}", {"model": "m@v1"}) == b"kv-m@v1"


def test_a_filled_in_topic_is_bounded_too() -> None:
    """4096 bytes, whatever the values are."""
    with pytest.raises(ConfigError, match=r"^topic: 8192 bytes are above 4096$"):
        render_topic("topic", "{model}{model}", {"model": "x" * 4096})


@given(st.text(st.sampled_from("{}a@") | st.characters()), st.text())
def test_any_template_is_taken_or_refused_in_one_line(template: str, value: str) -> None:
    """What is taken has just the fields it names; values are never read as templates."""
    try:
        check_topic("topic", template)
        fields = topic_fields(template)
        topic = render_topic("topic", template, dict.fromkeys(FIELDS, value))
    except ConfigError as error:
        said = str(error)
    else:
        assert topic.decode() == template.format(**dict.fromkeys(FIELDS, value))
        assert set(fields) <= set(FIELDS)
        return
    assert said.startswith("topic: ")
    assert len(said.splitlines()) == 1
