"""`coa distill` of a checkout: see `coa_jax/cli/distill.py`."""

import sys

from coa_jax.cli.main import run

if __name__ == "__main__":
  run("distill", sys.argv[1:])
