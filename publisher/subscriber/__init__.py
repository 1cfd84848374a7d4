"""The router's half: what listens."""
