"""`kvevents demo --router`: two engines with their sidecars behind a real vllm-router.

The same requests go through it twice, each time to engines that are new: by its policy round_robin, and
by kv_aware, which follows the events. Then one engine is killed, with requests under way, and started
again; what the router gives it credit for afterwards is compared with what it holds, request by request.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from random import Random
from threading import Event, Thread

import msgspec

from publisher.demo.completions import Answer, Prompt, Unanswered, ask, ask_all
from publisher.demo.routed_options import RoutedOptions
from publisher.demo.routed_report import Afterwards, Outage, PolicyRun, Routed, report
from publisher.demo.site import MODEL, Engine, Router, SiteError
from publisher.demo.trace import TRACE_BLOCK, Request, TraceError, prompt, read_trace
from publisher.demo.witness import Witness

__all__ = ["read_prompts", "run_routed"]

_POLICIES = ("round_robin", "kv_aware")
_CLIENTS = 1
"""With more the router weighs the workers' queues too, as it should: that is not to be seen here."""
_CLIENTS_MEANWHILE = 4
"""While a worker is killed."""
_VOCABULARY = 128
_MOST_REPLY = 12
_WHOLE_TRACE = 10_000_000
_OUTAGE_REQUESTS = 60
_LEAST_TURNS = 3
_PROBES = 40
_PROBE_PAGES = 8
_BACK_S = 30.0
_LOGGED_S = 5.0
_QUIET_S = 0.05
"""After an answer, for what came of it to reach the router: the worker tells at its next step."""

Answered = list[Answer | Unanswered]


class Fleet:
    """Two engines, a witness of each, and a router in front."""

    def __init__(self, stack: contextlib.ExitStack, policy: str, options: RoutedOptions) -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvevents-routed-")))
        sizes = options.page_size, options.device_pages, options.host_pages
        self.engines = [
            stack.enter_context(Engine(folder / f"worker{number}", number, *sizes))
            for number in range(2)
        ]
        for engine in self.engines:
            stack.callback(engine.ask_to_end)  # all, before the end of any is waited for
        for engine in self.engines:
            engine.await_ready()
        self.witnesses = {
            engine.name: stack.enter_context(Witness(engine.endpoint, engine.replay_endpoint))
            for engine in self.engines
        }
        self.router = stack.enter_context(
            Router(options.router, policy, self.engines, options.page_size, folder)
        )
        self.router.await_line("Starting server on")
        if policy == "kv_aware":
            self.router.await_line("kv_index subscriber for", len(self.engines))
        self.ask = partial(ask, self.router.url, MODEL)
        self.longest: list[tuple[frozenset[str], str]] = []
        """Of each request that was answered: who held the longest prefix, and who got it."""

    def ask_and_see(self, prompt: Prompt) -> Answer | Unanswered:
        """Ask the router, and note who should have been asked."""
        held = {name: one.num_blocks(prompt.tokens) for name, one in self.witnesses.items()}
        most = max(held.values())
        answer = self.ask(prompt)
        if isinstance(answer, Answer):
            best = frozenset(name for name, blocks in held.items() if blocks == most)
            self.longest.append((best, answer.worker))
        return answer


@contextlib.contextmanager
def _fleet(policy: str, options: RoutedOptions) -> Iterator[Fleet]:
    with contextlib.ExitStack() as stack:
        yield Fleet(stack, policy, options)


def run_routed(options: RoutedOptions) -> int:
    """Run it; the exit code: 0 when all is as it should be, 1 when not, 2 when it could not be run.

    Raises TraceError.
    """
    prompts = read_prompts(options)
    load = prompts[: options.requests]
    say = _silent if options.as_json else _say
    runs: dict[str, PolicyRun] = {}
    try:
        for policy in _POLICIES:
            say(f"{policy}: starting two engines, their sidecars and the router")
            with _fleet(policy, options) as fleet:
                say(f"{policy}: {len(load):,} requests, one at a time")
                began = time.monotonic()
                answers = ask_all(load, _CLIENTS, fleet.ask_and_see)
                seconds = time.monotonic() - began
                runs[policy] = PolicyRun(policy, seconds, answers, list(fleet.longest))
                if policy == "kv_aware":
                    say("kv_aware: kill -9 of worker0 with requests under way, and its restart")
                    outage = _outage(fleet, prompts[options.requests :])
                    say("kv_aware: what it is given credit for, beside what it holds")
                    afterwards = _afterwards(fleet, load, answers, options.page_size)
    except SiteError as error:
        print(f"kvevents demo: {error}", file=sys.stderr)
        return 2
    found = Routed(runs["round_robin"], runs["kv_aware"], outage, afterwards)
    if options.as_json:
        print(msgspec.json.encode(found.summary()).decode())
    else:
        print()
        for line in report(found):
            print(line)
    for line in found.problems():
        print(line, file=sys.stderr)
    return 1 if found.problems() else 0


def _outage(fleet: Fleet, prompts: Sequence[Prompt]) -> Outage:
    """Kill the first engine with requests under way, and start it again at once."""
    engine, under_way = fleet.engines[0], Event()
    answers: Answered = []

    def asked(prompt: Prompt) -> Answer | Unanswered:
        answer = fleet.ask(prompt)
        under_way.set()
        return answer

    load = Thread(target=lambda: answers.extend(ask_all(prompts, _CLIENTS_MEANWHILE, asked)))
    load.start()
    under_way.wait()
    began = time.monotonic()
    engine.kill()
    engine.start()
    engine.await_ready()
    back_s = time.monotonic() - began
    load.join()
    return Outage(engine.name, back_s, answers)


def _afterwards(
    fleet: Fleet, load: Sequence[Prompt], answers: Answered, page_size: int
) -> list[Afterwards]:
    """Ask again what the killed engine has answered before, one by one, and look at each decision."""
    victim = fleet.engines[0].name
    found = _await_return(fleet, page_size)
    again = [
        one
        for one, answer in zip(load, answers, strict=True)
        if isinstance(answer, Answer)
        and answer.worker == victim
        and len(one.tokens) >= _PROBE_PAGES * page_size
    ]
    found += [_probe(fleet, one) for one in again[-_PROBES:]]
    return found


def _await_return(fleet: Fleet, page_size: int) -> list[Afterwards]:
    """Until the router sends requests to the engine that was killed, and has heard from it what our
    witness has; the decisions on the way. Raises SiteError.
    """
    victim, found = fleet.engines[0], []
    random, deadline = Random(0), time.monotonic() + _BACK_S
    witness, back = fleet.witnesses[victim.name], False
    while not (back and witness.num_held and fleet.router.last_seq(victim) >= witness.last_seq):
        if time.monotonic() > deadline:
            raise fleet.router.failure(f"did not follow {victim.name} any more")
        tokens = tuple(random.randrange(_VOCABULARY) for _ in range(2 * page_size + 1))
        found.append(_probe(fleet, Prompt(tokens, 1)))  # nobody has it: anybody may get it
        back |= found[-1].worker == victim.name
    return found


def _probe(fleet: Fleet, prompt: Prompt) -> Afterwards:
    """One request, and what was decided of it. Raises SiteError when it is not answered."""
    time.sleep(_QUIET_S)
    start = fleet.router.log_size
    answer = fleet.ask(prompt)
    if isinstance(answer, Unanswered):
        raise fleet.router.failure(f"gave no answer: {answer.reason}")
    credit = _decision(fleet.router, start)
    return Afterwards(answer.worker, credit, answer.device, answer.host, answer.storage)


def _decision(router: Router, start: int) -> float:
    """The credit of the last decision since. Raises SiteError when none is logged."""
    deadline = time.monotonic() + _LOGGED_S
    while not (found := router.decisions(start)):
        if time.monotonic() > deadline:
            raise router.failure("logged no decision")
        time.sleep(0.01)
    return found[-1]


def read_prompts(options: RoutedOptions) -> list[Prompt]:
    """Of the trace, the conversations of several turns, as far as their prompts are short enough.

    Without the blocks that all prompts begin with: in a quiet site those would bind everybody to the
    worker that had them first. Raises TraceError when there are not enough.
    """
    requests = read_trace(Path(options.trace), _WHOLE_TRACE)
    places = zip(*(request.hash_ids for request in requests), strict=False)
    common = sum(1 for _ in takewhile(lambda ids: len(set(ids)) == 1, places))
    own = [_from_block(common, request) for request in requests]
    short = [request for request in own if 1 <= len(request.hash_ids) <= options.most_pages]
    turns = Counter(request.hash_ids[0] for request in short)
    found = [request for request in short if turns[request.hash_ids[0]] >= _LEAST_TURNS]
    wanted = options.requests + _OUTAGE_REQUESTS
    if len(found) < wanted:
        raise TraceError(
            f"--trace: {options.trace}: --requests {options.requests} and {_OUTAGE_REQUESTS} more are"
            f" not in 0..{len(found)}, the prompts of 1..{options.most_pages} pages in conversations"
            f" of {_LEAST_TURNS} turns or more"
        )
    return [_prompt(request, options.page_size) for request in found[:wanted]]


def _from_block(first: int, request: Request) -> Request:
    return msgspec.structs.replace(
        request,
        hash_ids=request.hash_ids[first:],
        input_length=max(0, request.input_length - first * TRACE_BLOCK),
    )


def _prompt(request: Request, page_size: int) -> Prompt:
    tokens = [one % _VOCABULARY for one in memoryview(prompt(request, page_size)).cast("I")]
    if len(tokens) % page_size == 0:
        tokens.append(0)  # the last token is never cached, and here it does not cost a page
    reply = request.output_length * page_size // TRACE_BLOCK
    return Prompt(tuple(tokens), max(1, min(_MOST_REPLY, reply)))


def _say(line: str) -> None:
    print(line, flush=True)


def _silent(line: str) -> None:
    """Nothing but the summary is wanted."""
