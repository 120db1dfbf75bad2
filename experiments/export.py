"""Runs `coa export` from a checkout; see `coa_jax/cli/export.py`."""

from coa_jax.cli.main import run

if __name__ == "__main__":
  run("export")
