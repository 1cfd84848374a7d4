"""The hierarchical KV cache inside the worker: every change of residency is an event, by construction."""

from hicache.cache import HiRadixCache, Insertion, Match
from hicache.node import Node, PageIndices
from hicache.pool import KVShape, PagePool

__all__ = ["HiRadixCache", "Insertion", "KVShape", "Match", "Node", "PageIndices", "PagePool"]
