"""Runs `coa pod` from a checkout; see `coa_jax/cli/pod.py`."""

from coa_jax.cli.main import run

if __name__ == "__main__":
  run("pod")
