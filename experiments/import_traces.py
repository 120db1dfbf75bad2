"""Runs `coa import` from a checkout; see `coa_jax/cli/import_traces.py`."""

from coa_jax.cli.main import run

if __name__ == "__main__":
  run("import")
