"""The sidecar's process: one loop between its source, its sinks and its HTTP server."""
