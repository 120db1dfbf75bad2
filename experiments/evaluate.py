"""Evaluation: one journey, from one config file.

  python -m experiments.evaluate --config=configs/X.py --workdir=DIR

Any field can be overridden: --config.SECTION.FIELD=VALUE.
"""

from coa_jax import evaluate
from experiments.launch import launch

if __name__ == "__main__":
  launch(evaluate.run, evaluate.EvaluateConfig)
