"""The ablation: arms differ in what they say, share the rest, and survive a kill."""

from __future__ import annotations

import json
import pathlib
import signal
import subprocess
import sys
import time

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
from experiments.studies.ablation_arms import ARMS, BUDGETS, DOMAINS
from experiments.studies.ablation_jobs import Plan, Runner, ordered

# What says where something is, not what is done.
_PLACES = {"init", "trajectories"}
_READ = {
  "distill": {"teacher": TeacherConfig, "filters": FiltersConfig, "tasks": TasksConfig},
  "sft": {"data": DataConfig},
  "rl": {"algo": AlgoConfig, "rollout": RolloutConfig},
  "evaluate": {"eval": EvalConfig, "rollout": RolloutConfig, "tasks": TasksConfig},
}


def jobs_of(arm: str, budget: str = "small", seed: int = 0, workdir: str = "W"):
  parts = Plan(workdir, budget, seed, "jail").evaluations(ARMS[arm])
  return ordered(j for part in parts.values() for j in part)


def leaves(values: dict, above: str):
  """Values by their paths, over sections inside sections."""
  for name, value in values.items():
    path = f"{above}.{name}"
    if isinstance(value, dict) and value:
      yield from leaves(value, path)
    else:
      yield path, value


def fields(jobs) -> dict[str, list]:
  """Values by "journey.section.field", over the jobs of that journey."""
  out: dict[str, list] = {}
  for job in jobs:
    if job.kind != "world":
      for path, value in leaves(job.config.to_dict(), job.kind):
        if path.count(".") > 1 and path.rpartition(".")[2] not in _PLACES:
          out.setdefault(path, []).append(value)
  return out


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("arm", [a for a in ARMS if not ARMS[a].per_domain])
def test_an_arm_differs_from_the_full_recipe_in_the_fields_that_it_names(arm, budget):
  full, mine = fields(jobs_of("full", budget)), fields(jobs_of(arm, budget))
  same = {k for k in full if k.startswith("rl.")} if not ARMS[arm].rl else set()
  differ = {
    k
    for k in {*full, *mine} - same
    if full.get(k, [None])[-1] != mine.get(k, [None])[-1]
  }
  # Each is set; one may happen to be the full recipe's already ("tiny").
  named = {k for k in ARMS[arm].fields if k not in same}
  assert differ == named
  assert all(mine[k][-1] == v for k, v in ARMS[arm].fields.items() if k in named)
  assert arm == "full" or named or not ARMS[arm].rl


@pytest.mark.parametrize("budget", BUDGETS)
def test_every_config_is_one_that_its_journey_reads(budget):
  for arm in ARMS:
    for job in jobs_of(arm, budget):
      for name, cls in _READ.get(job.kind, {}).items():
        read_config(job.config[name], cls, name)


def test_equal_work_is_one_job_and_other_work_another():
  by_name: dict[str, str] = {}
  for seed in range(2):
    for arm in ARMS:
      jobs = jobs_of(arm, seed=seed)
      for place, job in enumerate(jobs):
        assert all(need.name in {j.name for j in jobs[:place]} for need in job.needs)
        text = str(job.config)
        assert by_name.setdefault(job.name, text) == text
  names = {arm: [j.name for j in jobs_of(arm)] for arm in ARMS}
  assert set(names["sft_only"][:3]) == set(names["full"][:3])  # world, team, SFT
  assert set(names["no_filtering"][:4]) == set(names["rl_from_unfiltered"][:4])
  assert len({tuple(n) for n in names.values()}) == len(ARMS)
  assert not set(names["full"]) & {j.name for j in jobs_of("full", seed=1)}
  assert names["full"] == [j.name for j in jobs_of("full", workdir="/else/where")]
  teams = {
    n
    for arm in ARMS
    for n in [next(j for j in jobs_of(arm) if j.kind == "distill").name]
  }
  assert len(teams) == 1  # one team's runs for all


def test_models_per_domain_share_the_tasks_and_have_the_budget_that_is_said():
  one = fields(jobs_of("full"))
  total, each = fields(jobs_of("per_domain_total")), fields(jobs_of("per_domain_each"))
  for steps in ("sft.data.steps", "rl.algo.steps"):
    assert abs(sum(total[steps]) - one[steps][0]) <= len(DOMAINS) - 1
    assert each[steps] == one[steps] * len(DOMAINS)
  families = set(each["rl.tasks.families"])
  assert families == set(DOMAINS.values()) == set(each["evaluate.tasks.families"])
  asked = [f for domain in DOMAINS.values() for f in domain]
  assert len(asked) == len(set(asked))


def played(answers: str, seed: int) -> ablation_report.Played:
  """Greedy attempts of tasks a, b, ..., right where there is a 1; sampled too."""
  attempts = []
  for task, right in zip("abcdef", answers, strict=False):
    text = Segment(Author.POLICY, "answer", "<answer> x</answer>")
    parts = {"answer": float(right), "format": 1.0}
    attempts.append(Trajectory(task, segments=[text], reward_parts=parts))
  return {"test": (attempts, attempts), "unseen": (attempts, attempts)}


def test_figures_are_means_over_seeds_and_differences_are_paired():
  mine = {0: played("1100", 0), 1: played("1110", 1)}
  full = {0: played("1111", 0), 1: played("1110", 1), 2: played("0000", 2)}
  figures = ablation_report.figures_of(mine, full)
  greedy = figures["greedy"]
  assert greedy["by_seed"] == {0: 0.5, 1: 0.75} and figures["seeds"] == [0, 1]
  assert greedy["mean"] == 0.625
  assert greedy["sd"] == pytest.approx(0.125 * 2**0.5)
  assert greedy["against"] == pytest.approx(-0.25)  # two of eight, none of seed 2
  low, high = greedy["against_ci95"]
  assert low < -0.25 < high <= 0
  assert figures["pass3"]["mean"] is None and figures["pass3"]["sd"] is None


def test_what_failed_costs_no_other_and_what_is_done_is_not_done_again(
  tmp_path, monkeypatch
):
  did = []
  broken = next(j.name for j in jobs_of("react", "tiny") if j.kind == "sft")

  def perform(job, workdir):
    did.append(job.name)
    if job.name == broken:
      raise ValueError("no good")

  monkeypatch.setattr(ablation_jobs, "perform", perform)
  jobs = ordered(j for arm in ("react", "sft_only") for j in jobs_of(arm, "tiny"))
  used = {j.name: "an arm" for j in jobs}
  first = Runner(str(tmp_path), jobs)
  left = first.left()
  first.run(used)
  lost = {j.name for j in jobs_of("react", "tiny") if j.kind != "world"} - {
    j.name for j in jobs_of("react", "tiny") if j.kind == "distill"
  }
  assert set(first.failed) == lost - {j.name for j in jobs_of("sft_only", "tiny")}
  assert all("ValueError: no good" in why for why in first.failed.values())
  assert 0 == first.left() < left

  did.clear()
  again = Runner(str(tmp_path), jobs)
  again.run(used)
  assert did == [broken]

  def interrupt(job, workdir):
    raise KeyboardInterrupt

  monkeypatch.setattr(ablation_jobs, "perform", interrupt)
  with pytest.raises(KeyboardInterrupt):
    Runner(str(tmp_path), jobs).run(used)


@pytest.mark.slow
def test_an_arm_is_run_measured_and_told_and_then_only_told(tmp_path, monkeypatch):
  workdir = str(tmp_path / "w")
  results = ablation.run(workdir, "tiny", 1, ["sft_only"])
  arm = results["arms"]["sft_only"]
  assert not results["failed"] and arm["greedy"]["mean"] is not None
  assert list(arm["greedy"]["by_seed"]) == [0] and arm["tokens"]["mean"] > 0
  assert "SFT only" in (tmp_path / "w" / "table.md").read_text()
  assert "SFT only" in (tmp_path / "w" / "report.html").read_text()
  assert (tmp_path / "w" / "plot.png").read_bytes().startswith(b"\x89PNG")
  monkeypatch.setattr(ablation_jobs, "perform", None)  # to call it would fail
  assert ablation.run(workdir, "tiny", 1, ["sft_only"]) == results


@pytest.mark.slow
def test_killed_again_and_again_all_arms_end(tmp_path: pathlib.Path):
  workdir = tmp_path / "w"
  command = [
    sys.executable,
    "-m",
    "experiments.studies.ablation",
    "--budget=tiny",
    "--seeds=1",
  ]
  command.append(f"--workdir={workdir}")
  for kind in ("distill", "sft", "rl", "evaluate"):
    run = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 1800
    while not list(workdir.glob(f"{kind}/*/config.json")):
      assert run.poll() is None and time.monotonic() < deadline
      time.sleep(0.05)
    run.send_signal(signal.SIGKILL)
    run.wait()
  done = {f: f.stat().st_mtime_ns for f in workdir.glob("*/*/done.json")}
  last = subprocess.run(command, capture_output=True, text=True, timeout=3600)
  assert last.returncode == 0, last.stderr
  assert {f: f.stat().st_mtime_ns for f in done} == done
  results = json.loads((workdir / "results.json").read_text())
  assert list(results["arms"]) == sorted(ARMS) and not results["failed"]
  table = (workdir / "table.md").read_text()
  assert all(arm.title in table for arm in ARMS.values())
