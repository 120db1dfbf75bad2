"""A model and its tools, open for questions, from the config of their evaluation.

Model, tools, prompts, limits and distribution are those that are evaluated. An
evaluation over vLLM is refused: the sampler in JAX serves.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import ml_collections

from coa_jax.config import read_config
from coa_jax.fields import section
from coa_jax.model.config import LoadConfig
from coa_jax.model.hf.folder import open_folder
from coa_jax.model.hf.io import load_model
from coa_jax.model.sharding import MeshConfig, make_partitioner
from coa_jax.rollout.setup import make_worker
from coa_jax.rollout.streaming import InferenceServer
from coa_jax.rollout.types import RolloutConfig, check_positions
from coa_jax.tools.toolbox import Toolbox, ToolsConfig


@dataclasses.dataclass(frozen=True)
class ServeConfig:
  """Config of a server: an evaluation's sections about the model and its tools.

  Attributes:
    init: a model folder.
    model: how it is loaded.
    mesh: how the devices are used.
    rollout: how a question is played.
    tools: what answers the calls.
    vllm: must be empty: the sampler in JAX serves.
    tasks, reward, eval: of the evaluation; not read.
  """

  init: str
  model: LoadConfig = section(LoadConfig)
  mesh: MeshConfig = section(MeshConfig)
  rollout: RolloutConfig = section(RolloutConfig)
  tools: ToolsConfig = section(ToolsConfig)
  vllm: Any = None
  tasks: Any = None
  reward: Any = None
  eval: Any = None

  def __post_init__(self):
    if not self.init:
      raise ValueError("config lacks field 'init'")
    if self.vllm:
      raise ValueError(
        "config section 'vllm': the sampler in JAX serves, vLLM can not; leave the "
        "section out"
      )


@contextlib.contextmanager
def open_server(
  config: ml_collections.ConfigDict, max_waiting: int = 64
) -> Iterator[InferenceServer]:
  """Opens an evaluation's model and tools for questions, for a `with` block.

  Args:
    config: as `ServeConfig` says.
    max_waiting: questions that may wait for a slot.

  Yields:
    The server; its threads, its tools' threads and their processes end with the block.

  Raises:
    ConfigError, ValueError, FileNotFoundError: naming what is wrong with the config,
      the model or the corpus.
  """
  settings = read_config(config, ServeConfig)
  partitioner = make_partitioner(settings.mesh)
  cfg, tokenizer = open_folder(settings.init, settings.model)
  check_positions(settings.rollout, cfg, settings.init)
  worker = make_worker(
    cfg,
    tokenizer,
    settings.rollout,
    settings.tools.tool_descriptions,
    partitioner=partitioner,
  )
  _, params = load_model(settings.init, settings.model, partitioner)
  with (
    Toolbox(settings.tools) as toolbox,
    worker,
    InferenceServer(worker, params, toolbox, max_waiting) as server,
  ):
    yield server
