"""The ablation: arms differ in the fields they name, share the rest, survive a kill."""

from __future__ import annotations

import json
import pathlib
import signal
import subprocess
import sys

import pytest
from toy import eventually

from coa_jax.config import read_config
from coa_jax.distill import TeacherConfig
from coa_jax.evaluate import EvalConfig
from coa_jax.protocol.trajectory import Author, Segment, Trajectory
from coa_jax.rl import AlgoConfig
from coa_jax.rollout.types import RolloutConfig
from coa_jax.sft import DataConfig
from coa_jax.tasks.sources import TasksConfig
from coa_jax.teacher.filters import FiltersConfig
from experiments.studies import ablation, ablation_jobs, ablation_report
from experiments.studies.ablation_arms import ARMS, BUDGETS, DOMAINS
from experiments.studies.ablation_jobs import AblationPlan, Runner, ordered

# What says where something is, not what is done.
_PLACES = ("init", "trajectories")
_READ = {
  "distill": {"teacher": TeacherConfig, "filters": FiltersConfig, "tasks": TasksConfig},
  "sft": {"data": DataConfig},
  "rl": {"algo": AlgoConfig, "rollout": RolloutConfig},
  "evaluate": {"eval": EvalConfig, "rollout": RolloutConfig, "tasks": TasksConfig},
}


def jobs_of(arm: str, budget: str = "small", seed: int = 0, workdir: str = "W"):
  parts = AblationPlan(workdir, budget, seed, "jail").evaluations(ARMS[arm])
  return ordered(j for part in parts.values() for j in part)


def value_of(job, path: str):
  value = job.config
  for name in path.split("."):
    value = value[name]
  return value


@pytest.mark.parametrize("budget", BUDGETS)
def test_every_config_is_read_and_has_the_fields_that_its_arm_names(budget):
  for name, arm in ARMS.items():
    jobs = jobs_of(name, budget)
    for job in jobs:
      for part, cls in _READ.get(job.kind, {}).items():
        read_config(job.config[part], cls, part)
    for field, value in arm.fields.items():
      journey, _, path = field.partition(".")
      ended = [job for job in jobs if job.kind == journey]
      assert not ended or value_of(ended[-1], path) == value


def fields_of(jobs) -> dict[str, list]:
  """Values by "journey.section.field", over the jobs of that journey."""
  out: dict[str, list] = {}

  def read(path: str, value) -> None:
    if isinstance(value, dict):
      for name, inner in value.items():
        read(f"{path}.{name}", inner)
    elif path.rpartition(".")[2] not in _PLACES:
      out.setdefault(path, []).append(value)

  for job in jobs:
    if job.kind != "world":
      read(job.kind, job.config.to_dict())
  return out


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", [a for a in ARMS if not ARMS[a].per_domain])
def test_an_arm_differs_from_the_full_recipe_in_what_it_names_alone(name, budget):
  full = fields_of(jobs_of("full", budget))
  own = fields_of(jobs_of(name, budget))
  if not ARMS[name].rl:
    full = {path: values for path, values in full.items() if path[:3] != "rl."}
  changed = {
    path
    for path in {*full, *own}
    if full.get(path, [None])[-1] != own.get(path, [None])[-1]
  }
  assert changed == set(ARMS[name].fields)


def test_models_per_domain_share_the_tasks_and_have_the_budget_that_is_said():
  one = fields_of(jobs_of("full"))
  total = fields_of(jobs_of("per_domain_total"))
  each = fields_of(jobs_of("per_domain_each"))
  for steps in ("sft.data.steps", "rl.algo.steps"):
    assert abs(sum(total[steps]) - one[steps][0]) <= len(DOMAINS) - 1
    assert each[steps] == one[steps] * len(DOMAINS)
  families = set(each["rl.tasks.families"])
  assert families == set(DOMAINS.values()) == set(each["evaluate.tasks.families"])


def test_equal_work_is_one_job_and_other_work_another():
  configs: dict[str, str] = {}
  teams = set()
  for seed in range(2):
    for arm in ARMS:
      jobs = jobs_of(arm, seed=seed)
      for job in jobs:
        assert configs.setdefault(job.name, str(job.config)) == str(job.config)
      teams.add((seed, next(job.name for job in jobs if job.kind == "distill")))
  assert len(teams) == 2  # one team's runs for all arms of a seed
  names = {arm: [j.name for j in jobs_of(arm)] for arm in ARMS}
  assert set(names["sft_only"][:3]) == set(names["full"][:3])  # world, team, SFT
  assert set(names["no_filtering"][:4]) == set(names["rl_from_unfiltered"][:4])
  assert len({tuple(n) for n in names.values()}) == len(ARMS)
  assert not set(names["full"]) & {j.name for j in jobs_of("full", seed=1)}
  assert names["full"] == [j.name for j in jobs_of("full", workdir="/else/where")]
  for arm in ARMS:
    done = set()
    for job in jobs_of(arm):
      assert {need.name for need in job.needs} <= done
      done.add(job.name)


def attempts_of(answers: str) -> ablation_report.ArmAttempts:
  """Greedy attempts of tasks a, b, ..., right where there is a 1; sampled too."""
  attempts = []
  for task, right in zip("abcdef", answers, strict=False):
    text = Segment(Author.POLICY, "answer", "<answer> x</answer>")
    parts = {"answer": float(right), "format": 1.0}
    attempts.append(Trajectory(task, segments=[text], reward_parts=parts))
  return {"test": (attempts, attempts), "unseen": (attempts, attempts)}


def test_figures_are_means_over_seeds_and_differences_are_paired():
  mine = {0: attempts_of("1100"), 1: attempts_of("1110")}
  full = {0: attempts_of("1111"), 1: attempts_of("1110"), 2: attempts_of("0000")}
  greedy = ablation_report.figures_of(mine, full)["greedy"]
  assert greedy["by_seed"] == {0: 0.5, 1: 0.75} and greedy["mean"] == 0.625
  assert greedy["sd"] == pytest.approx(0.125 * 2**0.5)
  assert greedy["against"] == pytest.approx(-0.25)  # two of eight, none of seed 2
  low, high = greedy["against_ci95"]
  assert low < -0.25 < high <= 0


def test_what_failed_costs_no_other_and_what_is_done_is_not_done_again(
  tmp_path, monkeypatch
):
  performed = []
  broken = next(j.name for j in jobs_of("react", "tiny") if j.kind == "sft")

  def perform(job, workdir):
    performed.append(job.name)
    if job.name == broken:
      raise ValueError("no good")

  monkeypatch.setattr(ablation_jobs, "perform", perform)
  jobs = ordered(j for arm in ("react", "sft_only") for j in jobs_of(arm, "tiny"))
  used = {j.name: "an arm" for j in jobs}
  first = Runner(str(tmp_path), jobs)
  first.run(used)
  assert broken in first.failed and first.left() == 0
  assert not set(first.failed) & {j.name for j in jobs_of("sft_only", "tiny")}
  assert all("ValueError: no good" in reason for reason in first.failed.values())
  performed.clear()
  Runner(str(tmp_path), jobs).run(used)
  assert performed == [broken]


@pytest.mark.slow
def test_an_arm_is_run_and_measured_and_then_only_reported(tmp_path, monkeypatch):
  workdir = tmp_path / "w"
  results = ablation.run(str(workdir), "tiny", 1, ["sft_only"])
  arm = results["arms"]["sft_only"]
  assert not results["failed"] and arm["greedy"]["mean"] is not None
  assert "SFT only" in (workdir / "table.md").read_text()
  assert "SFT only" in (workdir / "report.html").read_text()
  assert (workdir / "plot.png").read_bytes().startswith(b"\x89PNG")
  monkeypatch.setattr(ablation_jobs, "perform", None)  # to call it would fail
  assert ablation.run(str(workdir), "tiny", 1, ["sft_only"]) == results


@pytest.mark.slow
def test_killed_again_and_again_all_arms_end(tmp_path: pathlib.Path):
  workdir = tmp_path / "w"
  command = [sys.executable, "-m", "experiments.studies.ablation", "--budget=tiny"]
  command += ["--seeds=1", f"--workdir={workdir}"]
  for kind in ("distill", "sft", "rl", "evaluate"):
    run = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    pattern = f"{kind}/*/config.json"
    eventually(lambda p=pattern: list(workdir.glob(p)), seconds=1800)
    run.send_signal(signal.SIGKILL)
    run.wait()
  done = {f: f.stat().st_mtime_ns for f in workdir.glob("*/*/done.json")}
  last = subprocess.run(command, capture_output=True, text=True, timeout=3600)
  assert last.returncode == 0, last.stderr
  assert {f: f.stat().st_mtime_ns for f in done} == done
  results = json.loads((workdir / "results.json").read_text())
  assert list(results["arms"]) == sorted(ARMS) and not results["failed"]
