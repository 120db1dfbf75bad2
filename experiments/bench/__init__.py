"""Benchmarks: our code and peers, interleaved in one run, and their ratios."""
