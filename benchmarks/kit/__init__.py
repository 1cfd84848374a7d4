"""Peers on the same work, each in a process of its own that is asked in JSON lines."""
