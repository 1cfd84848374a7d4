"""A stream in numbers, against a model that keeps every event and counts anew."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvevents import AllBlocksCleared, BlockRemoved, BlockStored, Event, KVEventBatch, StorageMedium
from kvevents.absences import Absence, Absences
from kvevents.follower import Malformed, Told
from kvevents.gaps import Gap, Lost, Restarted
from kvevents.histogram import Histogram
from kvevents.message import Channel, Message
from kvevents.profile import Counts, Head, Profile
from kvevents.reading import Reading
from kvevents.timeline import Timeline

GPU, CPU = StorageMedium.GPU, StorageMedium.CPU
SECOND = 1_000_000_000


def reading(*events: Event, rank: int = 0, replayed: bool = False) -> Reading:
    return Reading(Told(0, b"", replayed), KVEventBatch(0.0, list(events), rank))


def stored(*hashes: int | bytes, medium: StorageMedium | None = GPU) -> BlockStored:
    return BlockStored(list(hashes), None, [], 4, medium=medium)


def removed(*hashes: int | bytes, medium: StorageMedium | None = GPU) -> BlockRemoved:
    return BlockRemoved(list(hashes), medium=medium)


# -------------------------------------------------------------------------------------- histogram


@given(st.lists(st.integers(0, 2**70)))
def test_a_histogram_knows_values_to_a_sixteenth(values: list[int]) -> None:
    """Each value is told as one not below it and at most 1/16 above; below 32, as itself."""
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    told = [highest for highest, times in histogram for _ in range(times)]
    assert histogram.count == len(values) == len(told)
    for value, highest in zip(sorted(values), told, strict=True):
        assert value <= highest <= value + value // 16
    for limit in values:
        assert histogram.at_most(limit) <= sum(value <= limit for value in values)
        assert histogram.at_most(limit + limit // 16) >= sum(value <= limit for value in values)


def test_quantiles_and_sums_of_histograms() -> None:
    """Half of them do not exceed the median; nothing has none; what is merged is counted twice."""
    one, other = Histogram(), Histogram()
    assert one.quantile(0.5) is None
    for value in range(20):
        one.add(value)
    other.add(31, times=20)
    one.merge(other)
    assert (one.count, one.quantile(0.25), one.quantile(0.5), one.quantile(1)) == (40, 9, 19, 31)
    with pytest.raises(ValueError, match="value: -1 is below 0"):
        one.add(-1)


# --------------------------------------------------------------------------------------- absences


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=200))
def test_absences_count_distinct_others(steps: list[tuple[bool, int]]) -> None:
    """Those that came between a name's going and its return, each once, however often it came."""
    absences, gone, history = Absences[int](), dict[int, int](), list[int]()
    for at, (comes, name) in enumerate(steps):
        if not comes:
            absences.went(name, at)
            gone[name] = at
            history.append(-1)
            continue
        expected = None
        if (since := gone.pop(name, None)) is not None:
            expected = Absence(at - since, len(set(history[since:]) - {-1}))
        assert absences.came(name, at) == expected
        history.append(name)


def test_absences_in_a_line_that_is_shortened() -> None:
    """The same over many thousand steps of few names, and the line stays short."""
    chance = random.Random(7)
    absences, gone, latest = Absences[int](), dict[int, int](), dict[int, int]()
    for at in range(30_000):
        name = chance.randrange(700)
        if chance.random() < 0.3:
            absences.went(name, at)
            gone[name] = at
        else:
            since = gone.pop(name, None)
            others = sum(last >= since for last in latest.values()) if since is not None else 0
            expected = None if since is None else Absence(at - since, others)
            assert absences.came(name, at) == expected
            latest[name] = at
    assert len(absences._latest) <= 2 * 700 + 1024


# --------------------------------------------------------------------------------------- timeline


@given(st.lists(st.integers(0, 10**14), min_size=1), st.integers(2, 7))
def test_a_timeline_is_bounded_and_loses_nothing(steps: list[int], most: int) -> None:
    """However long, at most so many stretches, of one width, ascending, without an overlap, and every
    event is in the stretch of its time, which says what was there after its last.
    """
    timeline = Timeline(most)
    times = [10 + time for time in itertools.accumulate(steps)]
    for number, time in enumerate(times):
        stretch = timeline.at(time)
        assert stretch.resident == ((number - 1,) if number else ())
        stretch.events[0] += 1
        stretch.resident = (number,)
    width = timeline.width_ns
    starts = [stretch.start_ns for stretch in timeline.stretches]
    assert len(starts) <= most
    assert all((start - times[0]) % width == 0 for start in starts)
    assert starts == sorted(set(starts))
    for stretch in timeline.stretches:
        end = stretch.start_ns + width
        inside = [at for at, time in enumerate(times) if stretch.start_ns <= time < end]
        assert stretch.events[0] == len(inside) > 0
        assert stretch.resident == (inside[-1],)
    assert (timeline.start_ns, timeline.end_ns) == (times[0], times[-1])


def test_a_timeline_has_room_for_more_than_one() -> None:
    """Fewer than two stretches are none."""
    with pytest.raises(ValueError, match="most: 1 is below 2"):
        Timeline(1)


# ---------------------------------------------------------------------------------------- profile


@dataclass
class ModelTier:
    """What one rank has on one medium, and all that ever happened to it since the last clear."""

    held: dict[int, int | None] = field(default_factory=dict)
    log: list[tuple[str, int, int]] = field(default_factory=list)
    stored: int = 0
    removed: int = 0
    cleared: int = 0
    peak: int = 0
    lifetimes: list[int] = field(default_factory=list)
    unknown: int = 0
    returns: list[tuple[int, int]] = field(default_factory=list)
    elsewhere: int = 0

    def store(self, name: int, at: int, since: int | None, elsewhere: bool) -> bool:
        if name in self.held:
            return False
        went = [
            place for place, (what, one, _) in enumerate(self.log) if (what, one) == ("-", name)
        ]
        if went:
            others = {one for what, one, _ in self.log[went[-1] :] if what == "+"}
            self.returns.append((at - self.log[went[-1]][2], len(others)))
            self.elsewhere += elsewhere
        self.held[name] = since
        self.log.append(("+", name, at))
        self.stored += 1
        self.peak = max(self.peak, len(self.held))
        return True

    def remove(self, name: int, at: int) -> bool:
        if name not in self.held:
            return False
        since = self.held.pop(name)
        if since is None:
            self.unknown += 1
        else:
            self.lifetimes.append(at - since)
        self.log.append(("-", name, at))
        self.removed += 1
        return True

    def clear(self) -> None:
        self.cleared += len(self.held)
        self.held.clear()
        self.log.clear()


MEDIA = [None, *StorageMedium]
NAMES = st.lists(st.integers(0, 9), min_size=1, max_size=4)
EVENTS = st.one_of(
    st.builds(lambda n, m: stored(*n, medium=m), NAMES, st.sampled_from(MEDIA)),
    st.builds(lambda n, m: stored(*n, medium=m), NAMES, st.sampled_from([GPU, CPU])),
    st.builds(lambda n, m: removed(*n, medium=m), NAMES, st.sampled_from(MEDIA)),
    st.builds(lambda n, m: removed(*n, medium=m), NAMES, st.sampled_from([GPU, CPU])),
    st.just(AllBlocksCleared()),
)
STEPS = st.lists(
    st.tuples(
        st.integers(-3, 3 * SECOND),
        st.lists(EVENTS, max_size=4),
        st.integers(0, 1),
        st.booleans(),
        st.integers(0, 30),
    ),
    max_size=40,
)


def times_of(histogram: Histogram) -> list[int]:
    return [highest for highest, times in histogram for _ in range(times)]


def assert_close(histogram: Histogram, values: list[int]) -> None:
    """The histogram is of these values, to a sixteenth."""
    told = times_of(histogram)
    for value, highest in zip(sorted(values), told, strict=True):
        assert value <= highest <= value + value // 16


@settings(deadline=None)
@given(STEPS)
def test_a_profile_is_what_a_model_counts(
    steps: list[tuple[int, list[Event], int, bool, int]],
) -> None:
    """Every number of every tier of every rank, restarts included, after any events."""
    profile = Profile(most=4)
    model: dict[tuple[int, StorageMedium], ModelTier] = {}
    now: int | None = None
    at = 0
    for step, events, rank, replayed, restart in steps:
        at += step
        now = at if now is None else max(now, at)
        if restart == 0:
            profile.take(at, Restarted(0))
            for tier in model.values():
                tier.clear()
        profile.take(at, reading(*events, rank=rank, replayed=replayed))
        for event in events:
            for medium in StorageMedium:
                tier = model.setdefault((rank, medium), ModelTier())
                match event:
                    case AllBlocksCleared():
                        tier.clear()
                    case BlockStored() if (event.medium or GPU) == medium:
                        for name in event.block_hashes:
                            assert isinstance(name, int)
                            elsewhere = any(
                                name in other.held
                                for (its, on), other in model.items()
                                if its == rank and on != medium
                            )
                            tier.store(name, now, None if replayed else now, elsewhere)
                    case BlockRemoved() if event.medium in (None, medium):
                        for name in event.block_hashes:
                            assert isinstance(name, int)
                            tier.remove(name, now)
                    case _:
                        pass
    for rank in (0, 1):
        told = profile.tiers(rank)
        for medium in StorageMedium:
            counts = told.get(medium, Counts())
            tier = model.get((rank, medium), ModelTier())
            assert (counts.stored, counts.removed, counts.cleared, counts.resident) == (
                *(tier.stored, tier.removed, tier.cleared),
                len(tier.held),
            )
            assert counts.stored == counts.removed + counts.cleared + counts.resident
            assert (counts.peak, counts.unknown_ages) == (tier.peak, tier.unknown)
            assert (counts.returns, counts.elsewhere) == (len(tier.returns), tier.elsewhere)
            assert_close(counts.lifetimes, tier.lifetimes)
            assert_close(counts.away, [away for away, _ in tier.returns])
            distances = [distance for _, distance in tier.returns]
            assert times_of(counts.distances) == sorted(distances)  # all below 32
            assert counts.kept_by(2000) == sum(distance < tier.peak for distance in distances)
    if profile.timeline.stretches:
        last = profile.timeline.stretches[-1].resident
        for medium, resident in zip(StorageMedium, last, strict=True):
            assert resident == sum(len(t.held) for (_, on), t in model.items() if on == medium)
    together = profile.tiers()
    for medium, counts in together.items():
        parts = [profile.tiers(rank).get(medium, Counts()) for rank in (0, 1)]
        assert counts.stored == sum(part.stored for part in parts)
        assert counts.distances.count == sum(part.returns for part in parts)


@settings(deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=60), st.integers(1, 5))
def test_a_tier_larger_by_the_distance_would_have_kept_it(asked: list[int], size: int) -> None:
    """What P3 promises of one that evicts the least recently used: simulated, at both sizes."""

    def told_by(size: int) -> list[list[tuple[str, int]]]:
        held: list[int] = []
        steps = []
        for name in asked:
            step = []
            if name in held:
                held.remove(name)
            else:
                if len(held) == size:
                    step.append(("-", held.pop(0)))
                step.append(("+", name))
            held.append(name)
            steps.append(step)
        return steps

    profile = Profile()
    missed: list[tuple[int, int]] = []
    for at, step in enumerate(told_by(size)):
        before = profile.tiers().get(GPU, Counts())
        for what, name in step:
            profile.take(at, reading(stored(name) if what == "+" else removed(name)))
        after = profile.tiers()[GPU]
        if after.returns > before.returns:
            new = set(times_of(after.distances)) - set(times_of(before.distances))
            if new:
                missed.append((at, new.pop()))
    for at, distance in missed:
        larger = told_by(size + distance + 1)
        assert not larger[at], "it was stored again there too"


def test_lifetimes_returns_and_heads_by_example() -> None:
    """A tier of two that is asked for three in turn: each is away for a time, and one would do."""
    profile = Profile()
    events: list[Event] = [
        stored(1, 2),
        removed(1),
        stored(3),
        removed(2),
        stored(1),
        removed(3),
        stored(2),
    ]
    for at, event in enumerate(events):
        profile.take(at * SECOND, reading(event))
    counts = profile.tiers()[GPU]
    assert (counts.stored, counts.removed, counts.resident, counts.peak) == (5, 3, 2, 2)
    assert counts.lifetimes.count == 3
    assert times_of(counts.distances) == [1, 1]
    assert (counts.kept_by(1999), counts.kept_by(2000)) == (0, 2)
    assert profile.heads(9) == [Head(0, GPU, h, 1, 1) for h in (1, 2)]  # type: ignore[arg-type]
    assert profile.events == {"stored": 4, "removed": 3, "cleared": 0}


def test_a_block_that_another_tier_kept_is_said() -> None:
    """Its return is a load, not a computation; of several that return together the first is the head."""
    profile = Profile()
    events: list[Event] = [
        stored(1, 2, 3),
        stored(1, 2, medium=CPU),
        removed(1, 2, 3),
        stored(1, 2, 3),
    ]
    profile.take(0, reading(*events))
    counts = profile.tiers()[GPU]
    assert (counts.returns, counts.elsewhere) == (3, 2)
    assert profile.heads(9) == [Head(0, GPU, 1, 1, 3)]  # type: ignore[arg-type]


def test_more_ranks_than_are_followed_apart_are_one() -> None:
    """The first 64 each have their own, whatever comes; what more there is costs no more of them."""
    profile = Profile()
    ranks = [*range(63), 2**40, *range(100, 400), -1]
    for at, rank in enumerate(ranks):
        profile.take(at, reading(stored(1, rank % 7 + 2), rank=rank))
    assert profile.ranks == [*range(63), 2**40] and profile.has_others
    assert profile.tiers()[GPU].resident == 64 * 2 + 8, "of all others a hash is one block"
    assert profile.tiers(100) == profile.tiers(-1) == {}
    assert profile.tiers(2**40)[GPU].stored == 2
    profile.take(500, reading(AllBlocksCleared(), rank=300))
    assert (profile.tiers()[GPU].resident, profile.tiers()[GPU].cleared) == (128, 8)
    assert profile.timeline.stretches[-1].resident[0] == 128
    events: list[Event] = [stored(1), removed(1), stored(1)]
    for at, event in enumerate(events):
        profile.take(500 + at, reading(event, rank=99))
    assert profile.heads(3) == [Head(None, GPU, 1, 1, 1)]  # type: ignore[arg-type]


def test_what_was_replayed_was_not_published_then() -> None:
    """It is resident and counted, and in no rate; how many batches it was is known."""
    profile = Profile()
    profile.take(0, reading(stored(1, 2), removed(1), replayed=True))
    profile.take(0, reading(stored(3)))
    (stretch,) = profile.timeline.stretches
    assert (stretch.events, stretch.blocks, stretch.resident[0]) == ([1, 0, 0], [1, 0, 0], 2)
    assert (profile.batches, profile.replayed) == (2, 1)
    assert profile.events == {"stored": 2, "removed": 1, "cleared": 0}


def test_hashes_are_what_they_name_and_not_how() -> None:
    """A hash as bytes, unsigned or signed is one block."""
    profile = Profile()
    profile.take(0, reading(stored(-1), stored(2**64 - 1), stored(b"\xff" * 32)))
    assert profile.tiers()[GPU].stored == 1


def test_what_is_no_batch_is_counted_and_marked() -> None:
    """Gaps, losses, restarts, clears and what cannot be read, in the stretch of their time."""
    profile = Profile()
    malformed = Malformed(Message(0, Channel.LIVE, []), "no frames")
    for one in (
        reading(stored(1), AllBlocksCleared()),
        Gap(3, 2),
        Lost(3, 2),
        Restarted(0),
        malformed,
        Reading(Told(1, b"?", replayed=False), None, reason="?"),
    ):
        profile.take(5, one)
    (stretch,) = profile.timeline.stretches
    assert dict(stretch.marks) == {
        "gap": 1,
        "lost": 1,
        "cleared": 1,
        "restarted": 1,
        "undecodable": 2,
    }
    assert (profile.batches, profile.undecodable, profile.missed) == (1, 2, 2)
    assert (stretch.events, stretch.blocks) == ([1, 0, 1], [1, 0, 1])


def test_what_came_before_the_first_batch_is_no_loss() -> None:
    """P7: of the first run and of each that follows; behind a batch, whatever was in it, it is one."""
    profile = Profile()
    for one in (
        *(Lost(0, 5), reading(), Lost(6, 2), Restarted(3), Lost(0, 3)),
        *(Reading(Told(3, b"", replayed=False), None), Lost(4, 1)),
    ):
        profile.take(SECOND, one)
    assert (profile.earlier, profile.missed) == (8, 3)
    assert profile.timeline.stretches[0].marks["lost"] == 2


def test_what_a_replay_told_first_has_an_end() -> None:
    """It is the last batch before any that came live; a later replay is of a gap."""
    profile = Profile()
    assert profile.replayed_until_ns is None
    for seconds, replayed in enumerate((True, True, False, True)):
        profile.take(seconds * SECOND, reading(stored(seconds), replayed=replayed))
    assert profile.replayed_until_ns == SECOND


def test_time_that_goes_back_stands_still() -> None:
    """No lifetime is negative, whatever a capture says."""
    profile = Profile()
    profile.take(2**63, reading(stored(1)))
    profile.take(-(2**63), reading(removed(1)))
    assert times_of(profile.tiers()[GPU].lifetimes) == [0]


def test_an_unknown_rank_has_nothing() -> None:
    """Neither has a new profile."""
    profile = Profile()
    profile.take(0, reading(AllBlocksCleared(), rank=5))
    assert (profile.ranks, profile.tiers(7), profile.tiers(), profile.heads(3)) == ([5], {}, {}, [])
