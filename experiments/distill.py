"""Multi-agent distillation.

python -m experiments.distill --config=configs/X.py --workdir=DIR [--config.FIELD=VALUE]
"""

from coa_jax import distill
from experiments.launch import launch

if __name__ == "__main__":
  launch(distill.run)
