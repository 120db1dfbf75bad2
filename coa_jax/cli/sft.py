"""Fine-tunes a model on trajectories, from one config file.

  coa sft --config=configs/X.py --workdir=DIR

Any field can be overridden: --config.SECTION.FIELD=VALUE.
"""

from coa_jax import sft
from coa_jax.cli.launch import launch


def command() -> None:
  """Runs the command line."""
  launch(sft.run, sft.SFTConfig)
