"""Plugins: the sidecar as the KV-event publisher of SGLang and of vLLM, neither of them changed.

Both engines load every plugin of the environment in each of their processes, so nothing is imported
here, and a module of here imports what it needs when it is used.
"""
