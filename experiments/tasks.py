"""Runs `coa tasks` from a checkout; see `coa_jax/cli/tasks.py`."""

from coa_jax.cli.main import run

if __name__ == "__main__":
  run("tasks")
