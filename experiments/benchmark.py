"""Runs `coa benchmark` from a checkout; see `coa_jax/cli/benchmark.py`."""

from coa_jax.cli.main import run

if __name__ == "__main__":
  run("benchmark")
