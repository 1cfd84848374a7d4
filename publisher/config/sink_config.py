"""One public output, as a sidecar is told of it. Checked once, here."""

from __future__ import annotations

import re
import typing
from typing import Any, Literal

import msgspec

from kvevents.dialect import (
    DIALECTS,
    NAMESPACES,
    PRESETS,
    Dialect,
    EventForm,
    HashForm,
    Preset,
)
from kvevents.events import StorageMedium
from kvevents.store_form import check_object_key
from publisher.config.checks import (
    NONE,
    ConfigError,
    check_choice,
    check_flag,
    check_int,
    check_seconds,
    check_text,
    settle_none,
    shown,
)
from publisher.config.endpoint import Endpoint, check_target
from publisher.config.topic import check_topic, topic_fields

__all__ = ["Mode", "SinkConfig"]

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
_LEAST_REBASE = 1000
_UNSAID: Any = msgspec.UNSET
_REPLAY_ENDPOINT = "tcp://127.0.0.1:5558"
_MEDIUM_LENGTH = 64
_OF_DIALECT = ("event_form", "hash_form", "blocks_per_event", "object_key")
_OF_PRESET = (
    *("topic", "replay_frames", "replay_padding", "rebase_after", "reset_sentinel"),
    *("tells_joiners", "coalesce_s"),
)
_OF_STORE = (StorageMedium.DISK, StorageMedium.EXTERNAL)
_SPOKEN: dict[str, tuple[str, ...]] = {
    "map": NAMESPACES,
    "vllm": ("lora_name", "cache_salt", "extra_keys"),
    "array": ("lora_name",),
    "mooncake": ("lora_name", "cache_salt"),
}
"""What each event form can say of a namespace."""

Mode = Literal["bind", "connect"]


class SinkConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """One public output. What SGLang's and vLLM's --kv-events-config has too is named as there.

    `name`: its label in metrics, logs and file names; empty becomes `sink0`, `sink1` by position.
    `dialect`: a preset, one of kvevents.dialect.DIALECTS; it says what is unsaid here of `event_form` to
    `tells_joiners`, `topic`, `coalesce_s` and `rebase_after`. Those are as in kvevents.dialect, but for
    `media`: by medium what it is told as, None to leave it out, and of the preset where it is not named.
    `token_ids`: False leaves the prompts' tokens out. `mode`: whether the PUB socket binds, or connects
    to routers that bind. `endpoint`: where to; several only to connect. `replay_endpoint`: where the
    replay socket is bound; None: no replay; unsaid, tcp://127.0.0.1:5558 to bind and None to connect.
    `add_dp_rank`: whether rank N of a worker adds N to ports, and _dpN to a path. None: where it binds,
    and not where it connects, for ranks have their routers in common. True: there too, as engines do.
    False: nowhere, for ranks that share no host. `topic`: the first frame of every message, see
    publisher.topic. `buffer_steps`, `buffer_bytes`: how many batches, and bytes of memory, a replay can
    reach back before it starts from a snapshot. `hwm`: messages queued for one subscriber before it
    loses some. `heartbeat_s`: an idle sink publishes an empty batch this often. `coalesce_s`: batches
    of so long are merged into one. `rebase_after`: so many seqs after the state was told whole they start
    over at 0.
    """

    name: str = ""
    dialect: str = "sglang"
    event_form: EventForm = _UNSAID
    hash_form: HashForm = _UNSAID
    media: dict[StorageMedium, str | None] = _UNSAID
    namespaces: tuple[str, ...] = _UNSAID
    blocks_per_event: int | None = _UNSAID
    object_key: str = _UNSAID
    replay_frames: int = _UNSAID
    replay_padding: int | None = _UNSAID
    reset_sentinel: bool = _UNSAID
    tells_joiners: bool = _UNSAID
    token_ids: bool = True
    mode: Mode = "bind"
    endpoint: str | tuple[str, ...] = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = _UNSAID
    add_dp_rank: bool | None = None
    topic: str = _UNSAID
    buffer_steps: int = 10_000
    buffer_bytes: int = 256 << 20
    hwm: int = 100_000
    heartbeat_s: float = 5.0
    coalesce_s: float = _UNSAID
    rebase_after: int | None = _UNSAID

    def __post_init__(self) -> None:
        check_text("name", self.name)
        if self.name and _NAME.fullmatch(self.name) is None:
            raise ConfigError(f"name: {shown(self.name)} is not 1..64 of A-Z a-z 0-9 _ . -")
        check_choice("dialect", self.dialect, DIALECTS)
        check_flag("token_ids", self.token_ids)
        self._settle_dialect(PRESETS[self.dialect])
        self._check_dialect()
        check_choice("mode", self.mode, typing.get_args(Mode))
        self._settle_replay()
        self._check_endpoints()
        if self.add_dp_rank is not None:
            check_flag("add_dp_rank", self.add_dp_rank)
        self._check_topic()
        check_int("buffer_steps", self.buffer_steps, 1)
        check_int("buffer_bytes", self.buffer_bytes, 1)
        check_int("hwm", self.hwm, 1, 2**31 - 1)
        check_seconds("heartbeat_s", self.heartbeat_s, 0.01, 3600)
        check_seconds("coalesce_s", self.coalesce_s, 0, 10)
        if self.rebase_after is not None:
            check_int("rebase_after", self.rebase_after, _LEAST_REBASE)

    def _settle_dialect(self, preset: Preset) -> None:
        """Take from the preset what is unsaid."""
        for name in ("blocks_per_event", "replay_padding", "rebase_after"):
            settle_none(self, name)
        media: dict[StorageMedium, str | None] = {
            **dict.fromkeys(StorageMedium),
            **dict(preset.dialect.media),
        }
        if self.media is not _UNSAID:
            if not isinstance(self.media, dict):
                raise ConfigError(f"media: {shown(self.media)} is not an object")
            for name, text in self.media.items():
                check_choice("media", name, tuple(StorageMedium))
                media[StorageMedium(name)] = None if text == NONE else text
        msgspec.structs.force_setattr(self, "media", media)
        for source, names in ((preset.dialect, _OF_DIALECT), (preset, _OF_PRESET)):
            for name in names:
                if getattr(self, name) is _UNSAID:
                    msgspec.structs.force_setattr(self, name, getattr(source, name))
        check_choice("event_form", self.event_form, typing.get_args(EventForm))
        if self.namespaces is _UNSAID:
            spoken = _SPOKEN[str(self.event_form)]
            told = tuple(name for name in preset.dialect.namespaces if name in spoken)
            msgspec.structs.force_setattr(self, "namespaces", told)

    def _check_dialect(self) -> None:
        check_choice("hash_form", self.hash_form, typing.get_args(HashForm))
        for medium, text in self.media.items():
            if text is not None:
                check_text(f"media.{medium}", text)
                if not 0 < len(text) <= _MEDIUM_LENGTH or not text.isprintable():
                    bound = f"1..{_MEDIUM_LENGTH} characters that can be printed"
                    raise ConfigError(f"media.{medium}: {shown(text)} is not of {bound}")
        told = [medium for medium, text in self.media.items() if text is not None]
        if not told:
            raise ConfigError("media: at least one is needed, or the sink tells nothing")
        if not isinstance(self.namespaces, (list, tuple)):
            raise ConfigError(f"namespaces: {shown(self.namespaces)} is not a list")
        msgspec.structs.force_setattr(self, "namespaces", tuple(self.namespaces))
        for name in self.namespaces:
            check_choice("namespaces", name, NAMESPACES)
            if name not in _SPOKEN[self.event_form]:
                known = ", ".join(_SPOKEN[self.event_form]) or "none"
                raise ConfigError(
                    f"namespaces: {name!r} cannot be told in event_form {self.event_form!r}; {known} can"
                )
        if self.blocks_per_event is not None:
            check_int("blocks_per_event", self.blocks_per_event, 1)
        check_text("object_key", self.object_key)
        if self.event_form == "mooncake":
            self._check_store(told)
        check_int("replay_frames", self.replay_frames, 3, 4)
        if self.replay_padding is not None:
            check_int("replay_padding", self.replay_padding, 0)
        check_flag("reset_sentinel", self.reset_sentinel)
        check_flag("tells_joiners", self.tells_joiners)

    def _check_store(self, told: list[StorageMedium]) -> None:
        """What only a sink that tells of objects in a store has."""
        for medium in told:
            if medium not in _OF_STORE:
                raise ConfigError(
                    f"media.{medium}: event_form 'mooncake' tells of {', '.join(_OF_STORE)} alone"
                )
        try:
            check_object_key(self.object_key)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    @property
    def spelling(self) -> Dialect:
        """All that the payloads depend on."""
        return Dialect(
            event_form=self.event_form,
            hash_form=self.hash_form,
            media=tuple((medium, text) for medium, text in self.media.items() if text is not None),
            namespaces=self.namespaces,
            blocks_per_event=self.blocks_per_event,
            token_ids=self.token_ids,
            object_key=self.object_key,
        )

    def _settle_replay(self) -> None:
        if self.replay_endpoint is _UNSAID:
            settled = _REPLAY_ENDPOINT if self.mode == "bind" else None
            msgspec.structs.force_setattr(self, "replay_endpoint", settled)
        settle_none(self, "replay_endpoint")

    def _check_topic(self) -> None:
        check_topic("topic", self.topic, of_llm_d=self.dialect == "llm-d")
        if "port" not in topic_fields(self.topic):
            return
        if self.mode == "connect":
            why = "the port of what it connects to says nothing of this worker"
        elif self.endpoints[0].startswith("ipc:"):
            why = f"{shown(self.endpoints[0])} has none"
        else:
            return
        raise ConfigError(f"topic: {{port}} of {shown(self.topic)}: {why}; write the port itself")

    def _check_endpoints(self) -> None:
        if isinstance(self.endpoint, tuple):
            if not self.endpoint:
                raise ConfigError("endpoint: at least one is needed")
            if len(self.endpoint) > 1 and self.mode == "bind":
                raise ConfigError(
                    f"endpoint: {shown(self.endpoint)} are several, and mode 'bind' takes one"
                )
        seen: list[Endpoint] = []
        for endpoint in self.endpoints:
            parsed = Endpoint.parse("endpoint", endpoint)
            if self.mode == "connect":
                check_target("endpoint", endpoint)
            if any(parsed.takes(other) for other in seen):
                raise ConfigError(f"endpoint: {shown(endpoint)} is there twice")
            seen.append(parsed)
        if self.replay_endpoint is not None:
            replay = Endpoint.parse("replay_endpoint", self.replay_endpoint)
            if self.mode == "bind" and replay.takes(seen[0]):
                raise ConfigError(f"replay_endpoint: {replay} is the endpoint as well")

    @property
    def endpoints(self) -> tuple[str, ...]:
        """`endpoint` as a tuple, also where it is one."""
        return self.endpoint if isinstance(self.endpoint, tuple) else (self.endpoint,)

    @property
    def endpoint_moves(self) -> bool:
        """Whether the rank is added to `endpoint`."""
        return self.mode == "bind" if self.add_dp_rank is None else self.add_dp_rank

    @property
    def replay_endpoint_moves(self) -> bool:
        """Whether the rank is added to `replay_endpoint`."""
        return self.add_dp_rank is not False

    def endpoints_of(self, dp_rank: int) -> tuple[str, ...]:
        """Where the PUB socket of one rank binds or connects."""
        rank = dp_rank if self.endpoint_moves else 0
        return tuple(str(Endpoint.parse("endpoint", one).for_rank(rank)) for one in self.endpoints)

    def replay_endpoint_of(self, dp_rank: int) -> str | None:
        """Where the replay socket of one rank is bound."""
        if self.replay_endpoint is None:
            return None
        rank = dp_rank if self.replay_endpoint_moves else 0
        return str(Endpoint.parse("replay_endpoint", self.replay_endpoint).for_rank(rank))
