"""What workers hold and do: `kvevents state` and `kvevents top`."""
