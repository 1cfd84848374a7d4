"""`kvevents state`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from publisher.cli.parsing import (
    FINDINGS,
    NO_CONNECTION,
    Parser,
    add_color,
    add_sources,
    check_seconds,
    read_keys,
    read_sources,
    say,
)

if TYPE_CHECKING:
    from publisher.tools.fleet.state import Prompt, State

__all__ = ["add_options", "run"]

_LONGEST_REPLAY_S = 5.0

_DESCRIPTION = """\
Which worker holds what, on which tier; and how much of a prompt.

Joins each stream (where there is a replay endpoint, with what was stored
before), waits until it is in step, and prints the blocks that each worker and
rank holds. In step: connected, and all that a replay has to tell was told; a
busy stream need not be quiet for that. One that answers no replay cannot say
that it is in step: it is waited for until it is quiet.
  rank         data-parallel rank
  block        tokens a block
  GPU          blocks on the device tier; CPU_PINNED: on the host tier; DISK,
               EXTERNAL: on those
  any          blocks held, each counted once
  seq          number of the last batch
  note         why this may not be all there is
With a prompt, how much of it each holds, as a router would score it, the best
first:
  blocks       its leading blocks that are held, of all that it has
  tokens       their tokens; share: of the prompt's
  GPU ...      leading blocks on that tier alone
  note         why it is no more
"""

_EPILOG = """\
examples:
  kvevents state w1=tcp://10.0.0.5:5557,5558 w2=tcp://10.0.0.6:5557,5558
  kvevents state tcp://10.0.0.5:5557,5558 --tokens 1,2,3,4,5,6,7,8
  kvevents state tcp://10.0.0.5:5557,5558 --tokens-file prompt.json --lora sql
  kvevents state monday.capture --blocks

A prompt is given by its token ids. The engine has them, with the model's own
tokenizer and chat template:
  curl -s http://10.0.0.5:8000/tokenize -H 'Content-Type: application/json' \\
    -d '{"model": "NAME", "prompt": "Hello"}' > prompt.json
  (vLLM; with "messages": [...] in place of "prompt" for a chat)
or, without it:
  python -c "from transformers import AutoTokenizer as T; \\
    print(T.from_pretrained('NAME')('Hello').input_ids)" > prompt.json

--json: one document.
  workers: [{worker, rank, block_size, blocks: {MEDIUM: count}, any, seq, whole,
    quiet, notes}]
  overlap, with a prompt: {tokens, lora, cache_salt, extra_key, workers:
    [{worker, rank, block_size, prompt_blocks, blocks: {MEDIUM: leading blocks},
    any, tokens: {MEDIUM: leading tokens}, any_tokens, share, breaks_at_block,
    breaks_at_token, elsewhere, reasons}]}, best first
  blocks, with --blocks: [{worker, rank, hash, parent, depth, media, lora,
    cache_salt, extra_key, tokens}]; hashes are strings, signed 64 bits

exit codes: 0 the state is whole; 1 some of it is known to be missing, and its
  note says what, or a capture is damaged; 2 usage; 3 no connection to any, or
  nothing came
"""


def add_options(parser: Parser) -> None:
    """Of `state`."""
    add_sources(parser)
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--tokens", metavar="IDS", help="the prompt: 1,2,3")
    prompt.add_argument(
        "--tokens-file",
        metavar="FILE",
        help="the prompt: a JSON list, an object with input_ids, token_ids, prompt_token_ids or tokens,"
        " or ids with blanks or commas between; - is stdin",
    )
    parser.add_argument("--lora", metavar="NAME", help="the prompt's LoRA adapter")
    parser.add_argument("--cache-salt", metavar="TEXT", help="the prompt's cache salt")
    parser.add_argument("--extra-key", metavar="TEXT", help="the prompt's extra key")
    parser.add_argument(
        "--blocks", action="store_true", help="list the blocks too: of the prompt, or all"
    )
    parser.add_argument(
        "--quiet",
        dest="quiet_s",
        type=float,
        default=0.5,
        metavar="S",
        help="look on for so long after it is in step; without replays: it is quiet when nothing was"
        " stored or removed for so long (0.5)",
    )
    parser.add_argument(
        "--for",
        dest="for_s",
        type=float,
        default=10.0,
        metavar="S",
        help="wait for all that, and for who is not there, at most so long (10)",
    )
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    parser.add_argument(
        "--json", dest="output", action="store_const", const="json", help="the same as -o json"
    )
    add_color(parser)
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def run(options: argparse.Namespace) -> int:
    """Returns the exit code."""
    from publisher.cli.hint import damages, unheard
    from publisher.tools.fleet.state import gather
    from publisher.tools.source import Sources

    check_seconds("--quiet", options.quiet_s)
    check_seconds("--for", options.for_s)
    addresses = read_sources(options)
    prompt = _prompt(options)
    server_key, client_keys = read_keys(options)
    with Sources(
        addresses,
        topic=options.topic,
        attempts=1,
        replay_timeout_s=min(_LONGEST_REPLAY_S, options.for_s / 2),
        server_key=server_key,
        client_keys=client_keys,
    ) as sources:
        state = gather(sources, quiet_s=options.quiet_s, for_s=options.for_s, warn=_warn)
        faults, damaged = damages(sources, state.fleet)
        for fault in faults:
            _warn(fault)
        _write(state, prompt, options)
        for line in unheard(options, sources, state.fleet):
            _warn(line)
        if state.came or state.waits or damaged:
            return FINDINGS if damaged or not state.whole else 0
        if not sources.live:
            _warn("no batch is in what was read")
        return NO_CONNECTION


def _warn(text: str) -> None:
    say(f"kvevents state: {text}")


def _prompt(options: argparse.Namespace) -> Prompt | None:
    """The prompt that is looked for. Raises ValueError."""
    from kvevents.namespace import Namespace
    from publisher.tools.fleet.prompt import parse_tokens, read_tokens
    from publisher.tools.fleet.state import Prompt

    names = {"lora": options.lora, "cache-salt": options.cache_salt}
    names["extra-key"] = options.extra_key
    if options.tokens is None and options.tokens_file is None:
        for key, value in names.items():
            if value is not None:
                raise ValueError(
                    f"--{key}: it is a prompt's, and goes with --tokens or --tokens-file"
                )
        return None
    for key, value in names.items():
        try:
            Namespace(value)
        except ValueError as error:
            raise ValueError(f"--{key}: {str(error).removeprefix('lora_name: ')}") from None
    if options.tokens is not None:
        tokens = parse_tokens("--tokens", options.tokens)
    else:
        tokens = read_tokens("--tokens-file", options.tokens_file)
    return Prompt(tokens, Namespace(options.lora, options.cache_salt, options.extra_key))


def _write(state: State, prompt: Prompt | None, options: argparse.Namespace) -> None:
    import os
    import shutil
    import sys

    import msgspec

    from publisher.tools.colour import painter, wants_colour
    from publisher.tools.columns import painted
    from publisher.tools.text import json_text

    if options.output == "json":
        document = state.document(prompt, blocks=options.blocks)
        print(json_text(msgspec.json.format(msgspec.json.encode(document), indent=2)))
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    paint = painter(colours=wants_colour(options.color, sys.stdout, os.environ))
    tables = [state.table(width)]
    if prompt is not None:
        tables.append([[], *state.overlap_table(prompt, width)])
    for table in tables:
        for line in table:
            print(painted(line, paint))
    if options.blocks:
        print()
        for told in state.block_lines(prompt):
            print(told)
