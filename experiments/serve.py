"""Runs `coa serve` from a checkout; see `coa_jax/cli/serve.py`."""

from coa_jax.cli.main import run

if __name__ == "__main__":
  run("serve")
