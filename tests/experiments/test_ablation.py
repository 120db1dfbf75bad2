"""The ablation: arms differ in the fields they name, share the rest, survive a kill."""

from __future__ import annotations

import pytest

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
from experiments.studies.ablation_arms import ARMS, BUDGETS
from experiments.studies.ablation_jobs import AblationPlan, ordered

# What tells where something is, not what is done.
_PATHS = ("init", "trajectories")
_READ = {
  "distill": {"teacher": TeacherConfig, "filters": FiltersConfig, "tasks": TasksConfig},
  "sft": {"data": DataConfig},
  "rl": {"algo": AlgoConfig, "rollout": RolloutConfig},
  "evaluate": {"eval": EvalConfig, "rollout": RolloutConfig, "tasks": TasksConfig},
}


def jobs_of(arm: str, budget: str = "small", seed: int = 0, workdir: str = "W"):
  parts = AblationPlan(workdir, budget, seed, "jail").evaluations(ARMS[arm])
  return ordered(j for part in parts.values() for j in part)


def fields_of(jobs) -> dict[str, list]:
  """Values by "journey.section.field", over the jobs of that journey."""
  out: dict[str, list] = {}

  def read(path: str, value) -> None:
    if isinstance(value, dict):
      for name, inner in value.items():
        read(f"{path}.{name}", inner)
    elif path.rpartition(".")[2] not in _PATHS:
      out.setdefault(path, []).append(value)

  for job in jobs:
    if job.kind != "world":
      read(job.kind, job.config.to_dict())
  return out


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", ARMS)
def test_an_arms_configs_are_read_and_differ_in_what_it_names_alone(name, budget):
  jobs = jobs_of(name, budget)
  elsewhere = jobs_of(name, budget, workdir="/else/where")
  assert [job.name for job in jobs] == [job.name for job in elsewhere]
  for job in jobs:
    for part, cls in _READ.get(job.kind, {}).items():
      read_config(job.config[part], cls, part)
  if ARMS[name].per_domain:
    return
  full = fields_of(jobs_of("full", budget))
  own = fields_of(jobs)
  for field, value in ARMS[name].fields.items():
    assert own.get(field, [value])[-1] == value
  if not ARMS[name].rl:
    full = {path: values for path, values in full.items() if path[:3] != "rl."}
  changed = {
    path
    for path in {*full, *own}
    if full.get(path, [None])[-1] != own.get(path, [None])[-1]
  }
  assert changed == set(ARMS[name].fields)


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


def test_arms_are_chosen_by_name_or_by_title_and_unknown_ones_refused():
  assert ablation.choose_arms("") == list(ARMS)
  assert ablation.choose_arms("SFT only|full") == ["full", "sft_only"]
  assert ablation.choose_arms("no filtering, SFT only") == ["no_filtering"]
  for name, arm in ARMS.items():
    assert ablation.choose_arms(name) == ablation.choose_arms(arm.title) == [name]
  with pytest.raises(ValueError, match=r"no arm 'SFT'; there are full \('full recipe'"):
    ablation.choose_arms("full|SFT")


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
