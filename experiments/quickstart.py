"""Runs all stages on one CPU: distil, SFT, RL, evaluate, report.

  python -m experiments.quickstart --workdir=runs/quickstart [--seed=0] [--tiny]

Makes an offline world, lets a multi-agent team solve its tasks with real tools, distils
the team's runs into Chain-of-Agents trajectories, trains a half-million-parameter model
on them from scratch, improves the model by RL with the same tools, and measures
everything on unseen worlds. After Ctrl-C the same command resumes.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Any

import ml_collections
import rich
from absl import flags

from coa_jax import distill, evaluate, rl, sft
from coa_jax.cli import launch
from coa_jax.report.metrics import duration, write_json
from coa_jax.runtime.config import ConfigError
from coa_jax.runtime.json_io import read_object, shown
from coa_jax.runtime.lock import hold
from coa_jax.runtime.record import prepare_workdir
from configs import distill_world, evaluate_world, rl_world, sft_world
from experiments import quickstart_report
from experiments.make_world import make_world
from tools_sandbox.jail.keeper import check as check_jail

_WORKDIR = flags.DEFINE_string("workdir", "runs/quickstart", "The run's folder.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the world, the teacher, SFT and RL.")
_TINY = flags.DEFINE_bool("tiny", False, "Run every stage, small, in a minute.")
flags.set_default(launch.CPU_DEVICES, 2)

# Evaluations: name -> (model, task file, tools on).
EVALUATIONS = {
  "eval_sft": ("sft", "test", True),
  "eval_rl": ("rl", "test", True),
  "eval_tools_off": ("rl", "test", False),
  "eval_ood_sft": ("sft", "ood", True),
  "eval_ood_rl": ("rl", "ood", True),
}
TEACHER_SAMPLES = 4  # the first counts as the team's greedy attempt


class Quickstart:
  """Runs the stages in order; finished ones are skipped."""

  def __init__(self, workdir: str, seed: int, tiny: bool):
    """Args: the output folder, the seed, and whether all stages are small."""
    self.workdir = workdir
    self.seed = seed
    self.arg = "tiny" if tiny else ""
    self.seconds: dict[str, float] = {}

  def path(self, *names: str) -> str:
    """Returns a path below the workdir."""
    return os.path.join(self.workdir, *names)

  def stage(self, number: int, name: str, title: str, work: Callable[[], Any]) -> None:
    """Runs a stage unless it is done; records its seconds over all tries."""
    file = self.path("stages.json")
    if os.path.exists(file):
      self.seconds = _read_stages(file)
    if self.seconds.get(f"{name}_done"):
      rich.print(f"[dim]\\[{number}/6] {title}: done[/dim]")
      return
    rich.print(f"[bold]\\[{number}/6] {title}[/bold]")
    began = time.monotonic()
    finished = False
    try:
      work()
      finished = True
    finally:
      seconds = self.seconds.get(name, 0.0) + time.monotonic() - began
      self.seconds[name] = round(seconds, 1)
      self.seconds[f"{name}_done"] = finished
      write_json(file, self.seconds)
    rich.print(f"      {duration(self.seconds[name])}")

  def run(self) -> dict[str, Any]:
    """Runs all stages; returns the content of `results.json`."""
    stages = (
      ("world", "an offline world: pages and tasks", self.make_world),
      (
        "distill",
        "a multi-agent team at work, and its runs distilled",
        self.distil,
      ),
      ("sft", "SFT: one model learns to play the whole team", self.sft),
      ("rl", "RL with real tools", self.rl),
      ("evaluate", "evaluation on worlds never seen in training", self.evaluate),
    )
    for number, (name, title, work) in enumerate(stages, 1):
      self.stage(number, name, title, work)
    rich.print("[bold]\\[6/6] report[/bold]")
    return quickstart_report.write(self.workdir, self.seconds)

  @functools.cached_property
  def sandbox(self) -> str:
    """Returns the jail, or the weaker back-end with a message if there is no jail.

    Only the quickstart falls back: a scripted team, or a model trained only on the
    team's output, writes its programs. Every other command refuses.
    """
    missing = check_jail()
    if not missing:
      return "jail"
    rich.print(
      f"tools.sandbox=subprocess, for this machine has no jail: {'; '.join(missing)}. "
      "The quickstart's own programs are harmless; others are refused without it."
    )
    return "subprocess"

  def make_world(self) -> None:
    """Writes pages and tasks, as files in a user's format."""
    sizes = (64, 64, 32) if self.arg else (13000, 6000, 600)
    make_world(self.path("world"), self.seed, *sizes)

  def _world(self, config: ml_collections.ConfigDict, tasks: str, pages: str) -> None:
    config.tasks.uri = self.path("world", f"{tasks}_tasks.jsonl")
    config.tools.corpus = self.path("world", f"{pages}_pages.jsonl")
    config.tools.sandbox = self.sandbox

  def distil(self) -> None:
    """Runs the team on the training tasks and writes trajectories for SFT."""
    config = distill_world.get_config(self.arg)
    self._world(config, "train", "train")
    config.scripted.seed = self.seed
    distill.run(config, self.path("distill"))

  def sft(self) -> None:
    """Trains a model from scratch."""
    config = sft_world.get_config(self.arg)
    config.data.trajectories = self.path("distill", distill.TRAJECTORIES)
    config.data.seed = self.seed
    # Muon multiplies whole matrices: two devices would repeat all products.
    config.mesh.devices = 1
    sft.run(config, self.path("sft"))

  def rl(self) -> None:
    """Improves the SFT model by RL on its own rollouts."""
    config = rl_world.get_config(self.arg)
    config.init = self.path("sft", "model")
    self._world(config, "rl", "train")
    config.dev.uri = self.path("world", "dev_tasks.jsonl")
    config.dev.corpus = self.path("world", "dev_pages.jsonl")
    config.rollout.seed = self.seed
    rl.run(config, self.path("rl"))

  def evaluate(self) -> None:
    """Measures the team and the models on the same held-out tasks."""
    held_out = evaluate_world.get_config(self.arg).tasks.limit
    config = distill_world.get_config(self.arg)
    self._world(config, "test", "test")
    config.tasks.limit = held_out
    config.teacher.samples = TEACHER_SAMPLES
    config.scripted.seed = self.seed + 1  # other faults than in training
    distill.run(config, self.path("eval_teacher"))
    for name, (model, tasks, enabled) in EVALUATIONS.items():
      config = evaluate_world.get_config(self.arg)
      config.init = self.path(model, "model")
      self._world(config, tasks, "test")
      if tasks == "ood":
        config.tasks.limit = max(4, held_out // 4)
      config.tools.enabled = enabled
      if not enabled:
        config.rollout.max_calls = 3  # none is answered
      evaluate.run(config, self.path(name))


def _read_stages(file: str) -> dict[str, float]:
  """Reads each stage's seconds and its flag `NAME_done`."""
  remedy = "delete the file; each stage then resumes from its own files"
  try:
    seconds = read_object(file)
  except ValueError as e:
    raise ValueError(f"{e}; {remedy}") from e
  for name, value in seconds.items():
    if not isinstance(value, float | int):
      raise ValueError(
        f"{file}: field {name!r} is {shown(value)}, not a number; {remedy}"
      )
  return seconds


def main() -> None:
  """Runs the quickstart and prints its table."""
  launch.prepare(launch.COMPILE_CACHE.value, launch.CPU_DEVICES.value)
  workdir, settings = _WORKDIR.value, dict(seed=_SEED.value, tiny=_TINY.value)
  if not workdir:
    raise ValueError("--workdir is empty; name the folder that the run writes")
  with hold(workdir):
    try:
      prepare_workdir(ml_collections.ConfigDict({"quickstart": settings}), workdir)
    except ConfigError as e:
      raise ConfigError(f"--workdir: {e}") from e
    Quickstart(workdir, **settings).run()


if __name__ == "__main__":
  launch.run_program(main)
