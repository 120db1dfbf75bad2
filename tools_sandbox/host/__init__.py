"""The host's side of the sandbox: a pool of slots, and sessions."""
