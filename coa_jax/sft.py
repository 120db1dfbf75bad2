"""Supervised fine-tuning on Chain-of-Agents trajectories: the loss is on the policy.

Packed rows, one jitted step, exact resume: every batch is a function of (seed, step).
Tokens are stored on disk (`workdir/data`), so data may exceed memory.

budget: a stage is one page, from its config to its results.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import ml_collections
import numpy as np

from coa_jax.learner import log_probs
from coa_jax.learner.batch import Batch, fits
from coa_jax.learner.checkpoint import CheckpointConfig, Checkpoints
from coa_jax.learner.dataset import Dataset, Micro, check_ids
from coa_jax.learner.optim import OptimConfig, make_optimizer
from coa_jax.learner.sources import (
  Source,
  check_sources,
  mix,
  read_sources,
  validation_order,
)
from coa_jax.learner.state import Learner, SumLoss, init_state
from coa_jax.model import attention, flops, lora, sizes
from coa_jax.model.config import LoadConfig, ModelConfig
from coa_jax.model.hf.config import to_hf_config
from coa_jax.model.hf.folder import open_folder, save_run
from coa_jax.model.hf.io import load_model
from coa_jax.model.lora import LoraConfig
from coa_jax.model.sharding import (
  MeshConfig,
  Partitioner,
  count_devices,
  is_first_process,
  make_partitioner,
  process_dir,
)
from coa_jax.model.transformer import count_params, init_params
from coa_jax.model.variants import variant
from coa_jax.protocol import roles
from coa_jax.protocol.origin import Origin, dialects_of_data
from coa_jax.protocol.tokenizer_training import train_tokenizer
from coa_jax.protocol.tokens import Tokenizer
from coa_jax.protocol.trajectory import Author, Trajectory, iter_trajectories
from coa_jax.report.card import write_model_cards
from coa_jax.report.metrics import (
  METRICS_FILE,
  Metrics,
  read_metrics,
  resume_log,
  write_json,
)
from coa_jax.report.profiling import traced
from coa_jax.report.restarts import Goodput, say_what_changed
from coa_jax.report.timers import StepTimer, phase_seconds
from coa_jax.report.tracking import LogConfig
from coa_jax.runtime import capacity
from coa_jax.runtime.config import read_config
from coa_jax.runtime.fields import bounded, check_fields, section
from coa_jax.runtime.json_io import read_object
from coa_jax.runtime.lock import exclusive
from coa_jax.runtime.manifest import derive
from coa_jax.runtime.record import (
  hash_files,
  hash_json,
  prepare_workdir,
  read_begun,
  read_origin_of,
)

# Another mesh only changes the rounding of sums.
_MAY_CHANGE = ("log", "mesh")
_SOURCES = "sources.json"  # trajectories of each file, in the folder of tokens
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Config section `data` of SFT.

  Attributes:
    trajectories: the training data: a file of trajectories from `distill` or
      `import_traces`; or several, with globs and weights:
      "a.jsonl,runs/*.jsonl,b.jsonl=2" sees b.jsonl's twice in an epoch, and
      "c.jsonl=0.5" every other one of c.jsonl.
    steps: updates; 0 writes the initial model. A larger number extends a workdir's run
      if optim.schedule is constant.
    rows: rows per micro-batch.
    length: T, tokens per row; longer trajectories are left out and counted.
    micro_batches: micro-batches per update.
    validation: trajectories kept out of training for the validation loss.
    validate_every: updates between two validation losses; 0 for only one at the end.
    vocab_size: the vocabulary of the tokenizer trained on the trajectories, if `init`
      is empty.
    seed: of the order of the data and of fresh parameters.
  """

  trajectories: str
  steps: int = bounded(least=0)
  rows: int = bounded(16, least=1)
  length: int = bounded(256, least=1)
  micro_batches: int = bounded(1, least=1)
  validation: int = bounded(128, least=0)
  validate_every: int = bounded(50, least=0)
  vocab_size: int = 1344
  seed: int = bounded(0, least=0, below=2**32)

  def __post_init__(self):
    check_fields(self)


def read_model(
  model: Mapping[str, Any], config: Mapping[str, Any]
) -> LoadConfig | ModelConfig:
  """Reads section `model`: loading options of `init`, or an architecture without it.

  An architecture may begin with a published one: `variant` is a name in
  `variants.VARIANTS`. Its vocabulary is the tokenizer's, which comes later.

  Args:
    model: the section.
    config: the whole config, for its `init`.

  Raises:
    ConfigError, ValueError: it can not be used, or not be written in the end.
  """
  # --- A folder's own architecture, and its loading options.
  if config.get("init"):
    return read_config(model, LoadConfig, "model")

  # --- A published architecture, some of its fields changed; or one field by field.
  fields = {"vocab_size": 1}
  overrides = dict(model)
  name = overrides.pop("variant", "")
  if name:
    fields = dataclasses.asdict(variant(name))
  cfg = read_config(fields | overrides, ModelConfig, "model")
  to_hf_config(cfg)  # which refuses an unwritable architecture
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


@exclusive(process_dir)
def run(config: ml_collections.ConfigDict, workdir: str) -> dict[str, Any]:
  """Trains; writes `workdir/model` (a Hugging Face folder) and `results.json`.

  budget: a journey is one page.

  Args:
    config: as `SFTConfig` says.
    workdir: folder of all outputs; an interrupted run in it resumes. Several processes
      share it; all but the first log into their own folders. With other processes or
      devices than before every step takes the same rows; the rounding of sums may
      differ.

  Returns:
    The contents of `results.json`: parameters, losses, tokens per second, rows left
    out, and each file's contribution if there are several.

  Raises:
    ConfigError, ValueError, FileNotFoundError: before any training, naming the fault.
    ValueError: the loss is not finite; nothing is saved after that.
    Interrupted: SIGTERM or SIGINT came; the run's position is saved.
  """
  # --- Read the config, and claim the workdir.
  settings = read_config(config, SFTConfig)
  data = settings.data
  init = settings.init or ""
  lora_config = settings.lora
  partitioner = make_partitioner(settings.mesh)
  sources = read_sources(data.trajectories)
  num_rows = check_sources(sources)
  dialects = dialects_of_data(*(source.path for source in sources))
  own_dir = process_dir(workdir)
  inputs = {
    "data.trajectories": _hash(sources),
    "init": hash_files(init, samples=16),
  }
  prepare_workdir(
    settings,
    own_dir,
    may_change=_MAY_CHANGE,
    inputs=inputs,
    scratch_dirs=("tokenizer", "data"),
    may_grow={"data.steps": settings.optim.extension_fault},
    origin={
      "dialects": [dataclasses.asdict(each) for each in dialects],
      "max_len": data.length,
      "seed": data.seed,
    },
  )

  # --- Tokenize the data; it stays on disk.
  cfg, tokenizer = _architecture(settings, sources, own_dir, partitioner)
  dataset, num_of_source = _dataset(
    data, sources, tokenizer, cfg.vocab_size, own_dir, num_rows
  )
  train, validation, left_out = _divide(data, dataset, num_of_source)
  num_train = len(train)
  if len(sources) > 1 or sources[0].weight != 1:
    train, by_source = mix(sources, num_of_source, train)
    left_out["trajectories_by_source"] = by_source
    if own_dir == workdir:  # one process of several is enough
      _tell(by_source)

  # --- Load the model, or make a fresh one.
  if isinstance(settings.model, LoadConfig):
    _, params = load_model(init, settings.model, partitioner)
  else:
    params = init_params(cfg, data.seed, partitioner)

  # --- The learner: a jitted loss and an optimizer over the trained parameters.
  trained, frozen = lora.split(cfg, params, lora_config, data.seed, partitioner)
  loss = _loss(cfg, lora_config, partitioner)
  optimizer = make_optimizer(settings.optim, data.steps)
  offload = settings.optim.offload
  learner = Learner(loss, optimizer, partitioner, offload)
  mean_loss = functools.partial(_mean_loss, jax.jit(loss), partitioner)
  state = init_state(trained, optimizer, partitioner, offload)

  # --- Resume an interrupted run.
  folder = os.path.join(workdir, "checkpoints")
  with Checkpoints(folder, settings.checkpoint) as checkpoints:
    restored = checkpoints.restore(state)
    if restored:
      state, _ = restored
    first = int(state.step)
    devices = count_devices(partitioner)
    log = resume_log(own_dir, "sft", first, workdir)
    if is_first_process():
      say_what_changed(log, devices, jax.process_count())
    timer = StepTimer()
    # The place in the data is a number: micro-batch n is a function of (seed, n).
    stream = dataset.endless(
      train,
      size=data.rows,
      length=data.length,
      partitioner=partitioner,
      seed=data.seed,
      first=first * data.micro_batches,
    )
    # All but the first process log only into their own folders.
    tracked = settings.log if own_dir == workdir else None
    metrics = Metrics(own_dir, "sft", data.steps, tracked=tracked)
    with metrics, Goodput(log, read_begun(workdir), devices) as goodput:
      numbers = range(first + 1, data.steps + 1)
      for step in traced(numbers, settings.log.profile, "sft", own_dir):
        # --- Take the next micro-batches, prepared by a thread.
        micro = list(itertools.islice(stream, data.micro_batches))
        timer.lap("data")

        # --- Learn. The loss is a mean over the policy's tokens of all micro-batches.
        batches = [m.batch for m in micro]
        tokens = sum(m.policy for m in micro)
        state, values = learner.step(state, batches, tokens, frozen)
        # To read them waits for the device, so the lap below is the step's.
        values = {name: float(value) for name, value in values.items()}
        _check_finite(step, values)
        timer.lap("step")

        # --- Validate.
        is_last = step == data.steps
        is_due = data.validate_every and step % data.validate_every == 0
        if is_due or is_last:
          batches = dataset.once(
            validation, size=data.rows, length=data.length, partitioner=partitioner
          )
          values["validation_loss"] = mean_loss(state.params, frozen, batches)
          timer.lap("eval")

        # --- Log and save.
        values |= _speed(timer, cfg, lora_config, partitioner, micro)
        values |= goodput.after_step(values)
        metrics.log(step, values, f"loss {values['loss']:.3f}")
        checkpoints.reached(state, {}, is_last)
        timer.lap("save")

  # --- Write the model folder, and the run's results.
  origin = Origin.of_run(read_origin_of(own_dir), data.steps)
  params = save_run(
    workdir, cfg, state.params, frozen, lora_config, tokenizer, init, origin
  )
  results = {
    "steps": data.steps,
    "parameters": count_params(params),
    "parameters_trained": count_params(state.params),
    "trajectories": num_train,
    **left_out,
  }
  if data.steps:
    results |= _logged(own_dir)
  write_json(os.path.join(own_dir, "results.json"), results)
  if is_first_process():
    write_model_cards(workdir, own_dir, init, data.steps)
  return results


def _hash(sources: Sequence[Source]) -> str:
  """Returns a hash of the files' contents: a single file's own."""
  hashes = [hash_files(source.path) for source in sources]
  return hashes[0] if len(hashes) == 1 else hash_json(hashes)


def _check_finite(step: int, values: dict[str, float]) -> None:
  """Ends a run with nonfinite parameters, before they are saved."""
  bad = []
  for name in ("loss", "grad_norm"):
    if not math.isfinite(values[name]):
      bad.append(f"{name} is {values[name]}")
  if bad:
    raise ValueError(
      f"update {step}: {', '.join(bad)}; it is not saved, and the checkpoint before it "
      "stands. Lower optim.lr, set optim.clip_norm or compute in float32 "
      "(model.dtype), and begin in another workdir"
    )


def _dataset(
  data: DataConfig,
  sources: Sequence[Source],
  tokenizer: Tokenizer,
  vocab_size: int,
  workdir: str,
  rows: int,
) -> tuple[Dataset, list[int]]:
  """Returns the trajectories, N rows, as tokens; and the number in each file.

  An interrupted run has them already.
  """
  folder = os.path.join(workdir, "data")

  def make(unfinished: str) -> None:
    counts = [0] * len(sources)

    def encoded() -> Iterator[Trajectory]:
      for number, source in enumerate(sources):
        for trajectory in _encoded(source.path, tokenizer, vocab_size):
          counts[number] += 1
          yield trajectory

    with Metrics(workdir, "data", rows, unit="trajectory") as metrics:
      Dataset.write(unfinished, metrics.count(encoded()))
    write_json(os.path.join(unfinished, _SOURCES), {"trajectories": counts})

  derive(folder, make, data.trajectories)
  dataset = Dataset(folder)
  counts = [len(dataset)]  # an earlier version read one file and wrote nothing of it
  if os.path.exists(os.path.join(folder, _SOURCES)):
    counts = read_object(os.path.join(folder, _SOURCES))["trajectories"]
  return dataset, counts


def _tell(by_source: Mapping[str, Mapping[str, Any]]) -> None:
  """Prints each file's contribution."""
  for path, row in by_source.items():
    print(
      f"{path}: {row['trajectories']} trajectories, {row['to_train_on']} to train on, "
      f"weight {row['weight']:g}: {row['in_an_epoch']} in an epoch",
      file=sys.stderr,
      flush=True,
    )


def _encoded(path: str, tokenizer: Tokenizer, vocab_size: int) -> Iterator[Trajectory]:
  """Yields the file's, with ids and an end; ids that they had are checked."""
  number = 0
  trajectories = iter(iter_trajectories(path))
  # A tokenizer likes many at once.
  while chunk := list(itertools.islice(trajectories, 16)):
    for trajectory in chunk:
      number += 1
      try:
        check_ids(trajectory, vocab_size)
        tokenizer.check_ids(trajectory)
      except ValueError as e:
        raise ValueError(f"{path}: trajectory {number}: {e}") from e
    tokenizer.encode_trajectories(chunk)
    for trajectory in chunk:
      _end(trajectory, tokenizer)
      yield trajectory


def _end(trajectory: Trajectory, tokenizer: Tokenizer) -> None:
  """Ends a closed answer with end-of-text, unless its tag is a token of its own.

  Our sampler stops at `</answer>` however it is spelt. Other engines stop at a token,
  so the model must learn it.
  """
  if not trajectory.segments or tokenizer.end_id is None:
    return
  last = trajectory.segments[-1]
  if last.author != Author.POLICY:
    return
  closed = last.text.endswith(roles.close_tag(roles.ANSWER))
  if closed and last.ids[-1] != tokenizer.end_id:
    last.ids = [*last.ids, tokenizer.end_id]


def _divide(
  data: DataConfig, dataset: Dataset, num_of_source: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
  """Returns training and validation sequences, and the left out ones with reasons.

  Raises:
    ValueError: none is left to train on.
  """
  # --- Held out for validation: the first trainable ones.
  lengths_N = dataset.lengths_N
  if not len(dataset):
    raise ValueError(f"{data.trajectories}: there is no trajectory in it")
  fit_N = fits(lengths_N, data.length)
  # Without any token of the policy, an update has no mean loss.
  usable = np.flatnonzero(fit_N & (dataset.policy_N > 0))
  order = validation_order(num_of_source)  # of several files, the same share of each
  validation = order[np.isin(order, usable)][: data.validation]

  # --- The others train, except those with a held-out task. Filters may have written a
  # trajectory twice; training on its copy would leak it.
  tasks = dataset.task_N
  train = usable[~np.isin(tasks[usable], tasks[validation])]

  # --- Report the left out ones; nothing left is an error.
  fit = int(fit_N.sum())
  if not len(train):
    advice = ""
    if not fit:
      advice = "; raise data.length"
    raise ValueError(
      f"{data.trajectories}: no trajectory is left to train on: {len(dataset)} read, "
      f"{fit} within data.length={data.length} tokens, {len(usable)} of them with "
      f"tokens of the policy, {len(validation)} kept for validation (data.validation="
      f"{data.validation}); the shortest has {lengths_N.min()} tokens, half have at "
      f"most {int(np.median(lengths_N))}, the longest {lengths_N.max()}{advice}"
    )
  if fit < len(dataset):
    _log.warning(
      "%d of %d trajectories are longer than data.length=%d and left out; the longest "
      "has %d tokens",
      len(dataset) - fit,
      len(dataset),
      data.length,
      lengths_N.max(),
    )
  left_out = {
    "left_out_too_long": len(dataset) - fit,
    "left_out_without_policy": fit - len(usable),
  }
  return train, validation, left_out


def _speed(
  timer: StepTimer,
  cfg: ModelConfig,
  lora_config: LoraConfig | None,
  partitioner: Partitioner | None,
  micro: list[Micro],
) -> dict[str, float]:
  """The step's tokens, its seconds by phase, tokens per second, and `mfu`."""
  lengths: list[int] = []
  for m in micro:
    lengths += m.lengths
  tokens = sum(lengths)
  out = {"tokens": tokens, **timer.flush(step=tokens)}
  return out | flops.utilisation(
    cfg,
    lengths,
    out["seconds_step"],
    lora_config is not None,
    partitioner.mesh.size if partitioner else 1,
  )


def _logged(workdir: str) -> dict[str, Any]:
  """The last figures of the run's log, tokens per second, and seconds by phase."""
  log = read_metrics(os.path.join(workdir, METRICS_FILE), "sft")
  last = {k: log[-1].get(k) for k in ("loss", "validation_loss", "seconds", "goodput")}
  rate = sum(r["tokens"] for r in log) / last["seconds"]
  return {"tokens_per_second": rate, **last, **phase_seconds(log)}


def _loss(
  cfg: ModelConfig, lora_config: LoraConfig | None, partitioner: Partitioner | None
) -> SumLoss:
  def loss(
    trained: Any, frozen: Any, batch: Batch
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    params = lora.assemble(trained, frozen, lora_config)
    return log_probs.cross_entropy(cfg, params, batch, partitioner), {}

  return loss


def with_vocabulary(cfg: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
  """Returns the whole architecture of a model trained from scratch.

  Rounded up, so that the embedding splits over any usual number of devices.
  """
  return dataclasses.replace(cfg, vocab_size=-(-tokenizer.vocab_size // 64) * 64)


def _architecture(
  settings: SFTConfig,
  sources: Sequence[Source],
  workdir: str,
  partitioner: Partitioner | None,
) -> tuple[ModelConfig, Tokenizer]:
  """Of the model to start from, and its tokenizer; they fit together and the mesh."""
  # --- The folder's own; or a tokenizer of the data, and as many rows as it has ids.
  data = settings.data
  if isinstance(settings.model, LoadConfig):
    cfg, tokenizer = open_folder(settings.init, settings.model)
    _check_sizes(cfg, settings, partitioner)
  else:
    # Before a tokenizer is trained: with the vocabulary that it may come to.
    largest = dataclasses.replace(settings.model, vocab_size=data.vocab_size)
    _check_sizes(largest, settings, partitioner)
    folder = os.path.join(workdir, "tokenizer")

    def train(unfinished: str) -> None:
      texts = itertools.chain(*(_texts(source.path) for source in sources))
      train_tokenizer(texts, data.vocab_size).save(unfinished)

    derive(folder, train, data.trajectories)
    tokenizer = Tokenizer.load(folder)
    cfg = with_vocabulary(settings.model, tokenizer)

  # --- The two fit together, the mesh and the kernel.
  if tokenizer.vocab_size > cfg.vocab_size:
    raise ValueError(
      f"the tokenizer has {tokenizer.vocab_size} ids, the model's embedding "
      f"{cfg.vocab_size} rows; the folder's config.json and tokenizer.json differ"
    )
  if partitioner:
    partitioner.check({**cfg.axes, "B": data.rows, "T": data.length}, "data")
  attention.check(cfg, partitioner, data.length)
  return cfg, tokenizer


def _texts(path: str) -> Iterator[str]:
  """The texts of all segments of a file of trajectories."""
  for trajectory in iter_trajectories(path):
    for segment in trajectory.segments:
      yield segment.text


def _check_sizes(
  cfg: ModelConfig, settings: SFTConfig, partitioner: Partitioner | None
) -> None:
  """Refuses data and models larger than the memory."""
  data = settings.data
  adapts = settings.lora is not None
  sizes.check_training(cfg, "data", data.rows, data.length, adapts, partitioner)
  # The host makes all micro-batches of an update before the first is used.
  tokens = data.micro_batches * data.rows * data.length
  fields = f"data.micro_batches={data.micro_batches} of data.rows={data.rows}"
  capacity.check_host({fields: tokens * sizes.TOKEN})
  lora.check(cfg, settings.lora)


def _mean_loss(
  loss: Any,
  partitioner: Partitioner | None,
  trained: Any,
  frozen: Any,
  validation: Iterable[Micro],
) -> float:
  """Mean negative log-likelihood of held-out policy tokens, in nats."""
  # Sums and one division, as in training: no packing changes the mean.
  total = 0.0
  tokens = 0.0
  for micro in validation:
    batch = micro.batch
    if partitioner:
      batch = partitioner.put(batch)
    nll, _ = loss(trained, frozen, batch)
    total += float(nll)
    tokens += micro.policy
  if not tokens:
    return float("nan")
  return total / tokens
