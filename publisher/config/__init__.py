"""What a sidecar is told: sinks, addresses, keys, and how that is read and checked."""
