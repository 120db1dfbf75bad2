"""Trains a model by agentic RL, from one config file.

  coa rl --config=configs/X.py --workdir=DIR

Any field can be overridden: --config.SECTION.FIELD=VALUE.
"""

from coa_jax import rl
from coa_jax.cli.launch import launch


def command() -> None:
  """Runs the command line."""
  launch(rl.run, rl.RLConfig)
