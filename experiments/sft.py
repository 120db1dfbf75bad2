"""Supervised fine-tuning: one journey, from one config file.

  python -m experiments.sft --config=configs/X.py --workdir=DIR

Any field can be overridden: --config.SECTION.FIELD=VALUE.
"""

from coa_jax import sft
from experiments.launch import launch

if __name__ == "__main__":
  launch(sft.run, sft.SFTConfig)
