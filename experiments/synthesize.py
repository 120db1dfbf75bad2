"""Runs `coa synthesize` from a checkout; see `coa_jax/cli/synthesize.py`."""

from coa_jax.cli.main import run

if __name__ == "__main__":
  run("synthesize")
