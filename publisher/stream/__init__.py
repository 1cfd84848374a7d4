"""From a worker's inputs to the batches of each sink, and what is kept of both. No sockets."""
