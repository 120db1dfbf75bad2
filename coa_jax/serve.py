"""A model and its tools, open for questions, from the config of their evaluation.

Model, tools, prompts, limits and distribution are those that are evaluated. An
evaluation over vLLM is refused: the sampler in JAX serves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import ml_collections

from coa_jax.config import ConfigError, check_sections, section
from coa_jax.model.config import LoadConfig
from coa_jax.model.hf.folder import open_folder
from coa_jax.model.hf.io import load_model
from coa_jax.model.sharding import MeshConfig, make_partitioner
from coa_jax.rollout.streaming import InferenceServer
from coa_jax.rollout.types import RolloutConfig, check_positions
from coa_jax.rollout.worker import RolloutWorker
from coa_jax.tools.toolbox import Toolbox, ToolsConfig

SECTIONS = ("init", "model", "mesh", "rollout", "tools")
# Sections of an evaluation that say nothing about the model or its tools.
IGNORED = ("tasks", "reward", "eval")
# Those that do, and why they can not be served.
REFUSED = {
  "vllm": "the sampler in JAX serves, vLLM can not; leave the section out",
}


@contextlib.contextmanager
def open_server(
  config: ml_collections.ConfigDict, max_waiting: int = 64
) -> Iterator[InferenceServer]:
  """Opens an evaluation's model and tools for questions, for a `with` block.

  Args:
    config: sections `SECTIONS`; those of `IGNORED` are not looked at, those of
      `REFUSED` must be empty. `init` is a model folder.
    max_waiting: questions that may wait for a slot.

  Yields:
    The server; its threads, its tools' threads and their processes end with the block.

  Raises:
    ConfigError, ValueError, FileNotFoundError: naming what is wrong with the config,
      the model or the corpus.
  """
  check_sections(config, (*SECTIONS, *IGNORED, *REFUSED), needed=("init",))
  for name, why in REFUSED.items():
    if config.get(name):
      raise ConfigError(f"config section {name!r}: {why}")
  tools = section(config, "tools", ToolsConfig)
  rollout = section(config, "rollout", RolloutConfig)
  load = section(config, "model", LoadConfig)
  partitioner = make_partitioner(section(config, "mesh", MeshConfig))
  cfg, tokenizer = open_folder(config.init, load)
  check_positions(rollout, cfg, config.init)
  worker = RolloutWorker(cfg, tokenizer, rollout, tools.tool_descriptions, partitioner)
  _, params = load_model(config.init, load, partitioner)
  with (
    Toolbox(tools) as toolbox,
    worker,
    InferenceServer(worker, params, toolbox, max_waiting) as server,
  ):
    yield server
