"""Runs `coa evaluate` from a checkout; see `coa_jax/cli/evaluate.py`."""

from coa_jax.cli.main import run

if __name__ == "__main__":
  run("evaluate")
