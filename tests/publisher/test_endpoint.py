"""publisher.config.endpoint: one address, its text, and its ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from publisher.config.checks import ConfigError
from publisher.config.endpoint import Endpoint

ADDRESSES = st.one_of(
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(lambda address: f"[{address}]"),
    st.sampled_from(
        ["*", "localhost", "worker-0.pool_1.svc", "[fe80::1%eth0]", "[::ffff:1.2.3.4]"]
    ),
)
PORTS = st.integers(0, 65_535).map(str) | st.just("*")
PATHS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30).filter(str.isprintable)
TEXTS = st.one_of(
    st.builds("tcp://{}:{}".format, ADDRESSES, PORTS), PATHS.map(lambda path: f"ipc://{path}")
)


def endpoint(text: str) -> Endpoint:
    return Endpoint.parse("endpoint", text)


@given(TEXTS)
def test_an_endpoint_is_given_back_as_written(text: str) -> None:
    """`str` is the text, and that of its first rank is too; the parts are those of the text."""
    parsed = endpoint(text)
    assert str(parsed) == text == str(parsed.for_rank(0))
    assert endpoint(str(parsed)) == parsed


@given(st.text() | st.builds("{}://{}".format, st.sampled_from(["tcp", "ipc", "http"]), st.text()))
def test_any_text_is_an_endpoint_or_refused_in_one_line(text: str) -> None:
    """ConfigError, with the key first, is all that comes out."""
    for parse in (Endpoint.parse, Endpoint.parse_http):
        try:
            assert str(parse("key", text)) == text
            continue
        except ConfigError as error:
            said = str(error)
        assert said.startswith("key: ")
        assert said.isprintable()
        assert len(said) < 400


@pytest.mark.parametrize(
    "text",
    [
        None,
        5557,
        b"tcp://h:1",
        "tcp://[zz::]:1",
        "tcp://[::1:1",
        "tcp://[127.0.0.1]:1",
        "tcp://[::1%]:1",
        "tcp://h:00",
        "tcp://h:05557",
        "tcp://h:" + "9" * 5000,
        "tcp://h h:1",
        "tcp://h\n:1",
        "tcp://eth0;h:1",
        "tcp://:1",
        "http://h:1",
        "ipc://a\nb",
        "ipc://a\0b",
        "ipc://" + "é" * 54,
        "\ud800",
    ],
    ids=lambda text: repr(text)[:30],
)
def test_what_is_no_endpoint_is_named(text: object) -> None:
    """Not text, no such address or port, a path with a line break: the message is one line."""
    with pytest.raises(ConfigError) as error:
        Endpoint.parse("sinks[0].endpoint", text)
    assert str(error.value).startswith("sinks[0].endpoint: ")
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("text", "rank", "expected"),
    [
        ("tcp://127.0.0.1:5557", 3, "tcp://127.0.0.1:5560"),
        ("tcp://[::1]:5557", 1, "tcp://[::1]:5558"),
        ("tcp://[::]:5557", 2, "tcp://[::]:5559"),
        ("tcp://[fe80::1%eth0]:9", 1, "tcp://[fe80::1%eth0]:10"),
        ("tcp://*:65532", 3, "tcp://*:65535"),
        ("tcp://*:0", 7, "tcp://*:0"),
        ("tcp://h:*", 7, "tcp://h:*"),
        ("ipc:///run/kv", 1, "ipc:///run/kv_dp1"),
        ("ipc:///run/kv:5557", 1, "ipc:///run/kv:5557_dp1"),
        ("ipc:///tcp/inproc://x", 2, "ipc:///tcp/inproc://x_dp2"),
        ("ipc://tcp://h:1", 2, "ipc://tcp://h:1_dp2"),
        ("ipc://*", 2, "ipc://*"),
    ],
)
def test_a_rank_has_an_address_of_its_own(text: str, rank: int, expected: str) -> None:
    """Cases 96, 97: the port of a bracketed address moves, and so does a path, whatever it says."""
    assert str(endpoint(text).for_rank(rank)) == expected


@given(TEXTS, st.integers(0, 300), st.integers(0, 300))
def test_no_two_ranks_share_an_address(text: str, one: int, other: int) -> None:
    """Two ranks' addresses are equal only where the system picks them, or when the ranks are."""
    parsed = endpoint(text)
    try:
        mine, theirs = parsed.for_rank(one), parsed.for_rank(other)
    except ValueError:
        return
    if not parsed.is_any:
        assert (mine == theirs) == (one == other)
        assert mine.takes(theirs) == (one == other)
    else:
        assert not mine.takes(theirs)


def test_ranks_past_the_last_port_are_refused() -> None:
    """Nor can a path be longer than a socket's."""
    with pytest.raises(ValueError, match=r"^port 65535 \+ rank 1 of tcp://h:65535 is above 65535$"):
        endpoint("tcp://h:65535").for_rank(1)
    with pytest.raises(ValueError, match=r"^ipc://x+_dp1 is longer than 107 bytes$"):
        endpoint("ipc://" + "x" * 104).for_rank(1)


@pytest.mark.parametrize(
    ("text", "wildcard", "loopback"),
    [
        ("tcp://*:1", True, False),
        ("tcp://0.0.0.0:1", True, False),
        ("tcp://[::]:1", True, False),
        ("tcp://[0:0::0]:1", True, False),
        ("tcp://[::ffff:0.0.0.0]:1", True, False),
        ("tcp://127.0.0.1:1", False, True),
        ("tcp://127.9.9.9:1", False, True),
        ("tcp://localhost:1", False, True),
        ("tcp://[::1]:1", False, True),
        ("tcp://[::ffff:127.0.0.1]:1", False, True),
        ("tcp://10.0.0.1:1", False, False),
        ("tcp://[2001:db8::1]:1", False, False),
        ("tcp://127.example.com:1", False, False),
        ("ipc:///run/127.0.0.1", False, True),
        ("ipc://*", True, True),
    ],
)
def test_who_can_reach_it_is_known(text: str, wildcard: bool, loopback: bool) -> None:
    """Every spelling of all addresses, and of this host only."""
    assert (endpoint(text).is_wildcard, endpoint(text).is_loopback) == (wildcard, loopback)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("tcp://h:1", "tcp://H:1", True),
        ("tcp://h:1", "tcp://i:1", False),
        ("tcp://h:1", "tcp://h:2", False),
        ("tcp://*:1", "tcp://h:1", True),
        ("tcp://localhost:1", "tcp://[::1]:1", True),
        ("tcp://localhost:1", "tcp://10.0.0.1:1", False),
        ("tcp://[::1]:1", "tcp://127.0.0.1:1", False),
        ("tcp://[fe80::1%a]:1", "tcp://[fe80::1%b]:1", False),
        ("tcp://h:0", "tcp://h:0", False),
        ("ipc:///a", "ipc:///b/../a", True),
        ("ipc://*", "ipc://*", False),
        ("ipc:///a", "tcp://*:1", False),
    ],
)
def test_one_address_is_one_however_spelled(one: str, other: str, same: bool) -> None:
    """Hosts are compared as addresses, paths as paths; what the system picks is never taken."""
    assert endpoint(one).takes(endpoint(other)) == same
    assert endpoint(other).takes(endpoint(one)) == same


def test_http_has_a_host_and_a_port() -> None:
    """`http://HOST:PORT`; brackets are no part of an IPv6 host."""
    parsed = Endpoint.parse_http("http_endpoint", "http://[::1]:8080")
    assert (parsed.scheme, parsed.host, parsed.port) == ("http", "::1", 8080)
    assert str(parsed.for_rank(1)) == "http://[::1]:8081"
    for text in ("tcp://h:1", "http://h:1/", "http://h", "https://h:1", "http://*:1", "http://h:*"):
        with pytest.raises(ConfigError, match=r"^http_endpoint: '"):
            Endpoint.parse_http("http_endpoint", text)
