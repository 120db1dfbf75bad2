"""`coa chat` of a checkout: see `coa_jax/cli/chat.py`."""

import sys

from coa_jax.cli.main import run

if __name__ == "__main__":
  run("chat", sys.argv[1:])
