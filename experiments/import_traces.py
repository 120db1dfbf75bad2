"""`coa import` of a checkout: see `coa_jax/cli/import_traces.py`."""

import sys

from coa_jax.cli.main import run

if __name__ == "__main__":
  run("import", sys.argv[1:])
