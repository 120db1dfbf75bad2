"""Multi-agent distillation.

python -m experiments.distill --config=configs/X.py --workdir=DIR [--config.FIELD=VALUE]
  [--shard=I/N]

The API key of a chat backend's endpoint, if it wants one, is read from COA_API_KEY.
"""

import os
from typing import Any

import ml_collections

from coa_jax import distill
from coa_jax.shard import Shard
from coa_jax.teacher.backend import InfrastructureError, RefusedError
from experiments.launch import launch, stop


def run(
  config: ml_collections.ConfigDict, workdir: str, shard: Shard | None = None
) -> dict[str, Any]:
  """The journey with the key; a service that fails ends it with one line."""
  try:
    return distill.run(config, workdir, os.environ.get("COA_API_KEY"), shard)
  except (InfrastructureError, RefusedError) as e:
    stop(str(e))


if __name__ == "__main__":
  launch(run, distill.DistillConfig, logs=distill.LOGS)
