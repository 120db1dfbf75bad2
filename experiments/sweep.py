"""Runs `coa sweep` from a checkout; see `coa_jax/cli/sweep.py`."""

from coa_jax.cli.main import run

if __name__ == "__main__":
  run("sweep")
