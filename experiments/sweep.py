"""`coa sweep` of a checkout: see `coa_jax/cli/sweep.py`."""

import sys

from coa_jax.cli.main import run

if __name__ == "__main__":
  run("sweep", sys.argv[1:])
