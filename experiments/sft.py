"""Supervised fine-tuning.

python -m experiments.sft --config=configs/X.py --workdir=DIR [--config.FIELD=VALUE]
"""

from coa_jax import sft
from experiments.launch import launch

if __name__ == "__main__":
  launch(sft.run)
