"""Event files and Weights & Biases match metrics.jsonl, also after a resume."""

from __future__ import annotations

import builtins
import importlib.util
import math
import socket
import struct
import time
import urllib.error
import urllib.request

import ml_collections
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c

from coa_jax.report import metric_names, tracking
from coa_jax.report.metrics import Metrics, read_metrics
from coa_jax.report.tracking import LogConfig
from coa_jax.runtime.config import ConfigError, read_config


def events(path) -> list[Event]:
  """An event file's records: length, its checksum, event, its checksum."""
  out, data = [], path.read_bytes()
  while data:
    (length,) = struct.unpack("<Q", data[:8])
    record, rest = data[12 : 12 + length], data[12 + length :]
    assert struct.unpack("<I", data[8:12])[0] == masked_crc32c(data[:8])
    assert struct.unpack("<I", rest[:4])[0] == masked_crc32c(record)
    out.append(Event.FromString(record))
    data = rest[4:]
  return out


def scalars(workdir) -> dict[tuple[str, int], float]:
  """The scalars in TensorBoard: a start at step n voids earlier ones from n on."""
  out: dict[tuple[str, int], float] = {}
  for path in sorted(workdir.glob("events.out.tfevents.*")):
    for event in events(path):
      if event.session_log.status == SessionLog.START:
        out = {(tag, step): v for (tag, step), v in out.items() if step < event.step}
      for value in event.summary.value:
        out[value.tag, event.step] = value.simple_value
  return out


def log(workdir, steps, total: int = 5, stage: str = "sft", sign: int = 1) -> None:
  with Metrics(str(workdir), stage, total, tracked=LogConfig()) as metrics:
    for step in steps:
      loss = np.float32(sign * step)
      metrics.log(step, {"loss": loss, "rate": 0.5} | ({"dev": 1} if step == 2 else {}))


def of_the_file(workdir, stage: str = "sft") -> dict[tuple[str, int], float]:
  return {
    (metric_names.tag(name), row["step"]): value
    for row in read_metrics(workdir, stage)
    for name, value in row.items()
    if name not in ("stage", "step", "seconds")
  }


def test_the_events_are_those_of_the_file_resumed_or_not(tmp_path):
  log(tmp_path, (1, 2, 3, 4))
  log(tmp_path / "rl", (4,), stage="rl")
  assert scalars(tmp_path) == of_the_file(tmp_path)
  assert scalars(tmp_path)["reward/dev", 2] == 1.0
  log(tmp_path, (3,), sign=-1)  # within the same second, but in a new file
  assert scalars(tmp_path) == of_the_file(tmp_path)
  assert scalars(tmp_path)["policy/loss", 3] == -3 and (
    "policy/loss",
    4,
  ) not in scalars(tmp_path)
  assert scalars(tmp_path / "rl") == of_the_file(tmp_path / "rl", "rl") != {}


def test_a_step_is_on_disk_once_it_is_logged_and_nan_stays_nan(tmp_path):
  with Metrics(str(tmp_path), "sft", 2, tracked=LogConfig()) as metrics:
    metrics.log(1, {"loss": 2.0})
    assert scalars(tmp_path) == {("policy/loss", 1): 2.0}  # no file is closed yet
    metrics.log(2, {"loss": math.nan, "norm": math.inf})
  events = scalars(tmp_path)
  assert math.isnan(events["policy/loss", 2]) and events["policy/norm", 2] == math.inf


def test_tensorboard_reads_them(tmp_path):
  name = "tensorboard.backend.event_processing.event_accumulator"
  reader = pytest.importorskip(name)
  log(tmp_path, (1, 2, 3, 4))
  log(tmp_path, (3,), sign=-1)
  folder = reader.EventAccumulator(str(tmp_path))
  folder.Reload()
  assert sorted(folder.Tags()["scalars"]) == [
    "policy/loss",
    "policy/rate",
    "reward/dev",
  ]
  losses = [(e.step, e.value) for e in folder.Scalars("policy/loss")]
  assert losses == [(1, 1), (2, 2), (3, -3)]


def test_other_stages_write_the_file_only(tmp_path):
  with Metrics(str(tmp_path), "distill", 1) as metrics:
    metrics.log(1, {"rows": 1})
  assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_wandb_is_not_touched_unless_asked(tmp_path, monkeypatch):
  imported = builtins.__import__

  def watched(name, *args, **kwargs):
    assert name.split(".")[0] != "wandb"
    return imported(name, *args, **kwargs)

  monkeypatch.setattr(builtins, "__import__", watched)
  log(tmp_path, (1,))
  assert scalars(tmp_path)


def test_wandb_that_is_missing_is_a_config_error(monkeypatch):
  monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)
  config = ml_collections.ConfigDict({"log": {"wandb_project": "coa"}})
  with pytest.raises(ConfigError, match="'log': wandb_project='coa' needs the package"):
    read_config(config.log, LogConfig, "log")
  assert read_config({}, LogConfig, "log") == LogConfig()


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("wandb"), reason="needs wandb")
def test_wandb_offline_keeps_one_run_over_a_resumption(tmp_path, monkeypatch):
  monkeypatch.setenv("WANDB_MODE", "offline")
  config = LogConfig(wandb_project="coa")
  for first in (1, 2):
    with Metrics(str(tmp_path), "sft", 3, tracked=config) as metrics:
      for step in (first, first + 1):
        metrics.log(step, {"loss": step})
  run = (tmp_path / "wandb_id").read_text()
  files = list(tmp_path.glob(f"wandb/offline-run-*-{run}/run-{run}.wandb"))
  assert len(files) == 2
  # wandb's own process writes the files, sometimes after `finish` has returned.
  deadline = time.monotonic() + 30
  while time.monotonic() < deadline:
    if all(b"loss" in file.read_bytes() for file in files):
      return
    time.sleep(0.1)
  pytest.fail(f"no loss in {[file.read_bytes() for file in files]}")


def test_the_last_step_can_be_scraped_while_the_stage_runs(tmp_path):
  with socket.socket() as taken:
    taken.bind(("127.0.0.1", 0))
    port = taken.getsockname()[1]
  config = LogConfig(prometheus_port=port)
  page = f"http://127.0.0.1:{port}/metrics"
  with Metrics(str(tmp_path), "rl", 5, tracked=config) as metrics:
    for step in (1, 2):
      metrics.log(step, {"reward": step / 4})
      text = urllib.request.urlopen(page).read().decode()
      assert f'coa_step{{stage="rl"}} {step}.0' in text
      tag = metric_names.tag("reward")
      assert f'coa_metric{{name="{tag}",stage="rl"}} {step / 4}' in text
  with pytest.raises(urllib.error.URLError):  # the port is closed
    urllib.request.urlopen(page)


def test_a_port_that_is_taken_is_told(tmp_path):
  with socket.socket() as taken:
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    config = LogConfig(prometheus_port=taken.getsockname()[1])
    with (
      pytest.raises(ValueError, match=r"config.log.prometheus_port=\d+ on '127.0.0.1'"),
      Metrics(str(tmp_path), "rl", 5, tracked=config) as metrics,
    ):
      metrics.log(1, {"reward": 0.5})
