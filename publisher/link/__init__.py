"""Between worker and sidecar: shared memory, and a socket beside it."""
