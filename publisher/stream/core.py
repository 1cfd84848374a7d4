"""From inputs to the batches of every sink, and how that is taken up again after a kill.

C1  An input is in the journal, and a sink's next seq in its file, before a batch that they mean may be
    sent: what was sent is never numbered again.
C2  A start is warm when the journal is of this link, and no sink has published more than it tells: then
    replica and outputs are as they were, and nothing is cleared. Otherwise it is cold: numbering goes on,
    and the first batch of each sink is AllBlocksCleared.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from kvevents.dialect import Dialect
from kvevents.errors import KVEventsError
from kvevents.events import AllBlocksCleared, Event
from kvevents.index import BlockIndex
from kvevents.speller import Speller, Spells
from kvevents.store_form import StoreSpeller
from kvevents.view import View
from publisher.config.checks import ConfigError
from publisher.config.sidecar_config import SinkConfig, WorkerInfo
from publisher.link.messages import BATCH, COLUMNS, FRESH, LOST
from publisher.link.packed import head_of
from publisher.stream.input import Input
from publisher.stream.journal import Entry, Head, HeadSink, Journal, Kind, Recovered, read_journal
from publisher.stream.output import SNAPSHOT_BLOCKS, Frame, Output
from publisher.stream.replica import Replica
from publisher.stream.seqs import SeqFile
from publisher.stream.state_folder import StateError

__all__ = ["Core", "Numbered"]

_CHECKPOINT_BYTES = 128 << 10
"""Of a checkpoint written in one turn."""
_JOURNAL_RETRY_S = 30.0
_RECOVERY_S = 4.0
"""A journal that takes longer to take up is left alone: the worker tells its state as fast."""
_GENERATION_S = 1.0
"""What the inputs of a generation may have cost to apply, for they cost as much to take up."""
_CHECKPOINT_SHARE = 4
"""Or so many times what its checkpoint has cost to write."""
_TIMED_EVERY = 8
"""One call in so many is timed: to ask for the processor's time takes as long as some of the work."""
_NAMES = "sinks"
"""The file that names the sinks of which there are seqs."""

_T = TypeVar("_T")

_log = logging.getLogger("kvevents.sidecar")


class Numbered(msgspec.Struct, frozen=True, gc=False):
    """A batch of the sink at place `sink`."""

    sink: int
    frame: Frame


class Core:
    """Of one worker's rank, over all its sinks. No sockets.

    `names`: of the sinks, for their files. `folder`: where state is kept; None keeps none.
    `with_journal`: False keeps the seqs alone. Raises StateError when a sink's seq cannot be trusted and
    `may_reset` is False; OSError when its file cannot be made.
    """

    def __init__(
        self,
        worker: WorkerInfo,
        link_id: bytes,
        sinks: tuple[SinkConfig, ...],
        names: tuple[str, ...],
        folder: Path | None,
        *,
        clock: Callable[[], float],
        with_journal: bool = True,
        may_reset: bool = True,
    ) -> None:
        self._worker, self._link_id, self._clock = worker, link_id, clock
        self._sinks, self._names = sinks, names
        self._spellers: dict[Dialect, Speller] = {}
        self._fingerprints = (
            tuple(  # 4: of the spelling; another when the same events give other bytes
                f"4 {_fingerprint(sink.spelling)} {sink.coalesce_s > 0} {worker.dp_rank}"
                for sink in sinks
            )
        )
        self._seqs: list[SeqFile | None] = [None] * len(sinks)
        self.journal: Journal | None = None
        self._entries: list[Entry] = []
        """For the journal, and not written yet."""
        self._journal_retry_at = 0.0
        self._calls = 0
        self._applied_s = self._checkpoint_s = 0.0
        """Processor time that inputs and checkpoint of this generation have taken."""
        self._folder = folder
        self._kept_names: set[str] = set()
        """Of the sinks that earlier processes kept a seq for."""
        if folder is not None:
            self._kept_names = _read_names(folder)
            try:
                self._seqs = [SeqFile(folder / f"seq-{name}") for name in names]
            except OSError as error:
                raise StateError(f"state_dir: {folder}: {error.strerror}") from None
            if with_journal:
                self.journal = Journal(folder)
        self.replica = Replica(worker)
        self.outputs: list[Output] = []
        self._told_before: list[bool] = []
        self._next_to_tell = 0
        """The sink that tells a batch of its snapshot in this turn, if it tells one."""
        self._same_sinks = False
        self.warm = folder is not None and self.journal is not None and self._recover(folder)
        if not self.warm:
            self._check_seqs(may_reset=may_reset)
            self.outputs = [
                self._output(number, self._first_seq(number)) for number in self._places
            ]

    @property
    def _places(self) -> range:
        return range(len(self._sinks))

    def _first_seq(self, number: int) -> int:
        """Where a sink goes on of which nothing but the seq is known."""
        kept = self._seqs[number]
        return kept.found or 0 if kept else 0

    def _check_seqs(self, *, may_reset: bool) -> None:
        """Notice the files that should say something and do not."""
        for kept, name in zip(self._seqs, self._names, strict=True):
            if kept is None or kept.found is not None:
                continue
            if kept.created and name not in self._kept_names:
                continue  # a new sink
            if not may_reset:
                for one in self._seqs:
                    if one is not None and one.created:
                        one.path.unlink()  # to be missed again the next time
                self.close()
                raise StateError(f"on_lost_state: {kept.path}: {kept.reason}")
            _log.warning("%s: %s; its sink starts over at seq 0", kept.path, kept.reason)

    def _speller(self, dialect: Dialect) -> Spells:
        worker = self._worker
        if dialect.event_form == "mooncake":
            return StoreSpeller(
                worker.dp_rank,
                block_size=worker.block_size,
                hash_format=worker.hash_format,
                media=dict(dialect.media),
                object_key=dialect.object_key,
                model=worker.model,
                worker_id=worker.worker_id,
            )
        if dialect not in self._spellers:
            self._spellers[dialect] = Speller(dialect, worker.dp_rank)
        return self._spellers[dialect]

    def _output(self, number: int, next_seq: int) -> Output:
        sink = self._sinks[number]
        dialect = sink.spelling
        return Output(
            number,
            sink.name,
            View(dialect),
            self._speller(dialect),
            self._keep,
            self._clock,
            max_batches=sink.buffer_steps,
            max_bytes=sink.buffer_bytes,
            max_padding=sink.replay_padding,
            coalesce_s=sink.coalesce_s,
            rebase_after=sink.rebase_after,
            next_seq=next_seq,
        )

    def _keep(self, entry: Entry) -> None:
        if self.journal is not None:
            self._entries.append(entry)

    def _write_journal(self) -> None:
        """What was kept since the last time, in one write."""
        entries, self._entries = self._entries, []
        if entries and self.journal is not None:
            self.journal.append(*entries)

    # --------------------------------------------------------------------------- recovery

    def _recover(self, folder: Path) -> bool:
        deadline = time.monotonic() + _RECOVERY_S
        for found in read_journal(folder):
            self._kept_names |= {sink.name for sink in found.head.sinks}
            try:
                self._rebuild(found, deadline)
            except KVEventsError as error:
                _log.warning("the journal in %s cannot be taken up: %s", folder, error)
                continue
            return True
        return False

    def _rebuild(self, found: Recovered, deadline: float) -> None:
        """Replica and outputs as an earlier process had them. Raises KVEventsError (C2), also when it is
        not done by `deadline`.
        """
        head = found.head
        if head.link_id != self._link_id:
            raise KVEventsError("it is of another run of the worker, or of an engine elsewhere")
        if head.worker != msgspec.msgpack.encode(self._worker):
            raise KVEventsError(_changed(head.worker, self._worker))
        replica = Replica(self._worker)
        replica.load(
            _until(deadline, found.pieces),
            expected=head.expected,
            in_step=head.in_step,
            tells_batches=head.tells_batches,
            last_batch=head.last_batch,
            ts=head.ts,
        )
        known = {(sink.name, sink.spelling): sink for sink in head.sinks}
        ours = list(zip(self._names, self._fingerprints, strict=True))
        outputs = {
            key: self._output(number, known[key].next_seq)
            for number, key in enumerate(ours)
            if key in known
        }
        state, whole = replica.freeze(), BlockIndex()
        if any(output.tells_all for output in outputs.values()):
            for events in _until(deadline, state.snapshot(SNAPSHOT_BLOCKS)):
                whole.apply(events)
        for key, output in outputs.items():
            if known[key].telling:
                output.await_snapshot()  # which begins with AllBlocksCleared
            elif output.tells_all:
                output.load_index(whole.fork())
            else:
                output.load(_until(deadline, state.snapshot(SNAPSHOT_BLOCKS)))
        theirs = [outputs.get((sink.name, sink.spelling)) for sink in head.sinks]
        self._replay(_until(deadline, found.entries), replica, theirs)
        for number, key in enumerate(ours):
            kept = self._seqs[number]
            if key in outputs and kept and outputs[key].next_seq < (kept.found or 0):
                seq = outputs[key].next_seq
                raise KVEventsError(f"it ends at seq {seq} of sink {key[0]}, after {kept.found}")
        replica.count_from_here()
        for output in outputs.values():
            output.count_from_here()
        self.replica = replica
        self.outputs = [
            outputs[key] if key in outputs else self._output(number, self._first_seq(number))
            for number, key in enumerate(ours)
        ]
        self._told_before = [key in outputs for key in ours]
        self._same_sinks = ours == [(sink.name, sink.spelling) for sink in head.sinks]

    def _replay(
        self, entries: Iterable[Entry], replica: Replica, outputs: list[Output | None]
    ) -> None:
        for entry in entries:
            if entry.kind == Kind.INPUT:
                told = replica.apply(Input(entry.number, entry.flags, entry.body))
                if told is not None and told.events:
                    for output in outputs:
                        if output is not None:
                            output.tell(told, 0.0)
            elif entry.sink >= len(outputs):
                raise KVEventsError(f"journal: an entry of sink {entry.sink}")
            elif (output := outputs[entry.sink]) is not None:
                output.replay_entry(entry)

    # --------------------------------------------------------------------------- running

    def start(self) -> list[Numbered]:
        """Begin, once every socket is bound: what the sinks publish first."""
        ts = self._clock()
        if self._folder is not None:
            _add_names(self._folder, self._kept_names, self._names)
        if not self.warm:
            if self.journal is not None:
                self.journal.discard()
            first = [
                Numbered(number, output.own(ts, [AllBlocksCleared()]))
                for number, output in enumerate(self.outputs)
            ]
            self._begin_generation()
            return self._ready(first)
        assert self.journal is not None
        published: list[Numbered] = []
        if self._same_sinks:
            self.journal.resume()
        else:
            published = self.cut()
            self.journal.discard()
        for output, told_before in zip(self.outputs, self._told_before, strict=True):
            if output.snapshotting or not told_before:
                output.begin_snapshot(self.replica.freeze())
        if not self._same_sinks:
            self._begin_generation()
        for kept, output in zip(self._seqs, self.outputs, strict=True):
            if kept is not None:
                kept.write(output.next_seq)
        self._write_journal()
        return published

    def apply(self, inputs: list[Input], now: float) -> list[Numbered]:
        """Keep and apply inputs; the batches to send. `now` is monotonic."""
        published: list[Numbered] = []
        self._calls += 1
        timed = self._calls % _TIMED_EVERY == 0
        began = time.thread_time() if timed else 0.0
        replica, outputs = self.replica, list(enumerate(self.outputs))
        for given in inputs:
            if replica.in_step or given.flags & (FRESH | BATCH | LOST):
                kept = head_of(given.body) if given.flags & COLUMNS else given.body
                self._keep(Entry(Kind.INPUT, kept, given.number, given.flags))
            told = replica.apply(given)
            if told is None or not told.events:
                continue
            for number, output in outputs:
                published += [Numbered(number, frame) for frame in output.tell(told, now)]
        if timed:
            self._applied_s += (time.thread_time() - began) * _TIMED_EVERY
        return self._ready(published)

    def own(self, number: int, events: list[Event]) -> list[Numbered]:
        """A batch of one sink that the worker did not tell."""
        frame = self.outputs[number].own(self._clock(), events)
        return self._ready([Numbered(number, frame)])

    def end(self) -> list[Numbered]:
        """The worker is gone, and with it all that it held: nothing of it is told again."""
        ts = self._clock()
        published = self.cut()
        self.replica.forget()
        return published + self._ready(
            [Numbered(number, output.end(ts)) for number, output in enumerate(self.outputs)]
        )

    def cut(self) -> list[Numbered]:
        """Publish what is held to be merged, without waiting for more."""
        return self._ready(
            [
                Numbered(number, frame)
                for number, output in enumerate(self.outputs)
                for frame in output.cut()
            ]
        )

    def snapshot(self, number: int | None = None) -> None:
        """Tell the whole state anew, from here: on the sink at this place, or on every one."""
        for place, output in enumerate(self.outputs):
            if number in (None, place):
                output.begin_snapshot(self.replica.freeze())
        self._write_journal()

    @property
    def held(self) -> bool:
        """Whether something was told by the worker and is not published yet."""
        return any(output.held for output in self.outputs)

    def wake_at(self, now: float) -> float:
        """The monotonic time by which to call `work`."""
        if self.journal is not None and (self.journal.checkpointing or self._generation_due(now)):
            return now
        wake_at = math.inf
        for output in self.outputs:
            if output.snapshotting or output.rebase_due:
                return now
            wake_at = min(wake_at, output.cut_at())
        return wake_at

    def work(self, now: float) -> list[Numbered]:
        """A bounded part of what is to be done besides: merging, telling anew, the checkpoint."""
        published: list[Numbered] = []
        for number, output in enumerate(self.outputs):
            frames: list[Frame] = []
            if output.rebase_due and number == self._next_to_tell:
                output.rebase(self.replica.freeze())
            if output.cut_at() <= now:
                frames += output.cut()
            if number == self._next_to_tell:
                frames += output.snapshot_part(self._clock())
            published += [Numbered(number, frame) for frame in frames]
        self._next_to_tell = (self._next_to_tell + 1) % len(self.outputs)
        published += self._work_on_journal(now)
        return self._ready(published)

    def _work_on_journal(self, now: float) -> list[Numbered]:
        """Write some of the checkpoint, or begin another generation: nothing may be held then."""
        if self.journal is None:
            return []
        if self.journal.checkpointing:
            began = time.thread_time()
            self.journal.advance(_CHECKPOINT_BYTES)
            self._checkpoint_s += time.thread_time() - began
        published: list[Numbered] = []
        if self._generation_due(now):
            published = self.cut()
            if not self.held:
                self._journal_retry_at = now + _JOURNAL_RETRY_S
                self._begin_generation()
        return published

    def _generation_due(self, now: float) -> bool:
        """Whether the journal has grown enough, or failed long enough ago, to begin another."""
        journal = self.journal
        assert journal is not None
        if not journal.active:
            return now >= self._journal_retry_at
        costly = self._applied_s >= max(_GENERATION_S, _CHECKPOINT_SHARE * self._checkpoint_s)
        return journal.due or (costly and not journal.checkpointing)

    def _begin_generation(self) -> None:
        if self.journal is None:
            return
        head = Head(
            self._link_id,
            msgspec.msgpack.encode(self._worker),
            tuple(
                HeadSink(name, spelling, output.next_seq, output.snapshotting)
                for name, spelling, output in zip(
                    self._names, self._fingerprints, self.outputs, strict=True
                )
            ),
            self.replica.expected,
            self.replica.in_step,
            self.replica.tells_batches,
            self.replica.last_batch,
            self.replica.ts,
        )
        self._applied_s = self._checkpoint_s = 0.0
        self._write_journal()
        self.journal.begin(head, self.replica.freeze().saved())
        self.journal.advance(_CHECKPOINT_BYTES)

    def _ready(self, published: list[Numbered]) -> list[Numbered]:
        """Entries and seqs into their files, before anything is sent (C1)."""
        self._write_journal()
        for one in published:
            kept = self._seqs[one.sink]
            if kept is not None:
                kept.write(one.frame.seq + 1)
        return published

    def forget(self) -> None:
        """The worker will not come back: nothing is left of the journal, the seqs stay."""
        if self.journal is not None:
            self.journal.close()
            self.journal.discard()

    def close(self) -> None:
        """Close the files; safe to call twice."""
        self._write_journal()
        if self.journal is not None:
            self.journal.close()
        for kept in self._seqs:
            if kept is not None:
                kept.close()


def _fingerprint(dialect: Dialect) -> str:
    return msgspec.json.encode(dialect).decode()


def _changed(saved: bytes, worker: WorkerInfo) -> str:
    """What is not as it was."""
    try:
        before = msgspec.msgpack.decode(saved, type=WorkerInfo)
    except (msgspec.MsgspecError, ConfigError):
        return "the worker is another"
    changed = [
        f"{name} was {was}, is {now}"
        for name in WorkerInfo.__struct_fields__
        if (was := getattr(before, name)) != (now := getattr(worker, name))
    ]
    return f"the worker is another: {', '.join(changed)}"


def _until(deadline: float, items: Iterable[_T]) -> Iterator[_T]:
    """Raises KVEventsError once `deadline` is past."""
    for item in items:
        yield item
        if time.monotonic() > deadline:
            raise KVEventsError(f"it takes longer than {_RECOVERY_S:g} s")


def _read_names(folder: Path) -> set[str]:
    """The sinks whose seqs were kept in `folder`."""
    try:
        return set((folder / _NAMES).read_text().split())
    except (OSError, ValueError):
        return set()


def _add_names(folder: Path, known: set[str], names: Iterable[str]) -> None:
    """Note that these have a seq too; without it, one that is gone would not be missed."""
    if known.issuperset(names):
        return
    with contextlib.suppress(OSError):
        (folder / _NAMES).write_text("".join(f"{name}\n" for name in sorted(known.union(names))))
