"""The host's side: a pool of slots, their control groups and sessions."""
