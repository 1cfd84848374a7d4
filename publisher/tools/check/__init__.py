"""`kvevents check`."""
