"""The first frame of every message of a sink: a text with {fields} for what is known only when it runs.

`{{` and `}}` are braces. llm-d's is `kv@{pod_ip}:8000@{model}`, 8000 being the port the engine serves on;
it splits at every `@` and wants three parts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from publisher.config.checks import ConfigError, check_text, shown

__all__ = ["FIELDS", "check_topic", "render_topic", "topic_fields"]

FIELDS = (
    "pod_ip",
    "port",
    "pod_name",
    "namespace",
    "model",
    "served_model",
    "dp_rank",
    "worker_id",
)
"""What a topic may name. `port`: of the PUB socket, which has to be bound."""

_PIECE = re.compile(r"\{\{|\}\}|\{(?P<field>[^{}]*)\}|(?P<brace>[{}])|(?P<text>[^{}]+)")
_LLM_D = "kv@"
_LLM_D_SIGNS = 2


def check_topic(key: str, template: object, *, of_llm_d: bool = False) -> None:
    """Raises ConfigError unless `template` is a topic whose fields are known; `of_llm_d`: and one that
    llm-d takes apart as it should, if it is of its form.
    """
    _pieces(key, template)
    text = str(template)
    signs = text.count("@")
    if of_llm_d and text.startswith(_LLM_D) and signs != _LLM_D_SIGNS:
        raise ConfigError(
            f"{key}: {shown(text)} has {signs} @, and llm-d wants {_LLM_D_SIGNS}: kv@POD@MODEL"
        )


def topic_fields(template: str) -> tuple[str, ...]:
    """The fields that `template`, a checked one, names."""
    return tuple(name for is_field, name in _pieces("topic", template) if is_field)


def render_topic(key: str, template: str, facts: Mapping[str, str]) -> bytes:
    """The topic. An empty value counts as none.

    Raises ConfigError for a field without a value, for what is too long, and for a value with an `@` in
    a topic that llm-d would split there.
    """
    parts: list[str] = []
    of_llm_d = template.startswith(_LLM_D) and template.count("@") == _LLM_D_SIGNS
    for is_field, text in _pieces(key, template):
        value = facts.get(text, "") if is_field else text
        if not value:
            raise ConfigError(f"{key}: {{{text}}} of {shown(template)} has no value")
        if is_field and "@" in value and of_llm_d:
            where = f"{{{text}}} of {shown(template)}"
            raise ConfigError(f"{key}: {where} is {shown(value)}; llm-d splits a topic at every @")
        parts.append(value)
    topic = "".join(parts)
    check_text(key, topic)
    return topic.encode()


def _pieces(key: str, template: object) -> list[tuple[bool, str]]:
    """The texts and fields in turn; True: a field."""
    check_text(key, template)
    text = str(template)
    pieces: list[tuple[bool, str]] = []
    for found in _PIECE.finditer(text):
        if found["brace"] is not None:
            reason = f"has a {found['brace']} alone; {found['brace'] * 2} is the sign itself"
            raise ConfigError(f"{key}: {shown(text)} {reason}")
        field = found["field"]
        if field is None:
            pieces.append((False, found["text"] or found[0][0]))
        elif field in FIELDS:
            pieces.append((True, field))
        else:
            known = ", ".join(FIELDS)
            raise ConfigError(f"{key}: {shown(field)} in {shown(text)} is not one of {known}")
    return pieces
