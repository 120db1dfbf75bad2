"""Runs `coa distill` from a checkout; see `coa_jax/cli/distill.py`."""

from coa_jax.cli.main import run

if __name__ == "__main__":
  run("distill")
