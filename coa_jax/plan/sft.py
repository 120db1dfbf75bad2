"""The plan of an SFT run: its config, mesh, architecture and checks.

A plan allocates nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from coa_jax.learner.batch import Batch
from coa_jax.learner.checkpoint import CheckpointConfig
from coa_jax.learner.cross_entropy import cross_entropy
from coa_jax.learner.optim import OptimConfig, make_optimizer
from coa_jax.learner.state import Learner, SumLoss
from coa_jax.model import attention, lora, memory
from coa_jax.model.config import LoadConfig, ModelConfig
from coa_jax.model.hf.config import to_hf_config
from coa_jax.model.hf.io import load_config
from coa_jax.model.lora import LoraConfig
from coa_jax.model.sharding import MeshConfig, Partitioner, make_partitioner
from coa_jax.model.variants import variant
from coa_jax.protocol.contexts import ContextConfig
from coa_jax.protocol.tokens import Tokenizer
from coa_jax.report.tracking import LogConfig
from coa_jax.runtime import capacity
from coa_jax.runtime.config import read_config
from coa_jax.runtime.fields import bounded, check_fields, section


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Config section `data` of SFT.

  Attributes:
    trajectories: the training data: a file of trajectories from `distill` or
      `import_traces`; or several, with globs and weights:
      "a.jsonl,runs/*.jsonl,b.jsonl=2" sees b.jsonl's trajectories twice per epoch, and
      "c.jsonl=0.5" every other trajectory of c.jsonl.
    steps: updates; 0 writes the initial model. A larger number extends a workdir's run
      if optim.schedule is constant.
    rows: rows per micro-batch.
    length: T, tokens per row; longer trajectories are left out and counted.
    context: splits longer trajectories into several contexts, as rollouts do.
    micro_batches: micro-batches per update.
    validation: trajectories kept out of training for the validation loss.
    validate_every: updates between two validation losses; 0 for only one at the end.
    vocab_size: vocabulary of the tokenizer trained on the trajectories, if `init` is
      empty.
    seed: for the data order and fresh parameters.
  """

  trajectories: str
  steps: int = bounded(least=0)
  rows: int = bounded(16, least=1)
  length: int = bounded(256, least=1)
  context: ContextConfig = section(ContextConfig)
  micro_batches: int = bounded(1, least=1)
  validation: int = bounded(128, least=0)
  validate_every: int = bounded(50, least=0)
  vocab_size: int = 1344
  seed: int = bounded(0, least=0, below=2**32)

  def __post_init__(self):
    check_fields(self)
    self.context.check(self.length, "length")


def read_model(
  model: Mapping[str, Any], config: Mapping[str, Any]
) -> LoadConfig | ModelConfig:
  """Reads section `model`: loading options for `init`; without `init` an architecture.

  An architecture may begin with a published one: `variant` is a name in
  `variants.VARIANTS`. Its vocabulary is the tokenizer's, which comes later.

  Raises:
    ConfigError, ValueError: the section can not be used, or its model not be written.
  """
  # --- The folder has the architecture; the section has loading options.
  if config.get("init"):
    return read_config(model, LoadConfig, "model")

  # --- A published architecture, with some fields changed; or all fields given.
  fields = {"vocab_size": 1}
  overrides = dict(model)
  name = overrides.pop("variant", "")
  if name:
    fields = dataclasses.asdict(variant(name))
  cfg = read_config(fields | overrides, ModelConfig, "model")
  to_hf_config(cfg)  # refuses an unwritable architecture
  return cfg


@dataclasses.dataclass(frozen=True)
class SFTConfig:
  """Config of SFT: its sections.

  Attributes:
    data: the training data.
    init: a model folder to start from, or empty for fresh parameters and a tokenizer
      trained on the data.
    model: see `read_model`.
    lora: adapters: `workdir/adapter` holds them in peft's format, and `workdir/model`
      the model with them merged. None trains the whole model.
    mesh: use of the devices.
    optim: the optimizer.
    checkpoint: schedule of saving the state.
    log: other destinations of metrics.
  """

  data: DataConfig
  init: str | None = ""
  model: LoadConfig | ModelConfig = dataclasses.field(
    default_factory=LoadConfig, metadata={"read": read_model}
  )
  lora: LoraConfig | None = None
  mesh: MeshConfig = section(MeshConfig)
  optim: OptimConfig = section(OptimConfig)
  checkpoint: CheckpointConfig = section(CheckpointConfig)
  log: LogConfig = section(LogConfig)


@dataclasses.dataclass(frozen=True)
class SFTPlan:
  """An SFT run's mesh and architecture.

  Attributes:
    settings: the run's config.
    cfg: the architecture; a fresh model has `data.vocab_size` ids until `fitted`.
    partitioner: the learner's mesh.
  """

  settings: SFTConfig
  cfg: ModelConfig
  partitioner: Partitioner

  def fitted(self, tokenizer: Tokenizer) -> SFTPlan:
    """Returns the plan with the tokenizer's vocabulary.

    Raises:
      ValueError: the mesh does not divide the model or the batch.
    """
    cfg = self.cfg
    if isinstance(self.settings.model, ModelConfig):
      cfg = with_vocabulary(cfg, tokenizer)
    data = self.settings.data
    self.partitioner.check({**cfg.axes, "B": data.rows, "T": data.length}, "data")
    return dataclasses.replace(self, cfg=cfg)

  def make_learner(self) -> tuple[Learner, SumLoss]:
    """Builds the learner, and its loss alone for validation."""
    cfg = self.cfg
    optim = self.settings.optim
    lora_config = self.settings.lora

    def loss(trained: Any, frozen: Any, batch: Batch) -> tuple[Any, dict[str, Any]]:
      params = lora.assemble(trained, frozen, lora_config)
      return cross_entropy(cfg, params, batch, self.partitioner), {}

    optimizer = make_optimizer(optim, self.settings.data.steps)
    return Learner(loss, optimizer, self.partitioner, optim.offload), loss


def plan_sft(settings: SFTConfig) -> SFTPlan:
  """Plans a run, and refuses one that can not work.

  Raises:
    ValueError, FileNotFoundError: the config does not fit the model, the devices or the
      memory.
  """
  data = settings.data
  partitioner = make_partitioner(settings.mesh)
  if isinstance(settings.model, LoadConfig):
    cfg = load_config(settings.init or "", settings.model)
  else:
    # No tokenizer is trained yet: plan for its largest vocabulary.
    cfg = dataclasses.replace(settings.model, vocab_size=data.vocab_size)
  lora.check(cfg, settings.lora)
  attention.check(cfg, partitioner, data.length)
  adapts = settings.lora is not None
  memory.check_training(cfg, "data", data.rows, data.length, adapts, partitioner)
  # The host makes all of an update's micro-batches before the first is used.
  tokens = data.micro_batches * data.rows * data.length
  fields = f"data.micro_batches={data.micro_batches} of data.rows={data.rows}"
  capacity.check_host({fields: tokens * memory.TOKEN})
  return SFTPlan(settings, cfg, partitioner)


def with_vocabulary(cfg: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
  """Returns a fresh model's architecture with the tokenizer's vocabulary.

  Rounded up, so that the embedding splits over any usual number of devices.
  """
  return dataclasses.replace(cfg, vocab_size=-(-tokenizer.vocab_size // 64) * 64)
