"""Serves a model and its tools, from their evaluation's config.

Model, tools, prompts, limits and sampling distribution are the evaluation's. A config
with vLLM is refused: the sampler in JAX serves.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import ml_collections

from coa_jax.model.config import LoadConfig
from coa_jax.model.hf.folder import load_tokenizer
from coa_jax.model.hf.io import load_config, load_params
from coa_jax.model.sharding import MeshConfig, make_partitioner
from coa_jax.protocol.origin import read_origin, warn_if_other
from coa_jax.rollout.agents.recording import Recorder
from coa_jax.rollout.setup import make_worker
from coa_jax.rollout.streaming import InferenceServer
from coa_jax.rollout.types import RolloutConfig, check_positions
from coa_jax.rollout.worker import RolloutWorker
from coa_jax.runtime.config import read_config
from coa_jax.runtime.fields import section
from coa_jax.tools.toolbox import Toolbox, ToolsConfig
from coa_jax.tools.unread import warn_unread


def read_rollout(
  rollout: Mapping[str, Any], config: Mapping[str, Any]
) -> RolloutConfig:
  """Reads section `rollout`; missing fields take the model's training values.

  These are variant, style and max_len, if the model folder records them (see
  `protocol.origin`). With several dialects the first one counts.

  Raises:
    ConfigError, ValueError: the section can not be used, or the record is damaged.
  """
  values = _without_none(rollout)
  init = config.get("init")
  origin = None
  if init and isinstance(init, str):
    origin = read_origin(init)
  if origin:
    values.setdefault("max_len", origin.max_len)
    for dialect in origin.dialects[:1]:
      values.setdefault("variant", dialect.variant)
      values.setdefault("style", dialect.style)
  return read_config(values, RolloutConfig, "rollout")


def _without_none(section: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a section without fields that are None, its own sections' included."""
  out = {}
  for name, value in section.items():
    if isinstance(value, Mapping | ml_collections.ConfigDict):
      value = _without_none(value)
    if value is not None:
      out[name] = value
  return out


@dataclasses.dataclass(frozen=True)
class ServeConfig:
  """Config of a server: an evaluation's sections about the model and its tools.

  Attributes:
    init: a model folder.
    model: loading options.
    mesh: use of the devices.
    rollout: options of playing a question; variant, style and max_len are the model's
      training values if left out.
    tools: the model's tools.
    vllm: must be empty: the sampler in JAX serves.
    agent, tasks, reward, eval: the evaluation's; not read.
  """

  init: str
  model: LoadConfig = section(LoadConfig)
  mesh: MeshConfig = section(MeshConfig)
  rollout: RolloutConfig = dataclasses.field(
    default_factory=RolloutConfig, metadata={"read": read_rollout}
  )
  tools: ToolsConfig = section(ToolsConfig)
  agent: Any = None
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
  """Serves an evaluation's model and tools inside a `with` block.

  Yields:
    The server; its threads, its tools' threads and their processes end with the block.

  Raises:
    ConfigError, ValueError, FileNotFoundError: naming the fault in the config, the
      model or the corpus.
  """
  settings = read_config(config, ServeConfig)
  worker, params = _load(settings)
  warn_unread(settings.tools)
  # --- The server ends first, then its tools.
  with (
    Toolbox(settings.tools) as toolbox,
    worker,
    InferenceServer(worker, params, toolbox, max_waiting) as server,
  ):
    yield server


@contextlib.contextmanager
def open_recorder(
  config: ml_collections.ConfigDict, conversations: str, folder: str | None
) -> Iterator[Recorder]:
  """Serves an evaluation's model to agents inside a `with` block.

  Args:
    conversations: `chat` or `team`, see `AgentConfig.format`.
    folder: where ended trajectories are written; None for nowhere.

  Yields:
    The server's sessions.

  Raises:
    ConfigError, ValueError, FileNotFoundError: naming the fault in the config or the
      model.
  """
  worker, params = _load(read_config(config, ServeConfig), conversations)
  with worker, Recorder(worker, folder) as recorder:
    worker.engine.set_policy(params, 0)
    yield recorder


def _load(settings: ServeConfig, conversations: str = "") -> tuple[RolloutWorker, Any]:
  # Faults are refused before the weights are read.
  partitioner = make_partitioner(settings.mesh, rollout_tensor=settings.rollout.tensor)
  cfg = load_config(settings.init, settings.model)
  tokenizer = load_tokenizer(settings.init, cfg)
  check_positions(settings.rollout, cfg, settings.init)
  worker = make_worker(
    cfg,
    tokenizer,
    settings.rollout,
    settings.tools.tool_descriptions,
    partitioner=partitioner.decoding(settings.rollout.tensor),
    own_top_p=True,
    parallel_calls=settings.tools.parallel,
    conversations=conversations,
  )
  if conversations != "chat":
    dialect = worker.episode_config
    warn_if_other(settings.init, dialect.variant, dialect.style)
  return worker, load_params(settings.init, cfg, partitioner)
