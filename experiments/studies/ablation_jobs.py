"""The jobs of the ablation: what arms need, made once, in folders named by content.

A job is a journey with its config. Its folder's name is a hash of the config, in which
the folders that it reads are named: so equal work has equal names, whatever arm it is
for, and a run of another budget or of changed arms goes on beside it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import rich

from coa_jax import distill, evaluate, rl, sft
from coa_jax.disk import DiskError, atomic_path, clear_errors
from coa_jax.report.metrics import duration, write_json
from configs import distill_world, evaluate_world, rl_world, sft_world
from experiments.make_world import make_world
from experiments.studies.ablation_arms import BUDGETS, DOMAINS, TEAM, Arm

# Seconds alone on two cores with budget "small": an estimate, which the pace of what
# has been done corrects.
_SECONDS = {"world": 3.0, "team run": 0.004, "distilled": 0.0015}
_SECONDS |= {"sft token": 5e-5, "rollout": 0.016, "attempt": 0.016, "start": 6.0}


@dataclasses.dataclass(frozen=True)
class Job:
  """One journey with one config, in a folder of its own.

  Attributes:
    kind: world, distill, sft, rl or evaluate.
    config: of the journey; of a world the arguments of `make_world`.
    needs: jobs that have to be done before.
    name: of the folder below the workdir.
    expected: seconds that it may take.
  """

  kind: str
  config: Any = dataclasses.field(compare=False)
  needs: tuple[Job, ...] = dataclasses.field(compare=False)
  name: str
  expected: float = dataclasses.field(compare=False)


_CONFIGS = {
  "distill": distill_world,
  "sft": sft_world,
  "rl": rl_world,
  "evaluate": evaluate_world,
}
_JOURNEYS = {
  "distill": distill.run,
  "sft": sft.run,
  "rl": rl.run,
  "evaluate": evaluate.run,
}
KINDS = ("world", *_JOURNEYS)


class AblationPlan:
  """The jobs of one seed; none is run here."""

  def __init__(self, workdir: str, budget: str, seed: int, sandbox: str):
    """Args: the folder of all, a name in BUDGETS, the seed, `tools.sandbox`."""
    self._workdir = workdir
    self._seed = seed
    self._sandbox = sandbox
    self._budget = BUDGETS[budget]
    self._world = self._job(
      "world", {**self._budget.world, "seed": seed}, (), _SECONDS["world"]
    )

  def evaluations(self, arm: Arm) -> dict[str, list[Job]]:
    """The jobs that play the tasks of "test" and "unseen"; one for each model."""
    names = [""]  # one model for all domains
    if arm.per_domain:
      names = list(DOMAINS)
    models = {name: self._model(arm, name) for name in names}
    out: dict[str, list[Job]] = {"test": [], "unseen": []}
    for part, tasks, size in (
      ("test", "test", "held_out"),
      ("unseen", "ood", "unseen"),
    ):
      n = self._budget.world[size]
      for name, model in models.items():
        share = 1 / len(models)
        if part == "test":
          share = self._share(name)
        config = self._config("evaluate", arm, name, tasks, "test")
        config.init = os.path.join(self._workdir, model.name, "model")
        tries = n * share * (1 + config.eval.samples)
        expected = _SECONDS["start"] + tries * _SECONDS["attempt"]
        out[part].append(self._job("evaluate", config, (self._world, model), expected))
    return out

  def _model(self, arm: Arm, domain: str) -> Job:
    """The job that makes a model of an arm."""
    # --- SFT. Models that share one budget get the share of their domain's tasks.
    share = 1.0
    if arm.per_domain == "total":
      share = self._share(domain)
    config = self._config("sft", arm, domain)
    config.data.steps = round(config.data.steps * share)
    config.data.seed = self._seed
    data = self._distilled(arm, domain)
    config.data.trajectories = os.path.join(
      self._workdir, data.name, distill.TRAJECTORIES
    )
    tokens = config.data.steps * config.data.rows * config.data.length
    expected = _SECONDS["start"] + tokens * _SECONDS["sft token"]
    model = self._job("sft", config, (data,), expected)
    if not arm.rl:
      return model

    # --- RL, from that model.
    config = self._config("rl", arm, domain, "rl", "train")
    config.init = os.path.join(self._workdir, model.name, "model")
    config.dev.uri = self._world_file("dev_tasks")
    config.dev.corpus = self._world_file("dev_pages")
    config.rollout.seed = self._seed
    config.algo.steps = max(1, round(config.algo.steps * share))
    sampling = config.algo.sampling
    rollouts = config.algo.steps * sampling.prompts * sampling.samples
    expected = _SECONDS["start"] + rollouts * _SECONDS["rollout"]
    return self._job("rl", config, (self._world, model), expected)

  def _distilled(self, arm: Arm, domain: str) -> Job:
    """The training set of an arm; all are made of the runs of one team."""
    config = self._config("distill", arm, domain, "train", "train")
    config.scripted.seed = self._seed
    n = self._budget.world["train"]
    if (arm, domain) == (TEAM, ""):
      return self._job("distill", config, (self._world,), n * _SECONDS["team run"])
    team = self._distilled(TEAM, "")
    expected = n * self._share(domain) * _SECONDS["distilled"]
    job = self._job("distill", config, (self._world, team), expected)
    return team if job.name == team.name else job

  def _config(
    self, kind: str, arm: Arm, domain: str, tasks: str = "", pages: str = ""
  ) -> Any:
    """The journey's config with the fields of budget and arm, its files and tasks."""
    config = _CONFIGS[kind].get_config(self._budget.argument)
    for path, value in {**self._budget.fields, **arm.fields}.items():
      journey, *names, field = path.split(".")
      if journey == kind:
        section = config
        for name in names:
          if not section.get(name):
            section[name] = {}
          section = section[name]
        section[field] = value
    if tasks:
      config.tasks.uri = self._world_file(f"{tasks}_tasks")
      config.tools.corpus = self._world_file(f"{pages}_pages")
      config.tools.sandbox = self._sandbox
    if tasks and domain:
      config.tasks.families = DOMAINS[domain]
    return config

  def _share(self, domain: str) -> float:
    """The part of the tasks that is of the domain."""
    mix = dict(self._budget.world["mix"])
    families = DOMAINS.get(domain, mix)
    return sum(mix.get(family, 0) for family in families) / sum(mix.values())

  def _world_file(self, name: str) -> str:
    return os.path.join(self._workdir, self._world.name, f"{name}.jsonl")

  def _job(
    self, kind: str, config: Any, needs: tuple[Job, ...], expected: float
  ) -> Job:
    """A job, named by what decides what comes out of it."""
    values = config if isinstance(config, dict) else config.to_dict()
    text = json.dumps([kind, values], sort_keys=True)
    # Another workdir with the same content has the same names.
    text = text.replace(os.path.join(self._workdir, ""), "")
    name = f"{kind}/{hashlib.sha256(text.encode()).hexdigest()[:10]}"
    return Job(kind, config, needs, name, expected)


def ordered(goals: Iterable[Job]) -> list[Job]:
  """The goals and all that they need, each once, after what it needs."""
  out: dict[str, Job] = {}

  def visit(job: Job) -> None:
    if job.name not in out:
      for need in job.needs:
        visit(need)
      out[job.name] = job

  for goal in goals:
    visit(goal)
  return list(out.values())


def perform(job: Job, workdir: str) -> None:
  """Runs a job in its folder, going on with what is there."""
  folder = os.path.join(workdir, job.name)
  if job.kind == "world":
    make_world(folder, **job.config)
    return
  if job.kind == "distill" and len(job.needs) > 1:
    # To `distill` this is an interrupted run whose team has done its part: neither the
    # protocol that runs are told in nor the filters change what a team does.
    runs = os.path.join(folder, distill.RUNS)
    if not os.path.exists(runs):
      with atomic_path(runs) as unfinished:
        source = os.path.join(workdir, job.needs[1].name, distill.RUNS)
        shutil.copyfile(source, unfinished)
  _JOURNEYS[job.kind](job.config, folder)


class Runner:
  """Does jobs that are not done, says how far it is, and keeps what failed."""

  def __init__(self, workdir: str, jobs: Sequence[Job]):
    """Args: the folder of all; the jobs, each after what it needs."""
    self._workdir = workdir
    self._jobs = jobs
    self.failed: dict[str, str] = {}  # job -> why
    self.seconds = {job.name: self._done(job) for job in jobs}

  def _file(self, job: Job) -> str:
    return os.path.join(self._workdir, job.name, "done.json")

  def _done(self, job: Job) -> float | None:
    """Seconds that the job took; None where it is not done."""
    if not os.path.exists(self._file(job)):
      return None
    with open(self._file(job)) as f:
      return float(json.load(f)["seconds"])

  def left(self) -> float:
    """Seconds that are left, by the estimates and the pace so far."""
    seconds = 0.0  # of what is done
    expected = 0.0  # likewise
    left = 0.0  # expected of the others, but for what failed
    for job in self._jobs:
      took = self.seconds[job.name]
      if took is not None:
        seconds += took
        expected += job.expected
      elif job.name not in self.failed:
        left += job.expected
    if not expected:
      return left
    return left * seconds / expected

  def run(self, used: Mapping[str, str]) -> None:
    """Does all; `used` says of each job, by name, for whom it is."""
    for number, job in enumerate(self._jobs, 1):
      if self.seconds[job.name] is not None:
        continue
      # What fails because of another fails for that one's reason.
      lacking = [need.name for need in job.needs if need.name in self.failed]
      if lacking:
        self.failed[job.name] = self.failed[lacking[0]]
        continue
      rich.print(
        f"[bold]\\[{number}/{len(self._jobs)}][/bold] {job.kind} of {used[job.name]}, "
        f"{job.name}: {duration(self.left())} left"
      )
      began = time.monotonic()
      try:
        with clear_errors(self._workdir):
          perform(job, self._workdir)
      except DiskError:  # the others would have no more room
        raise
      except Exception as e:  # one arm's fault must not cost the others
        self.failed[job.name] = f"{job.name}: {type(e).__name__}: {e}"
        traceback.print_exc()
        print(f"failed: {self.failed[job.name]}", file=sys.stderr, flush=True)
        continue
      self.seconds[job.name] = round(time.monotonic() - began, 1)
      write_json(self._file(job), {"seconds": self.seconds[job.name]})
