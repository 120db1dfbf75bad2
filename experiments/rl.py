"""Agentic RL: one journey, from one config file.

  python -m experiments.rl --config=configs/X.py --workdir=DIR

Any field can be overridden: --config.SECTION.FIELD=VALUE.
"""

from coa_jax import rl
from experiments.launch import launch

if __name__ == "__main__":
  launch(rl.run, rl.RLConfig)
