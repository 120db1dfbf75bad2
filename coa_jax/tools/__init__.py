"""What answers a tool call."""
