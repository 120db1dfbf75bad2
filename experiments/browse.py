"""Runs `coa browse` from a checkout; see `coa_jax/cli/browse.py`."""

from coa_jax.cli.main import run

if __name__ == "__main__":
  run("browse")
