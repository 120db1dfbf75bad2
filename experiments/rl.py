"""Runs `coa rl` from a checkout; see `coa_jax/cli/rl.py`."""

from coa_jax.cli.main import run

if __name__ == "__main__":
  run("rl")
