"""`coa compare` of a checkout: see `coa_jax/cli/compare.py`."""

import sys

from coa_jax.cli.main import run

if __name__ == "__main__":
  run("compare", sys.argv[1:])
