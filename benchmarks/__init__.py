"""Works measured beside the peers. `python -m benchmarks` runs them all; none is a test."""
