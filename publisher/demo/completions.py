"""Requests over HTTP, several at a time, and what came of each."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException

import msgspec

__all__ = ["Answer", "Prompt", "Unanswered", "ask", "ask_all"]

_PATIENCE_S = 60.0
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


class Prompt(msgspec.Struct, frozen=True):
    """What is asked."""

    tokens: tuple[int, ...]
    max_tokens: int


class Answer(msgspec.Struct, frozen=True):
    """What came, from whom, and how many tokens of the prompt that worker had where."""

    worker: str
    prompt_tokens: int
    device: int
    host: int
    storage: int
    reply: tuple[int, ...]

    @property
    def cached(self) -> int:
        """Tokens that were not computed."""
        return self.device + self.host + self.storage


class Unanswered(msgspec.Struct, frozen=True):
    """Why nothing came."""

    reason: str


class _Cached(msgspec.Struct):
    device: int
    host: int
    storage: int


class _Usage(msgspec.Struct):
    prompt_tokens: int
    prompt_tokens_details: _Cached


class _Choice(msgspec.Struct):
    token_ids: tuple[int, ...]


class _Completion(msgspec.Struct):
    id: str
    choices: tuple[_Choice]
    usage: _Usage


def ask(url: str, model: str, prompt: Prompt) -> Answer | Unanswered:
    """One request to an examples/engine.py, or to a router in front of some."""
    body = {"model": model, "prompt": prompt.tokens, "max_tokens": prompt.max_tokens}
    request = urllib.request.Request(f"{url}/v1/completions", msgspec.json.encode(body))
    request.add_header("content-type", "application/json")
    try:
        with _open(request, timeout=_PATIENCE_S) as response:
            found = msgspec.json.decode(response.read(), type=_Completion)
    except urllib.error.HTTPError as error:
        with error:
            return Unanswered(f"{error.code} {error.read()[:200].decode(errors='replace')}")
    except (OSError, HTTPException, msgspec.DecodeError) as error:
        return Unanswered(f"{type(error).__name__}: {error}")
    where = found.usage.prompt_tokens_details
    return Answer(
        worker=found.id.split("-")[1],
        prompt_tokens=found.usage.prompt_tokens,
        device=where.device,
        host=where.host,
        storage=where.storage,
        reply=found.choices[0].token_ids,
    )


def ask_all(
    prompts: Sequence[Prompt],
    num_clients: int,
    asked: Callable[[Prompt], Answer | Unanswered],
) -> list[Answer | Unanswered]:
    """What `asked` says of each, in order; so many clients have one under way."""
    with ThreadPoolExecutor(num_clients) as clients:
        return list(clients.map(asked, prompts))
