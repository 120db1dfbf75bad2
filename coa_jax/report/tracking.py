"""A stage's numbers for other people's dashboards: TensorBoard, and Weights & Biases.

`metrics.jsonl` is the record; these are views of it, with the same steps, and the same
names under the sections of `metric_names.py`.
Event files are written by tensorboardX's record writer, synchronously: its
`SummaryWriter` hands events to a thread over a queue, and `flush` does not wait for it.
It is imported where it is used, for it imports torch where that is installed: a second
and 180 MB, which workers and programs that track nothing need not spend.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import secrets
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from coa_jax.disk import atomic_write
from coa_jax.report import metric_names

if TYPE_CHECKING:
  from tensorboardX.proto.event_pb2 import Event

FOLDER = "tensorboard"


@dataclasses.dataclass(frozen=True)
class LogConfig:
  """Config section `log`: where else a run's numbers go.

  TensorBoard's event files are always written, to `workdir/tensorboard/STAGE`.

  Attributes:
    wandb_project: a project of Weights & Biases that gets them too; none where "". The
      package's own settings say where it sends them (`wandb login`, `wandb offline`).
  """

  wandb_project: str = ""

  def __post_init__(self):
    if self.wandb_project and importlib.util.find_spec("wandb") is None:
      raise ValueError(
        f"wandb_project={self.wandb_project!r} needs the package wandb: "
        "pip install wandb, or leave the field empty"
      )


class Tracking:
  """Writes scalars from one step on; steps of an earlier run from there on are void."""

  def __init__(self, workdir: str, stage: str, first: int, config: LogConfig):
    """Opens what is asked for.

    Args:
      workdir: the run's directory.
      stage: what the numbers belong to; a folder, or a run, of its own.
      first: the first step that will be logged. TensorBoard hides what an interrupted
        run had logged from there on, once this one has opened its file.
      config: section `log`.

    Raises:
      ValueError: Weights & Biases refuses, or can not be reached.
    """
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    folder = os.path.join(workdir, FOLDER, stage)
    os.makedirs(folder, exist_ok=True)
    # TensorBoard reads the files of a folder in the order of their names, which tell
    # seconds; a run resumed within the second must not overwrite the one before.
    suffix = f".{time.time_ns()}"
    self._events = EventsWriter(os.path.join(folder, "events"), suffix)
    # TensorBoard drops what other files of the folder say from this step on.
    start = SessionLog(status=SessionLog.START)
    self._write(Event(step=first, session_log=start))
    self._wandb = None
    if config.wandb_project:
      self._wandb = _wandb_run(folder, workdir, stage, config.wandb_project)

  def log(self, step: int, values: Mapping[str, float]) -> None:
    """Writes one step, each name under its section; on disk when this returns."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary

    values = {metric_names.tag(name): value for name, value in values.items()}
    scalars = []
    for name, value in values.items():
      scalars.append(Summary.Value(tag=name, simple_value=value))
    self._write(Event(step=step, summary=Summary(value=scalars)))
    if self._wandb:
      # Weights & Biases refuses its own step to go back, as a resumed run's does.
      self._wandb.log({"step": step, **values})

  def close(self) -> None:
    """Ends both; Weights & Biases sends what it has not sent yet."""
    self._events.close()
    if self._wandb:
      self._wandb.finish()

  def _write(self, event: Event) -> None:
    event.wall_time = time.time()
    self._events.write_event(event)
    self._events.flush()


def _wandb_run(folder: str, workdir: str, stage: str, project: str) -> Any:
  """The stage's run, which goes on where the stage has one already.

  It gets scalars alone: no console output, code, commit or machine.

  Raises:
    ValueError: Weights & Biases refuses, or can not be reached.
  """
  import wandb

  # --- The run's id is kept beside the events: with it a resumed stage finds its run.
  path = os.path.join(folder, "wandb_id")
  if not os.path.exists(path):
    with atomic_write(path) as f:
      f.write(secrets.token_hex(8))
  with open(path, encoding="utf-8") as f:
    run_id = f.read()

  # --- The run.
  name = f"{os.path.basename(os.path.abspath(workdir))}/{stage}"
  settings = wandb.Settings(
    console="off",
    disable_code=True,
    disable_git=True,
    x_disable_meta=True,
    x_disable_stats=True,
  )
  try:
    run = wandb.init(
      project=project,
      id=run_id,
      name=name,
      resume="allow",
      dir=folder,
      settings=settings,
    )
  except wandb.errors.Error as e:
    raise ValueError(f"config.log.wandb_project={project!r}: {e}") from e
  # Steps go back where a run is resumed; as a metric they may.
  run.define_metric("*", step_metric="step")
  return run
