"""Benchmarks: ours and a peer interleaved in one run, and the ratio."""
