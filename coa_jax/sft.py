"""Supervised fine-tuning on the policy tokens of Chain-of-Agents trajectories.

Packed rows, one jitted step, exact resume: every batch depends only on (seed, step).
Tokens are stored on disk (`workdir/data`), so data may exceed memory.

budget: a stage is one page, from its config to its results.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import ml_collections
import numpy as np

from coa_jax.learner.batch import fits
from coa_jax.learner.checkpoint import Checkpoints
from coa_jax.learner.compaction import compacted
from coa_jax.learner.dataset import Dataset, Micro, check_ids
from coa_jax.learner.sources import (
  Source,
  check_sources,
  mix,
  read_sources,
  validation_order,
)
from coa_jax.learner.state import Learner, TrainState
from coa_jax.model import flops, lora
from coa_jax.model.config import LoadConfig
from coa_jax.model.hf.folder import load_tokenizer, save_run
from coa_jax.model.hf.io import load_params
from coa_jax.model.sharding import Partitioner, count_devices
from coa_jax.model.transformer import count_params, init_params
from coa_jax.plan.sft import DataConfig, SFTConfig, SFTPlan, plan_sft
from coa_jax.protocol import roles
from coa_jax.protocol.contexts import ContextConfig
from coa_jax.protocol.origin import Origin, dialects_of_data
from coa_jax.protocol.storage import count_rows
from coa_jax.protocol.tokenizer_training import train_tokenizer
from coa_jax.protocol.tokens import Tokenizer
from coa_jax.protocol.trajectory import Author, Trajectory, iter_trajectories
from coa_jax.report.card import write_model_cards
from coa_jax.report.metrics import (
  Metrics,
  read_metrics,
  resume_log,
  say,
  write_json,
)
from coa_jax.report.profiling import traced
from coa_jax.report.restarts import Goodput, say_what_changed
from coa_jax.report.timers import StepTimer, phase_seconds
from coa_jax.runtime.config import read_config
from coa_jax.runtime.json_io import read_object
from coa_jax.runtime.lock import exclusive
from coa_jax.runtime.manifest import derive
from coa_jax.runtime.processes import is_first_process, process_dir
from coa_jax.runtime.record import (
  hash_files,
  hash_json,
  prepare_workdir,
  read_begun,
  read_origin_of,
)

# Another mesh only changes the rounding of sums.
_MAY_CHANGE = ("log", "mesh")
_SOURCES = "sources.json"  # trajectories per file, in the token folder
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Data:
  """A run's sequences of tokens.

  Attributes:
    dataset: all sequences, on disk.
    train: numbers of the training sequences, in the sources' mix.
    validation: numbers of the held-out sequences.
    counts: trajectories trained on, and left out by reason, for `results.json`.
  """

  dataset: Dataset
  train: np.ndarray
  validation: np.ndarray
  counts: dict[str, Any]


@dataclasses.dataclass
class _Session:
  """An open run: its records and resources.

  Attributes:
    frozen: the untrained parameters.
    stream: endless micro-batches, from this start's first step.
    validate: returns the held-out loss for trained and frozen parameters.
  """

  learner: Learner
  state: TrainState
  frozen: Any
  stream: Iterator[Micro]
  validate: Callable[[Any, Any], float]
  checkpoints: Checkpoints
  metrics: Metrics
  goodput: Goodput
  timer: StepTimer


@exclusive(process_dir)
def run(config: ml_collections.ConfigDict, workdir: str) -> dict[str, Any]:
  """Trains; writes `workdir/model` (a Hugging Face folder) and `results.json`.

  budget: a stage is one page.

  Args:
    config: as `SFTConfig` says.
    workdir: the output folder. An interrupted run resumes there. Several processes
      share the folder; all but the first log into their own folders. With other
      processes or devices than before, every step takes the same rows; the rounding of
      sums may differ.

  Returns:
    The contents of `results.json`: parameters, losses, tokens per second, trajectories
    left out, and each file's contribution if there are several.

  Raises:
    ConfigError, ValueError, FileNotFoundError: before any training, naming the fault.
    ValueError: the loss is not finite; nothing is saved after that.
    Interrupted: SIGTERM or SIGINT came; the run's position is saved.
  """
  # --- Plan: read the config and the sources, refuse faults, and claim the workdir.
  settings = read_config(config, SFTConfig)
  steps = settings.data.steps
  init = settings.init or ""
  plan = plan_sft(settings)
  tokenizer = None
  if isinstance(settings.model, LoadConfig):
    tokenizer = load_tokenizer(init, plan.cfg)
    plan = plan.fitted(tokenizer)
  sources = read_sources(settings.data.trajectories)
  check_sources(sources)
  own_dir = process_dir(workdir)
  _claim(settings, sources, own_dir)

  # --- Tokenize the data; it stays on disk.
  if tokenizer is None:
    tokenizer = _trained_tokenizer(settings.data, sources, own_dir)
    plan = plan.fitted(tokenizer)
  data = _read_data(plan, sources, tokenizer, workdir)

  with _open(plan, data, workdir) as s:
    numbers = range(int(s.state.step) + 1, steps + 1)
    for step in traced(numbers, settings.log.profile, "sft", own_dir):
      # --- Take the next micro-batches, prepared by a thread.
      micro = list(itertools.islice(s.stream, settings.data.micro_batches))
      s.timer.lap("data")

      # --- Learn. The loss is a mean over all micro-batches' policy tokens.
      batches = [m.batch for m in micro]
      tokens = sum(m.policy for m in micro)
      s.state, values = s.learner.step(s.state, batches, tokens, s.frozen)
      # Reading values waits for the device, so the lap below times the step.
      values = {name: float(value) for name, value in values.items()}
      _check_finite(step, values)
      s.timer.lap("step")

      # --- Validate.
      every = settings.data.validate_every
      if (every and step % every == 0) or step == steps:
        values["validation_loss"] = s.validate(s.state.params, s.frozen)
        s.timer.lap("eval")

      # --- Log and save.
      values |= _speed(s.timer, plan, micro)
      values |= s.goodput.after_step(values)
      s.metrics.log(step, values, f"loss {values['loss']:.3f}")
      s.checkpoints.reached(s.state, {}, step == steps)
      s.timer.lap("save")

  # --- Write the model folder, and the run's results.
  params = save_run(
    workdir,
    plan.cfg,
    s.state.params,
    s.frozen,
    settings.lora,
    tokenizer,
    init,
    Origin.of_run(read_origin_of(own_dir), steps),
  )
  results = {
    "steps": steps,
    "parameters": count_params(params),
    "parameters_trained": count_params(s.state.params),
    **data.counts,
  }
  if steps:
    results |= _logged(own_dir)
  write_json(os.path.join(own_dir, "results.json"), results)
  if is_first_process():
    write_model_cards(workdir, own_dir, init, steps)
  return results


def _read_data(
  plan: SFTPlan,
  sources: Sequence[Source],
  tokenizer: Tokenizer,
  workdir: str,
) -> _Data:
  """Tokenizes the sources, and divides and mixes their sequences."""
  data = plan.settings.data
  own_dir = process_dir(workdir)
  dataset, num_of_source = _dataset(
    data, sources, tokenizer, plan.cfg.vocab_size, own_dir
  )
  train, validation, left_out = _divide(data, dataset, num_of_source)
  counts = {"trajectories": len(train), **left_out}
  if len(sources) > 1 or sources[0].weight != 1:
    train, by_source = mix(sources, num_of_source, train)
    counts["trajectories_by_source"] = by_source
    if own_dir == workdir:  # one process of several is enough
      _tell(by_source)
  return _Data(dataset, train, validation, counts)


@contextlib.contextmanager
def _open(plan: SFTPlan, data: _Data, workdir: str) -> Iterator[_Session]:
  """Loads the model, opens the run's resources, and resumes an interrupted run."""
  settings = plan.settings
  seed = settings.data.seed
  own_dir = process_dir(workdir)

  # --- The model, or a fresh one.
  if isinstance(settings.model, LoadConfig):
    params = load_params(settings.init or "", plan.cfg, plan.partitioner)
  else:
    params = init_params(plan.cfg, seed, plan.partitioner)

  # --- The learner: a jitted loss and an optimizer over the trained parameters.
  trained, frozen = lora.split(plan.cfg, params, settings.lora, seed, plan.partitioner)
  learner, loss = plan.make_learner()
  state = learner.init(trained)
  del params, trained  # the state has copies
  rows = dict(
    size=settings.data.rows,
    length=settings.data.length,
    partitioner=plan.partitioner,
  )
  jitted = jax.jit(loss)

  def validate(trained: Any, frozen: Any) -> float:
    micro = data.dataset.once(data.validation, **rows)
    return _mean_loss(jitted, plan.partitioner, trained, frozen, micro)

  # --- Resume.
  folder = os.path.join(workdir, "checkpoints")
  with Checkpoints(folder, settings.checkpoint) as checkpoints:
    state, _ = checkpoints.restore(state) or (state, {})
    first = int(state.step)
    devices = count_devices(plan.partitioner)
    log = resume_log(own_dir, "sft", first, workdir)
    if is_first_process():
      say_what_changed(log, devices, jax.process_count())

    # --- The data's stream: micro-batch n depends only on (seed, n).
    first_micro = first * settings.data.micro_batches
    stream = data.dataset.endless(data.train, seed=seed, first=first_micro, **rows)

    # --- The records. All but the first process log only into their own folders.
    tracked = settings.log if own_dir == workdir else None
    metrics = Metrics(own_dir, "sft", settings.data.steps, tracked=tracked)
    goodput = Goodput(log, read_begun(workdir), devices)
    with metrics, goodput:
      yield _Session(
        learner=learner,
        state=state,
        frozen=frozen,
        stream=stream,
        validate=validate,
        checkpoints=checkpoints,
        metrics=metrics,
        goodput=goodput,
        timer=StepTimer(),
      )


def _hash(sources: Sequence[Source]) -> str:
  """Hashes the files' contents; a single file has its own hash."""
  hashes = [hash_files(source.path) for source in sources]
  return hashes[0] if len(hashes) == 1 else hash_json(hashes)


def _check_finite(step: int, values: dict[str, float]) -> None:
  """Refuses a nonfinite loss or gradient, before the parameters are saved."""
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
) -> tuple[Dataset, list[int]]:
  """Returns the tokenized trajectories, and the number in each file.

  A resumed run reads the stored tokens.
  """
  folder = os.path.join(workdir, "data")

  def make(unfinished: str) -> None:
    counts = [0] * len(sources)

    def encoded() -> Iterator[Trajectory]:
      for number, source in enumerate(sources):
        for trajectory in _encoded(source.path, tokenizer, vocab_size, data.context):
          counts[number] += 1
          yield trajectory

    rows = sum(count_rows(source.path) for source in sources)
    with Metrics(workdir, "data", rows, unit="trajectory") as metrics:
      Dataset.write(unfinished, metrics.count(encoded()))
    write_json(os.path.join(unfinished, _SOURCES), {"trajectories": counts})

  derive(folder, make, data.trajectories)
  dataset = Dataset(folder)
  counts = [len(dataset)]  # an earlier version read one file and stored no counts
  if os.path.exists(os.path.join(folder, _SOURCES)):
    counts = read_object(os.path.join(folder, _SOURCES))["trajectories"]
  return dataset, counts


def _tell(by_source: Mapping[str, Mapping[str, Any]]) -> None:
  for path, row in by_source.items():
    say(
      f"{path}: {row['trajectories']} trajectories, {row['to_train_on']} to train on, "
      f"weight {row['weight']:g}: {row['in_an_epoch']} in an epoch"
    )


def _encoded(
  path: str, tokenizer: Tokenizer, vocab_size: int, context: ContextConfig
) -> Iterator[Trajectory]:
  """Yields the file's contexts with token ids and ends; checks existing ids."""
  number = 0
  trajectories = iter(iter_trajectories(path))
  # Tokenizers are faster on many at once.
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
      yield from compacted(trajectory, context, tokenizer).split()


def _end(trajectory: Trajectory, tokenizer: Tokenizer) -> None:
  """Ends a closed answer with end-of-text, unless its closing tag is one token.

  Our sampler stops at `</answer>` in any spelling. Other engines stop at a token, which
  the model must learn.
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
  """Returns training and validation sequences, and counts left out by reason.

  Raises:
    ValueError: no trajectory is left to train on.
  """
  # --- Hold out the first trainable sequences for validation.
  lengths_N = dataset.lengths_N
  if not len(dataset):
    raise ValueError(f"{data.trajectories}: there is no trajectory in it")
  fit_N = fits(lengths_N, data.length)
  # Without policy tokens, an update has no mean loss.
  usable = np.flatnonzero(fit_N & (dataset.policy_N > 0))
  order = validation_order(num_of_source)  # with several files, the same share of each
  validation = order[np.isin(order, usable)][: data.validation]

  # --- Train on the others, except held-out tasks. Filters may have written a
  # trajectory twice; training on its copy would leak it.
  tasks = dataset.task_N
  train = usable[~np.isin(tasks[usable], tasks[validation])]

  # --- Report left-out trajectories; an empty training set is an error.
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


def _speed(timer: StepTimer, plan: SFTPlan, micro: list[Micro]) -> dict[str, float]:
  """Returns the step's tokens, seconds by phase, tokens per second, and `mfu`."""
  lengths: list[int] = []
  for m in micro:
    lengths += m.lengths
  tokens = sum(lengths)
  out = {"tokens": tokens, **timer.flush(step=tokens)}
  return out | flops.utilisation(
    plan.cfg,
    lengths,
    out["seconds_step"],
    plan.settings.lora is not None,
    plan.partitioner.mesh.size,
  )


def _logged(workdir: str) -> dict[str, Any]:
  """Returns the log's last figures, tokens per second, and seconds by phase."""
  log = read_metrics(workdir, "sft")
  last = {k: log[-1].get(k) for k in ("loss", "validation_loss", "seconds", "goodput")}
  rate = sum(r["tokens"] for r in log) / last["seconds"]
  return {"tokens_per_second": rate, **last, **phase_seconds(log)}


def _claim(settings: SFTConfig, sources: Sequence[Source], own_dir: str) -> None:
  """Records the run in its folder, or refuses another run's folder."""
  data = settings.data
  dialects = dialects_of_data(*(source.path for source in sources))
  prepare_workdir(
    settings,
    own_dir,
    may_change=_MAY_CHANGE,
    inputs={
      "data.trajectories": _hash(sources),
      "init": hash_files(settings.init or "", samples=16),
    },
    scratch_dirs=("tokenizer", "data"),
    may_grow={"data.steps": settings.optim.extension_fault},
    origin={
      "dialects": [dataclasses.asdict(each) for each in dialects],
      "max_len": data.length,
      "seed": data.seed,
    },
  )


def _trained_tokenizer(
  data: DataConfig, sources: Sequence[Source], workdir: str
) -> Tokenizer:
  """Trains a tokenizer on the data; a resumed run loads it."""
  folder = os.path.join(workdir, "tokenizer")

  def train(unfinished: str) -> None:
    texts = itertools.chain(*(_texts(source.path) for source in sources))
    train_tokenizer(texts, data.vocab_size).save(unfinished)

  derive(folder, train, data.trajectories)
  return Tokenizer.load(folder)


def _texts(path: str) -> Iterator[str]:
  for trajectory in iter_trajectories(path):
    for segment in trajectory.segments:
      yield segment.text


def _mean_loss(
  loss: Any,
  partitioner: Partitioner,
  trained: Any,
  frozen: Any,
  validation: Iterable[Micro],
) -> float:
  """Returns the held-out policy tokens' mean negative log-likelihood, in nats."""
  # Sums and one division, as in training: no packing changes the mean.
  total = 0.0
  tokens = 0.0
  for micro in validation:
    batch = micro.batch
    nll, _ = loss(trained, frozen, partitioner.put(batch))
    total += float(nll)
    tokens += micro.policy
  if not tokens:
    return float("nan")
  return total / tokens
