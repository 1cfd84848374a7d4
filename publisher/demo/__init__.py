"""The main job on a real trace: a worker with its cache and sidecar, and a router that comes late.

`run` is the parent; `worker`, `router` and `tail` are its child processes. `worker` is where cache and
publisher meet, as they do in an engine; nothing else here imports the cache.
"""
