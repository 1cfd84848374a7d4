"""What it means for a router: what came, what did not, under which topic, and in whose words. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from kvevents.dialect import DIALECTS
from kvevents.frames import JOIN, live_frames
from kvevents.lint import Consumer, Lint
from kvevents.lint import Finding as Loss
from kvevents.lint.finding import Lost
from publisher.config.checks import one_line, shown
from publisher.tools.doctor.content import Content, Kept
from publisher.tools.doctor.diagnosis import Finding, Voids
from publisher.tools.doctor.listening import Heard
from publisher.tools.repeats import Repeated, Repeats

__all__ = ["enough", "judge_content", "judge_fit", "judge_liveness", "judge_replay", "judge_topic"]

_REST_S, _FAULTY_S, _JUDGED_S = 0.3, 0.6, 1.0
_HEARTBEAT_S = 5.0
_MOST_LOSSES = 4
_STEPS = ("batch", "event", "block", "stream", "misread", "unread")
"""What can be lost, in the order in which a router comes to it."""

_NO_EVENTS = (
    "send it a prompt longer than a block while this runs. vLLM: --kv-events-config"
    ' \'{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557"}\', and prefix'
    " caching on; SGLang: --kv-events-config, and no --disable-radix-cache"
)
_NO_PUMP = (
    "does the worker call sidecar.pump(cache) after each change, and does it serve prompts longer than a"
    " page? --http http://HOST:PORT (the sidecar's, in its log) looks at /state"
)
_AGAIN = "send it a prompt, and look again"
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
    unread = _unread(heard)
    if not live.messages and not unread:
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
    if unread and not live.events:
        advice = "is this the replay socket of something else? kvevents tail -v shows what comes"
        return Finding("events", "wrong", unread, advice, stops=True)
    if live.stored or (live.events and told.stored):
        return Finding("events", "ok", f"{_counts(live)} in {lasted}")
    if told.stored:
        text = (
            f"{_number(live.batches, 'heartbeat')} in {lasted}, and no change; {_replayed(heard)}"
        )
        return Finding("events", "ok", text)
    if live.events:
        return _judge_no_stores(heard, lasted)
    return _judge_heartbeats(heard, lasted)


def _unread(heard: Heard) -> str:
    """Why all of a replay says nothing; empty: it says something, or there is none of it."""
    told = heard.told
    count = _number(told.batches, "replayed batch", "replayed batches")
    if heard.cut:
        count = f"the first {count}"
    if told.batches and told.unreadable == told.batches:
        return f"no payload of {count} can be read: {told.reason}"
    if told.skipped and told.skipped == told.events:
        return f"no event of {count} can be read: {told.skipped_reason}"
    return ""


def _judge_silence(heard: Heard, lasted: str) -> Finding:
    told = heard.told
    if told.events > told.cleared:
        text = f"nothing happens: no message came in {lasted}; {_replayed(heard)}"
        return Finding("events", "unknown", text, _AGAIN, stops=True)
    if heard.answered:
        text = f"it said nothing in {lasted}, and {_absent(heard)}"
        if not heard.whole:
            return Finding("events", "unknown", text, _AGAIN, stops=True)
        return Finding("events", "wrong", text, _NO_EVENTS, stops=True)
    text = f"the publisher said nothing in {lasted}"
    advice = _NO_EVENTS
    if heard.lasted_s > 2 * _HEARTBEAT_S:
        advice += (
            f". A sidecar of ours says something every {_HEARTBEAT_S:g} s unless told otherwise"
        )
    return Finding("events", "wrong", text, advice, stops=True)


def _judge_no_stores(heard: Heard, lasted: str) -> Finding:
    live = heard.live
    if live.skipped == live.events:
        text = f"no event of {_number(live.batches, 'batch')} can be read: {live.skipped_reason}"
        advice = "kvevents tail -v shows them; lint says what each router makes of them"
        return Finding("events", "wrong", text, advice, stops=True)
    if live.cleared == live.events:
        if heard.answered and not heard.whole:
            text = f"only AllBlocksCleared came in {lasted}, and {_absent(heard)}"
            return Finding("events", "unknown", text, _AGAIN)
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
    if not heard.whole:
        text = f"nothing changes: {beats} in {lasted}, and {_absent(heard)}"
        return Finding("events", "unknown", text, _AGAIN, stops=True)
    if heard.told.removed:
        text = f"{beats} in {lasted}, and nothing is held now; {_replayed(heard)}"
        return Finding("events", "unknown", text, _AGAIN)
    text = (
        f"the sidecar lives and its worker tells nothing: {beats} in {lasted}, and {_absent(heard)}"
    )
    return Finding("events", "wrong", text, _NO_PUMP, stops=True)


def _replayed(heard: Heard) -> str:
    told = heard.told
    count = _number(told.batches, "batch", "batches")
    if told.stored:
        count = f"{_number(told.stored_blocks, 'block')} stored"
    return f"its replay has {count}, to seq {told.last_seq}{', and more' if heard.cut else ''}"


def _absent(heard: Heard) -> str:
    """What a replay without a stored block lacks, as far as it was read."""
    told = heard.told
    if heard.whole:
        return f"there is no {'stored block' if told.events else 'event'} in its replay"
    if not told.batches:
        return "its replay was not read to its end"
    what = "stores a block" if told.events else "has an event"
    first = _number(told.batches, "batch", "batches")
    rest = "was not looked at" if heard.cut else "did not come"
    return f"of the first {first} of its replay none {what}; the rest {rest}"


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


def _fuller(heard: Heard) -> Content:
    """What came live, unless only the replay shows blocks, or events at all."""
    live, told = heard.live, heard.told
    if live.stored or told.stored:
        return live if live.stored else told
    return live if live.events else told


def judge_content(heard: Heard, block_size: int | None) -> Iterator[Finding]:
    """Of what came, what a router cannot use."""
    content = _fuller(heard)
    if heard.live.batches and heard.live.malformed:
        text = f"{_number(heard.live.malformed, 'message')} of {heard.live.messages} are no batches"
        yield Finding("content", "wrong", f"{text}: {heard.live.malformed_reason}")
    if heard.live.unreadable and heard.live.unreadable < heard.live.batches:
        text = f"{heard.live.unreadable} of {heard.live.batches} payloads cannot be read"
        yield Finding("content", "wrong", f"{text}: {heard.live.reason}")
    elif not heard.live.batches and 0 < heard.told.unreadable < heard.told.batches:
        text = f"{heard.told.unreadable} of {heard.told.batches} replayed payloads cannot be read"
        yield Finding("content", "wrong", f"{text}: {heard.told.reason}")
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
        yield Finding("blocks", "wrong", text, advice, voids="all")
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
        retained = "it retains nothing" if heard.whole else "its replay was not read to its end"
        return Finding("replay", "ok", f"{where} answers; {retained}{shape}")
    first = "from the state now" if told.start == JOIN else f"from seq {told.first_seq}"
    cut = ", and more" if heard.cut else ""
    text = f"{where} answers {first}: {_counts(told)}, to seq {told.last_seq}{cut}{shape}"
    return Finding("replay", "ok", text)


# -------------------------------------------------------------------------------------------- fits


class _Fit:
    """What a router takes and loses of messages, given one after the other."""

    def __init__(self, lint: Lint) -> None:
        self.lint = lint
        (self.tally,) = lint.tallies
        self.kinds = Repeats[Loss]()
        self._stored = self._lost = 0

    def take(self, one: Kept, judge: Callable[[list[bytes]], list[Loss]]) -> None:
        """`judge`: the method of `lint` that this message is for."""
        batches, before = self.tally.batches, self.tally.lost.copy()
        for loss in judge(one.frames):
            self.kinds.take((loss.consumer, loss.rule), loss)
        if self.tally.batches > batches:  # else it is known from the replay
            self._stored += one.stored
            self._lost += _lost_stores(one, self.tally.lost - before)

    @property
    def voids(self) -> Voids | None:
        """How much of what stores blocks is lost; where nothing does, of all batches."""
        lost, stored = self._lost, self._stored
        if not stored:
            lost, stored = self.tally.lost["batch"], self.tally.batches
        if lost >= stored > 0:
            return "all"
        return "most" if lost * 2 > stored else None


def _lost_stores(one: Kept, lost: Counter[Lost]) -> int:
    if lost["batch"]:
        return one.stored
    return min(one.stored, lost["block"] + max(0, lost["event"] - one.removed))


def judge_fit(heard: Heard, consumer: Consumer) -> Iterator[Finding]:
    """What this router would lose of what came, by the rules of `kvevents lint`."""
    live, told = heard.live, heard.told
    fit = _Fit(Lint([consumer], replay=bool(told.batches)))
    whole = bool(told.batches) and told.all_kept and heard.whole
    if whole:
        _take_replay(fit, told)
    for one in live.kept:
        fit.take(one, fit.lint.live)
    in_part = not whole and not live.stored and bool(told.kept)
    if in_part:
        _take_replay(fit, told)  # last, for what comes live is not the next after a part of it
    kinds = list(fit.kinds)
    in_lint = bool(kinds)
    topic = _judge_replayed_topic(heard, consumer)
    if topic is not None and all(one.first.rule != "topic" for one in kinds):
        yield topic
    most = max((one.count for one in kinds), default=0)
    kinds.sort(key=lambda one: _step(one, most))
    for kind in kinds[:_MOST_LOSSES]:
        yield _loss(kind, consumer, fit.voids)
    text = one_line(str(fit.tally))
    if in_part and len(told.kept) < told.messages:
        text += f"; of its replay the first {_number(len(told.kept), 'message')} were judged"
    if in_lint:
        yield Finding("fit", "wrong", text, sums_up=True)
    elif topic is None and fit.tally.blocks:
        yield Finding("fit", "ok", f"the form fits (frames, topic, fields, hashes): {text}")
    elif topic is None:
        yield Finding("fit", "unknown", f"whether the form fits cannot be told: {text}")


def _take_replay(fit: _Fit, told: Content) -> None:
    if told.start is not None:
        fit.lint.asked(told.start)
        for one in told.kept:
            fit.take(one, fit.lint.answer)


def _step(kind: Repeated[Loss], most: int) -> tuple[bool, bool, int]:
    """When a router comes to a kind of loss, of those that cost as much: its topic is before all."""
    rare = kind.count * 2 < most
    return kind.first.rule != "topic", rare, _STEPS.index(kind.first.lost)


def _loss(kind: Repeated[Loss], consumer: Consumer, voids: Voids | None) -> Finding:
    advice = _dialect(consumer.name)
    if kind.first.rule == "topic":
        advice = f"set the publisher's topic ({_TOPICS}); or {advice}"
    one = kind.first
    seq = "a message" if one.seq is None else f"seq {one.seq}"
    more = f" (and {kind.count - 1:,} more)" if kind.count > 1 else ""
    text = one_line(f"{seq}{more} {one.consumer} {one.verb}: {one.where} {one.why}")
    lossy = kind.first.lost in ("batch", "event", "block")
    return Finding("fit", "wrong", text, advice, voids=voids if lossy else None)


def _judge_replayed_topic(heard: Heard, consumer: Consumer) -> Finding | None:
    """Answers say the topic of their batches; a router minds it only where they come live."""
    told = heard.told
    if heard.live.topics or not told.topics:
        return None
    kinds = Repeats[Loss]()
    for topic in told.topics:
        for loss in Lint([consumer]).live(live_frames(topic, told.first_seq or 0, b"")):
            if loss.rule == "topic":
                kinds.take((loss.consumer, loss.rule), loss)
    for kind in kinds:
        return _loss(kind, consumer, "all" if kind.count == len(told.topics) else None)
    return None


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
