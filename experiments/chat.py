"""Runs `coa chat` from a checkout; see `coa_jax/cli/chat.py`."""

from coa_jax.cli.main import run

if __name__ == "__main__":
  run("chat")
