"""Evaluation.

python -m experiments.evaluate --config=configs/X.py --workdir=DIR [--config.FIELD=VALUE]
"""

from coa_jax import evaluate
from experiments.launch import launch

if __name__ == "__main__":
  launch(evaluate.run)
