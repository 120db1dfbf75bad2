"""Sends a stage's numbers to dashboards: TensorBoard, Weights & Biases, Prometheus.

`metrics.jsonl` is the record; dashboards have the same steps and names, under the
sections of `metric_names.py`. tensorboardX's record writer writes event files
synchronously; its `SummaryWriter` would pass events to a thread, and `flush` does not
wait for this thread. tensorboardX is imported on use, because its import loads torch if
installed: a second and 180 MB, which workers and programs without tracking can save.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import secrets
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from coa_jax.report import metric_names
from coa_jax.runtime.disk import atomic_write
from coa_jax.runtime.fields import bounded, check_fields

if TYPE_CHECKING:
  from tensorboardX.proto.event_pb2 import Event


@dataclasses.dataclass(frozen=True)
class LogConfig:
  """Config section `log`: additional outputs of a run's metrics.

  TensorBoard's event files are always written, into the workdir itself: TensorBoard
  names a run by its folder, so `--logdir=runs/world` shows `sft` and `rl`.

  Attributes:
    wandb_project: a Weights & Biases project for the metrics; "" for none. The
      package's own settings choose the server (`wandb login`, `wandb offline`).
    prometheus_port: the port for scraping the last step's metrics while the stage runs
      (`http://HOST:PORT/metrics`); 0 for none.
    prometheus_host: the listening address; "0.0.0.0" means all of this machine's
      addresses, for scrapers on other machines.
    profile: (first, end): traces the steps from `first` up to but not `end`, numbered
      as in metrics.jsonl, into `workdir/profile`, for XProf; () traces none. The first
      steps compile: take later ones.
  """

  wandb_project: str = ""
  prometheus_port: int = bounded(0, least=0, below=2**16)
  prometheus_host: str = "127.0.0.1"
  profile: tuple[int, ...] = ()

  def __post_init__(self):
    check_fields(self)
    in_order = len(self.profile) == 2 and 0 < self.profile[0] < self.profile[1]
    if self.profile and not in_order:
      raise ValueError(
        f"profile is {self.profile}; it must be () or (first, end), 0 < first < end"
      )
    if self.wandb_project and importlib.util.find_spec("wandb") is None:
      raise ValueError(
        f"wandb_project={self.wandb_project!r} needs the package wandb: "
        "pip install wandb, or leave the field empty"
      )


class Tracking:
  """Writes a stage's scalars to the configured outputs, from step `first` on."""

  def __init__(self, workdir: str, stage: str, first: int, config: LogConfig):
    """Opens the configured outputs.

    `first` is the first step to log. TensorBoard hides an interrupted run's values from
    this step on, once this run has opened its file.

    Raises:
      ValueError: Weights & Biases refuses or cannot be reached, or Prometheus's port
        is taken.
    """
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    # TensorBoard reads a folder's files in order of their names, which contain seconds;
    # a run resumed within the same second must not overwrite the previous file.
    suffix = f".{time.time_ns()}"
    self._events = EventsWriter(os.path.join(workdir, "events"), suffix)
    # TensorBoard drops other files' values from this step on.
    start = SessionLog(status=SessionLog.START)
    self._write(Event(step=first, session_log=start))
    self._wandb = None
    if config.wandb_project:
      self._wandb = _wandb_run(workdir, stage, config.wandb_project)
    self._prometheus = None
    if config.prometheus_port:
      self._prometheus = Prometheus(
        stage, config.prometheus_host, config.prometheus_port
      )

  def log(self, step: int, values: Mapping[str, float]) -> None:
    """Writes one step's values under their sections; events are on disk on return."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary

    values = {metric_names.tag(name): value for name, value in values.items()}
    scalars = []
    for name, value in values.items():
      scalars.append(Summary.Value(tag=name, simple_value=value))
    self._write(Event(step=step, summary=Summary(value=scalars)))
    if self._wandb:
      # Weights & Biases' own step must not decrease, but a resumed run's step does.
      self._wandb.log({"step": step, **values})
    if self._prometheus:
      self._prometheus.log(step, values)

  def close(self, failed: bool = False) -> None:
    """Closes all outputs; Weights & Biases is told whether the run failed."""
    self._events.close()
    if self._prometheus:
      self._prometheus.close()
    if self._wandb:
      self._wandb.finish(exit_code=int(failed))

  def _write(self, event: Event) -> None:
    event.wall_time = time.time()
    self._events.write_event(event)
    self._events.flush()


class Prometheus:
  """Serves the last step's numbers to a scraper."""

  def __init__(self, stage: str, host: str, port: int):
    """Starts listening.

    Raises:
      ValueError: the address is not available.
    """
    registry = CollectorRegistry()
    labels = ["stage", "name"]
    self._stage = stage
    self._step = Gauge("coa_step", "The last step.", ["stage"], registry=registry)
    self._value = Gauge(
      "coa_metric", "Of the last step; docs/metrics.md.", labels, registry=registry
    )
    try:
      self._server, self._thread = start_http_server(port, host, registry)
    except OSError as e:
      raise ValueError(
        f"config.log.prometheus_port={port} on {host!r}: {e.strerror or e}"
      ) from e

  def log(self, step: int, values: Mapping[str, float]) -> None:
    """Sets the shown metrics to one step's values."""
    self._step.labels(self._stage).set(step)
    for name, value in values.items():
      self._value.labels(self._stage, name).set(value)

  def close(self) -> None:
    """Stops listening."""
    self._server.shutdown()
    self._server.server_close()
    self._thread.join()


def _wandb_run(workdir: str, stage: str, project: str) -> Any:
  """Opens the stage's Weights & Biases run, or continues the existing run.

  The run gets scalars only: no console output, code, commit or machine data.

  Raises:
    ValueError: Weights & Biases refuses or cannot be reached.
  """
  import wandb

  # --- The run id, stored next to the events so that a resumed stage finds its run.
  path = os.path.join(workdir, "wandb_id")
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
      dir=workdir,
      settings=settings,
    )
  except wandb.errors.Error as e:
    raise ValueError(f"config.log.wandb_project={project!r}: {e}") from e
  # A resumed run's step decreases: allowed only for a step logged as a metric.
  run.define_metric("*", step_metric="step")
  return run
