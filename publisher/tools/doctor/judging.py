"""What it means for a router: what came, what did not, under which topic, and in whose words. No I/O."""

from __future__ import annotations

from collections.abc import Iterator

from kvevents.dialect import DIALECTS
from kvevents.frames import JOIN
from kvevents.lint import Consumer, Lint
from kvevents.lint import Finding as Loss
from publisher.checks import one_line, shown
from publisher.tools.doctor.content import Content
from publisher.tools.doctor.diagnosis import Finding
from publisher.tools.doctor.listening import Heard

__all__ = ["enough", "judge_content", "judge_fit", "judge_liveness", "judge_replay", "judge_topic"]

_REST_S, _FAULTY_S, _JUDGED_S = 0.3, 0.6, 1.0
_HEARTBEAT_S = 5.0
_MOST_LOSSES = 4
_NO_EVENTS = (
    "send it a prompt longer than a block while this runs. vLLM: --kv-events-config"
    ' \'{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557"}\', and prefix'
    " caching on; SGLang: --kv-events-config, and no --disable-radix-cache"
)
_NO_PUMP = (
    "does the worker call sidecar.pump(cache) after each change, and does it serve prompts longer than a"
    " page? --http http://HOST:PORT (the sidecar's, in its log) looks at /state"
)
_TOPICS = '"topic" in --kv-events-config of vLLM and SGLang, --topic of kvevents serve'
_OF_OTHERS = {"llm-d-sglang": "llm-d", "mooncake-vllm": "mooncake"}
"""Consumers that have no dialect of their own, and whose is nearest."""


def enough(live: Content, told: Content, topic: str, *, judged: bool) -> float | None:
    """For how long to listen since the first live message; None: until the time is up. `judged`: whether
    a consumer is to judge what comes.
    """
    if live.malformed or live.unreadable:
        return _FAULTY_S
    if not live.batches:
        return None
    if topic and not _matching(live, topic):
        return _FAULTY_S
    if live.stored:
        return _JUDGED_S if judged else _REST_S
    if told.stored:
        return _REST_S
    return None


# ------------------------------------------------------------------------------------------- topic


def _matching(content: Content, topic: str) -> int:
    prefix = topic.encode()
    return sum(count for one, count in content.topics.items() if one.startswith(prefix))


def judge_topic(heard: Heard, topic: str, consumer: Consumer | None = None) -> Iterator[Finding]:
    """Whether what comes would pass the router's filter."""
    content = heard.live if heard.live.topics else heard.told
    if not content.topics:
        return
    names = ", ".join(_topic(one) for one, _ in content.topics.most_common(3))
    more = len(content.topics) - 3
    names += f" and {more} more" if more > 0 else ""
    if not topic:
        yield Finding("topic", "ok", f"messages come under topic {names}")
        return
    passing = _matching(content, topic)
    if not passing:
        text = f"messages come under topic {names}, and the filter is {shown(topic)}"
        ((seen, _),) = content.topics.most_common(1)
        yield Finding("topic", "wrong", text, _change_topic(seen, topic, consumer), stops=True)
        return
    total = sum(content.topics.values())
    if passing < total:
        text = f"the filter {shown(topic)} takes {passing} of {total} messages; topics are {names}"
        yield Finding("topic", "unknown", text)
        return
    yield Finding("topic", "ok", f"the filter {shown(topic)} takes topic {names}")


def _change_topic(seen: bytes, wanted: str, consumer: Consumer | None) -> str:
    """At either end; at the publisher's alone where the router reads no other."""
    if consumer is None or consumer.topic == "any":
        return (
            f"set the router's filter to {_topic(seen)} (an empty one takes all), or the publisher's"
            f" topic to {shown(wanted)} ({_TOPICS})"
        )
    if isinstance(consumer.topic, tuple):
        form = " or ".join(shown(one.decode()) for one in consumer.topic)
        return (
            f"set the publisher's topic to {form}, for {consumer.name} reads no other ({_TOPICS})"
        )
    return (
        f"set the publisher's topic to kv@IP:PORT@MODEL, for {consumer.name} reads no other ({_TOPICS});"
        f" {consumer.name}'s own filter is kvEventsConfig.topicFilter"
    )


def _topic(topic: bytes) -> str:
    return shown(topic.decode(errors="backslashreplace"))


# ---------------------------------------------------------------------------------------- liveness


def judge_liveness(heard: Heard) -> Finding:
    """Whether anything comes, and whether it is more than signs of life."""
    live, told = heard.live, heard.told
    lasted = f"{heard.lasted_s:.1f} s"
    if not live.messages:
        return _judge_silence(heard, lasted)
    if live.malformed and not live.batches:
        text = f"its {_number(live.malformed, 'message')} are none of KV events: {live.malformed_reason}"
        if live.malformed == 1:
            text = f"its 1 message is none of KV events: {live.malformed_reason}"
        advice = (
            "is this the port of something else that publishes? KV events are [topic, seq, payload]"
        )
        return Finding("events", "wrong", text, advice, stops=True)
    if live.unreadable and live.unreadable == live.batches:
        text = f"no payload of {_number(live.batches, 'message')} can be read: {live.reason}"
        advice = "KV events are MessagePack: is this the port of something else that publishes?"
        return Finding("events", "wrong", text, advice, stops=True)
    if live.stored or (live.events and told.stored):
        return Finding("events", "ok", f"{_counts(live)} in {lasted}")
    if told.stored:
        text = f"{_number(live.batches, 'heartbeat')} in {lasted}, and no change; {_replayed(told)}"
        return Finding("events", "ok", text)
    if live.events:
        return _judge_no_stores(heard, lasted)
    return _judge_heartbeats(heard, lasted)


def _judge_silence(heard: Heard, lasted: str) -> Finding:
    told = heard.told
    if told.events > told.cleared:
        text = f"nothing happens: no message came in {lasted}; {_replayed(told)}"
        return Finding("events", "unknown", text, "send it a prompt, and look again", stops=True)
    if heard.answered:
        text = f"it said nothing in {lasted}, and there is no event in its replay"
        return Finding("events", "wrong", text, _NO_EVENTS, stops=True)
    text = f"the publisher said nothing in {lasted}"
    advice = _NO_EVENTS
    if heard.lasted_s > 2 * _HEARTBEAT_S:
        advice += f". It is none of our sidecars: they say something every {_HEARTBEAT_S:g} s"
    return Finding("events", "wrong", text, advice, stops=True)


def _judge_no_stores(heard: Heard, lasted: str) -> Finding:
    live = heard.live
    if live.skipped == live.events:
        text = f"no event of {_number(live.batches, 'batch')} can be read: {live.skipped_reason}"
        advice = "kvevents tail -v shows them; lint says what each router makes of them"
        return Finding("events", "wrong", text, advice, stops=True)
    if live.cleared == live.events:
        text = f"only AllBlocksCleared came in {lasted}, and no block was stored"
        return Finding("events", "wrong", text, _NO_PUMP, stops=True)
    text = f"{_counts(live)} in {lasted}: blocks go and none is stored"
    advice = "a full cache at rest? send it a new prompt, and look again"
    return Finding("events", "unknown", text, advice)


def _judge_heartbeats(heard: Heard, lasted: str) -> Finding:
    live = heard.live
    beats = _number(live.batches, "empty batch", "empty batches")
    if not heard.answered:
        text = f"nothing changes: {beats} in {lasted}, with which a sidecar shows that it lives"
        advice = (
            "send the worker a prompt longer than a page, and look again; --replay-endpoint and --http"
            " tell whether it has told anything yet"
        )
        return Finding("events", "unknown", text, advice, stops=True)
    if heard.told.removed:
        text = f"{beats} in {lasted}, and nothing is held now; {_replayed(heard.told)}"
        return Finding("events", "unknown", text, "send it a prompt, and look again")
    text = f"the sidecar lives and its worker tells nothing: {beats} in {lasted}, no event in its replay"
    return Finding("events", "wrong", text, _NO_PUMP, stops=True)


def _replayed(told: Content) -> str:
    if told.stored:
        return (
            f"its replay has {_number(told.stored_blocks, 'block')} stored, to seq {told.last_seq}"
        )
    return f"its replay has {_number(told.batches, 'batch', 'batches')}, to seq {told.last_seq}"


def _counts(content: Content) -> str:
    parts = [_number(content.batches, "batch", "batches")]
    if content.stored:
        parts.append(f"{_number(content.stored_blocks, 'block')} stored")
    for count, what in (
        (content.removed, "removal"),
        (content.cleared, "clear"),
        (content.skipped, "unread event"),
    ):
        if count:
            parts.append(_number(count, what))
    if content.empty:
        parts.append(f"{content.empty} empty")
    return ", ".join(parts)


# ----------------------------------------------------------------------------------------- content


def judge_content(heard: Heard, block_size: int | None) -> Iterator[Finding]:
    """Of what came, what a router cannot use."""
    content = heard.live if heard.live.stored or not heard.told.stored else heard.told
    if heard.live.batches and heard.live.malformed:
        text = f"{_number(heard.live.malformed, 'message')} of {heard.live.messages} are no batches"
        yield Finding("content", "wrong", f"{text}: {heard.live.malformed_reason}")
    if heard.live.unreadable and heard.live.unreadable < heard.live.batches:
        text = f"{heard.live.unreadable} of {heard.live.batches} payloads cannot be read"
        yield Finding("content", "wrong", f"{text}: {heard.live.reason}")
    if not content.events:
        return
    yield Finding("content", "ok", one_line(str(content.appearance)))
    if content.skipped and content.skipped < content.events:
        text = f"{content.skipped} of {_number(content.events, 'event')} cannot be read"
        advice = "kvevents tail -v shows which"
        yield Finding("content", "wrong", f"{text}: {content.skipped_reason}", advice)
    yield from _judge_sizes(content, block_size)
    yield from _judge_tokens(content)
    ranks = sorted(content.appearance.ranks)
    if len(ranks) > 1:
        text = f"ranks {', '.join(map(str, ranks[:8]))} are in one stream"
        advice = "a router that knows workers by address alone takes them for one"
        yield Finding("content", "unknown", text, advice)


def _judge_sizes(content: Content, block_size: int | None) -> Iterator[Finding]:
    sizes = sorted(content.appearance.block_sizes)
    told = ", ".join(map(str, sizes[:8]))
    if block_size is not None and sizes and block_size not in sizes:
        text = f"blocks have {told} tokens, and the router expects {block_size}"
        advice = (
            "set the router's block size to that, or the engine's (vLLM --block-size, SGLang"
            " --page-size): a router hashes prompts in blocks of its own size"
        )
        yield Finding("blocks", "wrong", text, advice, voids=True)
    elif len(sizes) > 1:
        text = f"block sizes {told} are in one stream, and a router reads one"
        advice = "a hybrid model's cache groups? follow the main one: relay it (serve --relay)"
        yield Finding("blocks", "wrong", text, advice)
    elif block_size is not None and sizes:
        yield Finding("blocks", "ok", f"blocks have {told} tokens, as the router expects")


def _judge_tokens(content: Content) -> Iterator[Finding]:
    look = content.appearance
    if look.tokens_left_out:
        text = "token_ids are left out, and most routers match prompts by them"
        advice = "token_ids = true of our sink; lint says which routers need them"
        yield Finding("content", "unknown", text, advice)
    if look.bigrams:
        text = f"token_ids of {_number(look.bigrams, 'event')} are pairs (EAGLE)"
        yield Finding(
            "content", "unknown", text, "a router that looks for single tokens misses them"
        )
    if content.mismatched:
        count = _number(content.mismatched, "event")
        text = f"token_ids of {count} are not as many as block_hashes × block_size"
        yield Finding("content", "wrong", text, "kvevents check says which")


# ------------------------------------------------------------------------------------------ replay


def judge_replay(where: str, heard: Heard) -> Finding:
    """What the replay endpoint answered."""
    told = heard.told
    if not heard.answered:
        text = f"{where} takes a request for a replay and does not answer"
        advice = (
            "is it the replay_endpoint of this publisher, and of this rank? An engine without one has"
            " nobody there; a stuck one answers late"
        )
        return Finding("replay", "wrong", text, advice)
    if told.malformed:
        text = f"{where} answers what is no replay: {told.malformed_reason}"
        return Finding("replay", "wrong", text, "is it another service's ROUTER?")
    if not (heard.ended or heard.cut):
        text = f"{where} began a replay and did not end it"
        return Finding("replay", "wrong", text, "routers wait for its end: is the publisher stuck?")
    frames = max(told.frame_counts, default=4)
    shape = "" if frames == 4 else f", {frames} frames an answer (vllm-router, llm-d need 4)"
    if not told.batches:
        return Finding("replay", "ok", f"{where} answers; it retains nothing{shape}")
    first = "from the state now" if told.start == JOIN else f"from seq {told.first_seq}"
    cut = ", and more" if heard.cut and not heard.ended else ""
    text = f"{where} answers {first}: {_counts(told)}, to seq {told.last_seq}{cut}{shape}"
    return Finding("replay", "ok", text)


# -------------------------------------------------------------------------------------------- fits


def judge_fit(heard: Heard, consumer: Consumer) -> Iterator[Finding]:
    """What this router would lose of what came, by the rules of `kvevents lint`."""
    live, told = heard.live, heard.told
    replay = bool(told.batches) and told.all_kept and heard.ended
    lint = Lint([consumer], replay=replay)
    losses: list[Loss] = []
    if replay and told.start is not None:
        lint.asked(told.start)
        for frames in told.kept:
            losses += lint.answer(frames)
    for frames in live.kept:
        losses += lint.live(frames)
    (tally,) = lint.tallies
    if not losses:
        text = f"the form fits (frames, topic, fields, hashes): {tally}"
        if not tally.blocks:
            text = f"whether the form fits cannot be told: {tally}"
        yield Finding("fit", "ok" if tally.blocks else "unknown", one_line(text))
        return
    stored = live.stored + (told.stored if replay else 0)
    lost = tally.lost
    all_lost = lost["batch"] >= tally.batches
    if not live.removed:  # they are counted among the events
        all_lost |= lost["event"] + lost["block"] >= stored > 0
    rules = {one.rule: one for one in reversed(losses)}
    for loss in list(rules.values())[::-1][:_MOST_LOSSES]:
        advice = _dialect(consumer.name)
        if loss.rule == "topic":
            advice = f"set the publisher's topic ({_TOPICS}); or {advice}"
        text = " ".join(one_line(str(loss)).split())
        yield Finding("fit", "wrong", text, advice, voids=all_lost)
    yield Finding("fit", "wrong", one_line(str(tally)))


def _dialect(name: str) -> str:
    dialect = _OF_OTHERS.get(name, name)
    if dialect not in DIALECTS:
        return "kvevents lint says the rest"
    return (
        f'dialect = "{dialect}" of our sink is what it reads; before an engine, put the relay: kvevents'
        f" serve --relay ENDPOINT --dialect {dialect}"
    )


def _number(count: int, one: str, many: str = "") -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"
