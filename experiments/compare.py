"""Runs `coa compare` from a checkout; see `coa_jax/cli/compare.py`."""

from coa_jax.cli.main import run

if __name__ == "__main__":
  run("compare")
