"""The hierarchical KV cache inside an inference worker: every change of residency is an event."""

from hicache.agreement import Agreement, GroupAgreement
from hicache.cache import CacheStats, HiRadixCache, Insertion, Match
from hicache.flight import Flight
from hicache.node import Node, PageIndices
from hicache.policy import HiCacheConfig, PrefetchPolicy, WritePolicy
from hicache.pool import HostPool, KVShape, MLAShape, PagePool
from hicache.prefetch import Prefetch
from hicache.tier import Tier

__all__ = [
    "Agreement",
    "CacheStats",
    "Flight",
    "GroupAgreement",
    "HiCacheConfig",
    "HiRadixCache",
    "HostPool",
    "Insertion",
    "KVShape",
    "MLAShape",
    "Match",
    "Node",
    "PageIndices",
    "PagePool",
    "Prefetch",
    "PrefetchPolicy",
    "Tier",
    "WritePolicy",
]
