"""`kvevents tail`."""
