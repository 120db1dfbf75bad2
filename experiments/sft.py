"""Runs `coa sft` from a checkout; see `coa_jax/cli/sft.py`."""

from coa_jax.cli.main import run

if __name__ == "__main__":
  run("sft")
