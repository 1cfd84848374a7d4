"""The third tier: pages that outlive the process, or that several workers share."""

from hicache.storage.backend import StorageBackend, StorageError, StorageStats, StoredPage
from hicache.storage.file import FileStorage
from hicache.storage.keys import PageFormat
from hicache.storage.mooncake import MooncakeConfig, MooncakeStorage

__all__ = [
    "FileStorage",
    "MooncakeConfig",
    "MooncakeStorage",
    "PageFormat",
    "StorageBackend",
    "StorageError",
    "StorageStats",
    "StoredPage",
]
