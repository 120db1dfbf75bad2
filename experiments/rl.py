"""Agentic RL.

python -m experiments.rl --config=configs/X.py --workdir=DIR [--config.FIELD=VALUE]
"""

from coa_jax import rl
from experiments.launch import launch

if __name__ == "__main__":
  launch(rl.run)
