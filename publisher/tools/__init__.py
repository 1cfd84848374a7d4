"""What looks at a stream, live or in a capture. Nothing here is needed to publish one."""
