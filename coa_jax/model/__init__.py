"""The transformer, its decoding cache, and their sharding."""
