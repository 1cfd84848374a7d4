"""`kvevents play`."""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from datetime import datetime
from typing import TYPE_CHECKING

from publisher.cli.parsing import FINDINGS, NO_CONNECTION, USAGE, Parser, check_seconds, say
from publisher.config.checks import check_text

if TYPE_CHECKING:
    from kvevents.follower import Step
    from publisher.tools.captures.play import Player
    from publisher.tools.source import Capture

__all__ = ["add_options", "run"]

_BUFFER_STEPS = 10_000
_MOST = 1_000_000
_SLOWEST, _FASTEST = 0.001, 1e6

_EPILOG = f"""\
examples:
  kvevents play today.capture --endpoint tcp://127.0.0.1:5557 \\
      --replay-endpoint tcp://127.0.0.1:5558
  kvevents play today.capture --endpoint 'tcp://*:5557' --speed 10 --no-wait
  kvevents play today.capture --endpoint ipc:///tmp/kv --speed max

What came live is published as it came, malformed messages too. The replay
socket answers with what was published so far and with what the capture's own
replays had brought. Without a replay socket, that is published too, in its
place, so that a subscriber that cannot ask has the state.

A subscriber that is too slow misses messages, as with any publisher; with
--speed max it is waited for, up to a second. Ctrl-C, SIGTERM and SIGHUP end
it; after the last message that is as good an end as any.

exit codes: 0 ok, {FINDINGS} the capture is damaged (what is whole was played),
{USAGE} usage or no capture, {NO_CONNECTION} nothing is in it
"""


def add_options(parser: Parser) -> None:
    """Of `play`."""
    parser.description = "Publish what is in a capture, as its publisher did."
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", metavar="FILE", help="a capture, of kvevents record")
    parser.add_argument(
        "--endpoint", required=True, help="where to bind the PUB socket, e.g. tcp://127.0.0.1:5557"
    )
    parser.add_argument(
        "--replay-endpoint", metavar="ENDPOINT", help="where to bind its replay socket"
    )
    parser.add_argument("--topic", help="publish under this topic, in place of each message's own")
    parser.add_argument(
        "--speed",
        default="1",
        metavar="N",
        help="N times as fast as it came, or max: as fast as can be; 1 unless told",
    )
    waiting = parser.add_mutually_exclusive_group()
    waiting.add_argument(
        "--wait",
        type=int,
        default=1,
        metavar="N",
        help="begin when N have subscribed; 1 unless told",
    )
    waiting.add_argument("--no-wait", action="store_true", help="begin at once")
    parser.add_argument(
        "--stay",
        type=float,
        metavar="S",
        help="answer replays for so long after the last message; unless told, until Ctrl-C where there is"
        " a replay endpoint, and not at all where there is none",
    )
    parser.add_argument(
        "--buffer-steps",
        type=int,
        default=_BUFFER_STEPS,
        metavar="N",
        help=f"batches kept for replays, besides the state it begins with; {_BUFFER_STEPS} unless told",
    )
    parser.epilog = _EPILOG


def run(options: argparse.Namespace) -> int:
    """Returns the exit code."""
    from publisher.config.endpoint import Endpoint
    from publisher.tools.captures.ending import like_ctrl_c
    from publisher.tools.source import Capture, parse_file

    Endpoint.parse("--endpoint", options.endpoint)
    if options.replay_endpoint is not None:
        Endpoint.parse("--replay-endpoint", options.replay_endpoint)
    if options.topic is not None:
        check_text("--topic", options.topic)
    speed = _speed(options.speed)
    if not 0 <= options.wait <= _MOST:
        raise ValueError(f"--wait: {options.wait} is not in 0..{_MOST}")
    if options.stay != 0:
        check_seconds("--stay", options.stay)
    if not 1 <= options.buffer_steps <= _MOST:
        raise ValueError(f"--buffer-steps: {options.buffer_steps} is not in 1..{_MOST}")
    capture = Capture(parse_file(options.file, "FILE"), "FILE")
    with like_ctrl_c():
        return _play(capture, options, speed)


def _speed(text: str) -> float:
    """Raises ValueError for what is none."""
    if text == "max":
        return math.inf
    try:
        speed = float(text)
    except ValueError:
        speed = math.nan
    if not _SLOWEST <= speed <= _FASTEST:
        raise ValueError(f"--speed: {text!r} is neither max nor in {_SLOWEST:g}..{_FASTEST:g}")
    return speed


def _play(capture: Capture, options: argparse.Namespace, speed: float) -> int:
    from publisher.tools.captures.history import History
    from publisher.tools.captures.play import Form, Player, in_order, live_only, stretches

    history = History(options.buffer_steps)
    told = stretches(capture.steps(), lambda: capture.follower)
    first = next((one for one in told if any(map(_says_something, one))), None)
    if first is None or capture.head is None:
        _say_fault(capture)
        say(f"kvevents play: {capture.name}: nothing is in it")
        return NO_CONNECTION if capture.damaged is None else FINDINGS
    topic = None if options.topic is None else options.topic.encode()
    form = Form.of(first, capture.head.topic)
    has_replay = options.replay_endpoint is not None
    with Player(options.endpoint, options.replay_endpoint, topic=topic, history=history) as player:
        history.take(first)
        player.serve_replays(form)
        _say_where(capture, player)
        if not options.no_wait:
            player.wait_for_subscribers(options.wait)
        began = time.monotonic()
        try:
            player.play(live_only(first) if has_replay else in_order(first, form.topic), speed)
            for stretch in told:
                sendings = list(live_only(stretch) if has_replay else in_order(stretch, form.topic))
                player.wait_for_turn(sendings[:1], speed)
                history.take(stretch)
                player.play(sendings, speed)
        finally:
            _say_end(player, time.monotonic() - began)
        _say_fault(capture)
        stay_s = options.stay
        if stay_s is None:
            stay_s = math.inf if has_replay else 0.0
        with contextlib.suppress(KeyboardInterrupt):
            player.serve_until(time.monotonic() + stay_s)
        player.finish_replays()
    return 0 if capture.damaged is None else FINDINGS


def _says_something(step: Step) -> bool:
    from kvevents.follower import Told
    from kvevents.message import Channel

    is_live = step.message.channel == Channel.LIVE
    return is_live or any(isinstance(one, Told) for one in step.arrivals)


def _say_where(capture: Capture, player: Player) -> None:
    assert capture.head is not None
    since = datetime.fromtimestamp(capture.head.started_ns / 1e9).astimezone()
    say(f"kvevents play: {capture.name}: of {capture.head.endpoint}, since {since:%F %T %z}")
    replay = "" if player.replay_endpoint is None else f", replays at {player.replay_endpoint}"
    say(f"kvevents play: bound to {player.endpoint}{replay}")


def _say_end(player: Player, took_s: float) -> None:
    what = "1 message" if player.sent == 1 else f"{player.sent} messages"
    replays = "1 replay" if player.replays == 1 else f"{player.replays} replays"
    also = "" if player.replay_endpoint is None else f", {replays} answered"
    slow = f", {player.dropped} of them not to all who subscribed" if player.dropped else ""
    say(f"kvevents play: {what} sent in {took_s:.1f} s{slow}{also}")


def _say_fault(capture: Capture) -> None:
    if (fault := capture.fault(capture.batches)) is not None:
        say(f"kvevents play: {fault}")
