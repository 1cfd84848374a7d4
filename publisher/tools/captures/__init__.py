"""Captures: `kvevents record`, `play` and `plot`."""
