"""The worker's half: what hands over, and what looks after the sidecar."""
