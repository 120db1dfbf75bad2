"""`coa select` of a checkout: see `coa_jax/cli/select_tasks.py`."""

import sys

from coa_jax.cli.main import run

if __name__ == "__main__":
  run("select", sys.argv[1:])
