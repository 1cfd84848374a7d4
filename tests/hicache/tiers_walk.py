"""Walks of random steps through what engine, sidecar and world can do to a cache of all tiers."""

from __future__ import annotations

from random import Random

from hicache_rig import NAMESPACES, prompt_of
from kv_blocks import Tokens
from stepped import Outcome
from tiers_rig import SHAPES, Damage, Setup, TiersRig

from hicache import HiCacheConfig, PrefetchPolicy, WritePolicy
from hicache.eviction import POLICIES
from hicache.tier import Tier
from kvevents import HashFormat, Namespace

__all__ = ["random_setup", "random_tiers_step"]

OUTCOMES = (*[Outcome.OK] * 6, Outcome.HALF, Outcome.SILENT)
PLANS = (*OUTCOMES[4:], Outcome.LATE)


def random_tiers_step(random: Random, rig: TiersRig) -> None:
    """Something that an engine, a sidecar or the world does."""
    tokens, namespace = _random_prompt(random, rig)
    match random.choice(_STEPS):
        case "match":
            rig.match(tokens, namespace)
        case "lock" if len(rig.held) < 2:
            rig.match_and_lock(tokens, namespace, host=random.random() < 0.5)
        case "lock_again" if rig.nodes and len(rig.held) < 2:
            rig.lock_again(-1 - random.randrange(min(8, len(rig.nodes))))
        case "unlock" if rig.held:
            rig.unlock(random.randrange(len(rig.held)))
        case "begin" if len(rig.requests) < 2:
            rig.begin(tokens, namespace)
        case "finish" if rig.requests:
            rig.finish(random.randrange(len(rig.requests)))
        case "abort" if rig.requests:
            rig.abort(random.randrange(len(rig.requests)))
        case "insert_all":
            rig.insert_all(tokens, namespace)
        case "insert_with_own":
            rig.insert_with_own(tokens, namespace)
        case "load_back" if len(rig.loads) < 2 and (known := rig.below(Tier.HOST)):
            rig.load_back(*random.choice(known))
        case "finish_load" if rig.loads:
            rig.finish_load(random.randrange(len(rig.loads)))
        case "abort_load" if rig.loads:
            rig.abort_load(random.randrange(len(rig.loads)))
        case "prefetch" if known := rig.below(Tier.HOST, Tier.DISK):
            rig.prefetch(*random.choice(known))
        case "prefetch_any":
            rig.prefetch(tokens, namespace)
        case "fetch_through" if known := rig.below(Tier.HOST, Tier.DISK):
            ends = [(-1, random.choice(OUTCOMES)) for _ in range(3)]
            if random.random() < 0.5:
                ends[:2] = [(-1, Outcome.OK)] * 2
            ends = ends[: random.randint(1, 3)]
            rig.fetch_through(*random.choice(known), random.choice((0, 1, 2)), ends)
        case "overtake" if len(rig.loads) < 2 and (known := rig.below(Tier.HOST)):
            rig.overtake(*random.choice(known), random.choice(OUTCOMES))
        case "stored_by_another":
            tokens = prompt_of(random.choices(range(3), k=3), 0, rig.setup.page_size)
            rig.stored_by_another(tokens, namespace)
            rig.fetch_through(tokens, namespace, 0, [(-1, random.choice(OUTCOMES))] * 2)
        case "lose_while_written":
            rig.lose_while_written(random.randrange(100), random.choice((Damage.GONE, Damage.CUT)))
        case "split_in_flight" if rig.prompts:
            cuts = [random.randrange(6) for _ in range(random.randint(1, 2))]
            rig.request(tokens, namespace)
            rig.split_in_flight(tokens, namespace, cuts, random.choice(OUTCOMES))
        case "prefetch_done" if rig.fetches:
            rig.prefetch_done(random.randrange(len(rig.fetches)))
        case "cancel_prefetch" if rig.fetches:
            rig.cancel_prefetch(random.randrange(len(rig.fetches)))
        case "evict":
            rig.evict(random.choice((1, 1, 2, 3, 8)))
        case "tick":
            rig.tick()
        case "release" if rig.calls.held:
            rig.release(random.randrange(100), random.choice(OUTCOMES))
        case "release_all":
            rig.release_all()
            rig.tick()
        case "plan":
            rig.plan([random.choice(PLANS) for _ in range(3)])
        case "wait":
            rig.wait(random.choice((2, 31)))
            rig.tick()
        case "damage" if rig.store is not None:
            rig.damage(random.randrange(100), random.choice(list(Damage)))
            if random.random() < 0.5:
                rig.look_for_damage()
                rig.tick()
        case "look_for_damage":
            rig.look_for_damage()
        case "idle":
            rig.idle()
        case "calm_down":
            rig.calm_down()
        case "flush":
            rig.end_all()
            rig.flush()
        case "reset_device":
            rig.end_all()
            rig.reset_device()
        case "restart":
            rig.restart()
        case "begin_retell":
            rig.begin_retell()
        case "retell":
            rig.retell(random.randint(1, 3))
        case "retell_all":
            rig.retell_all(random.randint(1, 3))
        case "request":
            rig.request(tokens, namespace, random.randrange(2))
        case _:
            rig.tick()


_STEPS = (
    *["request"] * 12,
    *["tick"] * 12,
    *["release"] * 12,
    *["release_all", "load_back", "finish_load", "prefetch", "fetch_through", "evict"] * 5,
    *["insert_all", "split_in_flight", "prefetch_done", "overtake", "stored_by_another"] * 3,
    *["match", "lock", "lock_again", "unlock", "begin", "finish", "retell", "restart", "wait"] * 2,
    *["lose_while_written", "damage"] * 2,
    *["insert_with_own", "abort", "abort_load", "cancel_prefetch", "prefetch_any", "plan"],
    *["look_for_damage", "idle", "idle", "calm_down", "flush", "reset_device"],
    *["begin_retell", "retell_all"],
)


def _random_prompt(random: Random, rig: TiersRig) -> tuple[Tokens, Namespace]:
    """A prompt that is new, or is a known one, or leaves one somewhere inside it."""
    size, longest = rig.setup.page_size, min(6, rig.setup.device_pages)
    symbols = [random.randrange(3) for _ in range(random.randint(0, longest))]
    fresh = prompt_of(symbols, random.randrange(4), size)
    if not rig.prompts or random.random() < 0.3:
        return fresh, random.choice(NAMESPACES[:2])
    tokens, namespace = random.choice(rig.prompts[-10:])
    if random.random() < 0.3:
        return tokens, namespace
    cut = random.randint(0, len(tokens) // size) * size
    return (tokens[:cut] + fresh)[: longest * size], namespace


def random_setup(random: Random, storage: bool | None = None) -> Setup:
    """Any cache at all, or one with or without storage."""
    return Setup(
        page_size=random.choice((1, 2, 4)),
        device_pages=random.randint(2, 10),
        host_pages=random.randint(1, 10),
        storage=random.random() < 0.5 if storage is None else storage,
        max_pages=random.choice((None, None, 3, 6)),
        audit_interval_s=random.choice((None, 1.0)),
        parents_first=random.random() < 0.5,
        shape=random.choice(SHAPES),
        hash_format=random.choice(list(HashFormat)),
        by_records=random.random() < 0.5,
        listen_every=random.choice((1, 1, 1, 4)),
        config=random_config(random),
    )


def random_config(random: Random) -> HiCacheConfig:
    """Any policies at all."""
    return HiCacheConfig(
        write_policy=random.choice(list(WritePolicy)),
        eviction_policy=random.choice(sorted(POLICIES)),
        prefetch_policy=random.choice(list(PrefetchPolicy)),
        load_back_threshold=random.choice((0, 0, 4)),
        prefetch_threshold=0,
        storage_queue_pages=random.choice((None, 8)),
    )
