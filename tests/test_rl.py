"""RL end to end: a guessing policy learns the right answers, with real tools."""

from __future__ import annotations

import pathlib

import guessing
import ml_collections
import numpy as np
import pytest
import toy
from guessing import RIGHT, STEPS
from hypothesis import example, given
from hypothesis import strategies as st

from coa_jax import rl
from coa_jax.data.tasks.sampling import TaskSampler
from coa_jax.data.tasks.task import Task
from coa_jax.learner.advantages import group_relative, has_reward_variance
from coa_jax.learner.algorithms import PRESETS, preset
from coa_jax.learner.checkpoint import whole_steps
from coa_jax.learner.update import rewards_of
from coa_jax.model.hf.io import load_model
from coa_jax.protocol.trajectory import (
  Author,
  CallStatus,
  Status,
  Trajectory,
  read_trajectories,
)
from coa_jax.report import metric_names
from coa_jax.report.health import CollapsedError
from coa_jax.report.metrics import read_metrics
from coa_jax.rewards.shaping import ShapingConfig
from coa_jax.rollout import figures
from coa_jax.rollout.collect import RolloutCollector
from coa_jax.rollout.setup import make_worker
from coa_jax.rollout.types import RolloutConfig, SamplingConfig
from coa_jax.runtime.config import ConfigError


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> ml_collections.ConfigDict:
  """The RL config of a guessing policy."""
  return guessing.rl_config(tmp_path_factory.mktemp("policy"), toy.ONE_LAYER)


@pytest.fixture(scope="module")
def trained(config, tmp_path_factory):
  """A finished run's workdir and results."""
  workdir = str(tmp_path_factory.mktemp("rl"))
  return workdir, rl.run(config, workdir)


def test_reward_rises_from_a_guess_to_certainty(trained):
  workdir, results = trained
  log = read_metrics(f"{workdir}/metrics.jsonl", "rl")
  assert [row["step"] for row in log] == list(range(1, STEPS + 1))
  reward = [row["reward"] for row in log]
  assert 0.2 < reward[0] < 0.75
  assert np.mean(reward[-5:]) > 0.9
  assert results["dev_accuracy"] == 1.0
  assert results["reward"] == reward[-1]
  assert {"seconds_dev", "seconds_decode", "seconds_learn"} <= set(results)
  names = {name for row in log for name in row} - {"stage", "step", "seconds"}
  assert not [name for name in names if not metric_names.find(name)]


@pytest.mark.slow
def test_a_teacher_alone_teaches_what_it_learnt(config, trained, tmp_path):
  """On-policy distillation: rewards do not count; the teacher knows the answers."""
  workdir, _ = trained
  taught = config.copy_and_resolve_references()
  taught.distillation = dict(teacher=f"{workdir}/model", task=0.0)
  taught.algo.sampling.filter_groups = False
  taught.algo.steps = 12
  rl.run(taught, str(tmp_path / "w"))
  log = read_metrics(str(tmp_path / "w" / "metrics.jsonl"), "rl")
  kl = [row["teacher_kl"] for row in log]
  assert all(row["teacher_share"] == 1 for row in log)
  assert kl[-1] < 0.2 * kl[0]
  assert log[0]["reward"] < 0.75 < 0.9 < log[-1]["reward"]


def test_teachers_that_do_not_fit_are_refused(config, stock, tmp_path):
  taught = config.copy_and_resolve_references()
  taught.distillation = dict(teacher=taught.init)
  with pytest.raises(ConfigError, match="filter_groups=True leaves out groups with"):
    rl.run(taught, str(tmp_path / "w"))
  taught.algo.sampling.filter_groups = False
  taught.distillation.teacher = "http://127.0.0.1:1"
  taught.rollout.constrain = True
  with pytest.raises(ConfigError, match="reports log-probs at temperature 1"):
    rl.run(taught, str(tmp_path / "w"))
  other = tmp_path / "other"
  toy.save_policy(str(other), toy.params(layers=1), toy.ONE_LAYER)
  stock.save(other)
  taught.distillation.teacher = str(other)
  with pytest.raises(ValueError, match="it must have the tokenizer of"):
    rl.run(taught, str(tmp_path / "w"))
  assert not (tmp_path / "w").exists()


# The furthest from the default: one filters groups, one has a critic.
IN_CI = ("dapo", "ppo")


def marked(name: str):
  """A preset as a test parameter, marked slow or soak."""
  kind = "slow" if name in IN_CI else "soak"
  return pytest.param(name, marks=getattr(pytest.mark, kind))


@pytest.mark.parametrize("name", list(map(marked, PRESETS)))
def test_every_preset_learns(tmp_path, name: str):
  learning = guessing.rl_config(tmp_path)
  with learning.unlocked():
    learning.algo.update(preset(name))
    learning.algo.loss.critic_lr = 1e-3
  rl.run(learning, str(tmp_path / "w"))
  log = read_metrics(str(tmp_path / "w" / "metrics.jsonl"), "rl")
  reward = [row["reward"] for row in log]
  assert reward[0] < 0.75
  assert np.mean(reward[-5:]) > reward[0] + 0.15, reward


def test_every_update_was_on_policy(trained):
  workdir, results = trained
  log = read_metrics(f"{workdir}/metrics.jsonl", "rl")
  learned = [row for row in log if "ratio" in row]
  assert len(learned) > 5
  for row in learned:
    assert row["ratio"] == pytest.approx(1.0, abs=1e-5)
    assert row["clipped"] == 0 and abs(row["kl"]) < 1e-6
  assert 0 < results["logp_diff"] < 2e-5
  assert all(
    row["logp_diff_share"] == row["ratio_outlier_share"] == 0 for row in learned
  )
  assert list(pathlib.Path(workdir).glob("events.out.tfevents.*"))


@pytest.mark.slow
def test_a_run_whose_sampler_and_learner_differ_stops_and_saves_nothing(
  config, tmp_path
):
  """Half-precision activations: the guard counts tokens, and can stop the run."""
  low = config.copy_and_resolve_references()
  low.model.dtype = "bfloat16"
  low.algo.update(steps=1, guards=dict(max_logp_diff=1e-4))
  rl.run(low, str(tmp_path / "open"))
  (row,) = read_metrics(str(tmp_path / "open" / "metrics.jsonl"), "rl")
  assert 0.015 < row["logp_diff_share"] < 1
  low.algo.guards.max_logp_diff_share = 0.01
  with pytest.raises(
    ValueError, match=r"step 1: .* differ by more than algo.guards.max_logp_diff=0.0001"
  ):
    rl.run(low, str(tmp_path / "closed"))
  assert not list((tmp_path / "closed").glob("checkpoints/*"))
  assert not (tmp_path / "closed" / "model").exists()


def test_rollouts_are_on_record_with_what_the_real_tool_said(trained):
  played = read_trajectories(f"{trained[0]}/trajectories/step_000000.jsonl")
  assert len(played) == 16
  by_task = {q: [t for t in played if t.task_id == q] for q in RIGHT}
  assert all([t.sample for t in ts] == list(range(8)) for ts in by_task.values())
  whole = [t for t in played if t.status == Status.ENDED]
  assert len(whole) >= 14
  for t in whole:
    assert t.calls[0].status == CallStatus.OK and t.calls[0].result == "5"
    assert t.reward == t.reward_parts["answer"] * t.reward_parts["format"]
    policy = [s for s in t.segments if s.author == Author.POLICY]
    assert all(len(s.ids) == len(s.logps) == len(s.versions) for s in policy)


def collected(config, toolbox, samples: int):
  """One batch of the guessing policy's rollouts, with this toolbox."""
  cfg, params = load_model(config.init)
  sampling = SamplingConfig(prompts=2, samples=samples, rounds=3)
  rollout = RolloutConfig(style="brief", slots=8, max_len=toy.MAX_LEN)
  worker = make_worker(cfg, toy.tokenizer(), rollout, ("code",))
  collector = RolloutCollector(
    worker,
    TaskSampler([Task(q, q, (a,)) for q, a in RIGHT.items()], 0),
    toolbox,
    sampling,
    has_reward_variance=lambda groups: has_reward_variance(rewards_of(groups)),
    steps=1,
    seed=0,
  )
  with worker, collector:
    return collector.next(params, 0)


def test_an_infrastructure_failure_leaves_its_group_and_the_rest_learns(config):
  calls = iter(range(1000))

  def flaky(name: str, arguments: str):
    down = toy.ToolCall(name, arguments, "", CallStatus.INFRASTRUCTURE)
    return down if next(calls) % 4 == 0 else "5"

  out = collected(config, toy.TableToolbox(flaky), 8)
  failed = [t for t in out.played if t.status == Status.INFRASTRUCTURE]
  assert failed and all(t.reward is None for t in failed)
  reward_GK = rewards_of(out.groups)
  left = [t for group in out.groups for t in group if t.reward is None]
  assert left and np.isnan(reward_GK).sum() == len(left)
  advantage_GK = group_relative(reward_GK)
  assert not advantage_GK[np.isnan(reward_GK)].any() and advantage_GK.any()
  np.testing.assert_allclose(advantage_GK.sum(1), 0, atol=1e-6)
  described = figures.describe(out)
  graded = [t.reward for t in out.played if t.reward is not None]
  assert described["reward"] == pytest.approx(np.mean(graded))
  assert described["infrastructure"] == len(failed)
  # Entropies by role, weighted by tokens, add up to the total.
  sampled: dict[str, list[float]] = {}
  for s in (s for t in out.played for s in t.segments if s.logps):
    sampled.setdefault("tool" if s.role == "code" else s.role, []).extend(s.logps)
  assert {"think", "tool", "answer"} <= set(sampled)
  found = {k: v for k, v in described.items() if k.startswith("entropy_")}
  assert set(found) == {f"entropy_{role}" for role in sampled}
  calls = [c for t in out.played for c in t.calls]
  share = sum(c.status == CallStatus.INFRASTRUCTURE for c in calls) / len(calls)
  assert described["failed_calls_infrastructure"] == pytest.approx(share) and share
  parts = [found[f"entropy_{role}"] * len(x) for role, x in sampled.items()]
  assert sum(parts) == pytest.approx(-sum(sum(x) for x in sampled.values()))


def test_figures_count_what_was_cut_off_or_repeated_and_whose_fault_calls_were(config):
  out = collected(config, toy.TableToolbox(lambda *_: "5"), 4)
  before = figures.describe(out)
  changed = out.played[0]
  changed.status = Status.TRUNCATED
  think = next(s for s in changed.segments if s.role == "think")
  changed.segments.append(think)
  share = 1 / len(out.played)
  after = figures.describe(out)
  assert after["truncated_share"] - before["truncated_share"] == pytest.approx(share)
  assert after["repeated_share"] - before["repeated_share"] == pytest.approx(share)

  names = [f"failed_calls_{owner}" for owner in ("model", "tool", "infrastructure")]
  assert [before[name] for name in names] == [0, 0, 0]
  calls = [c for t in out.played for c in t.calls]
  for call, status in zip(calls, ("model", "model", "tool"), strict=False):
    call.status = CallStatus(status)
  shares = [figures.describe(out)[name] for name in names]
  assert shares == pytest.approx([2 / len(calls), 1 / len(calls), 0])
  for t in out.played:  # without calls there are no shares
    t.calls.clear()
  assert not set(names) & set(figures.describe(out))


# Answer score, format score (None: an ungraded attempt), penalty.
_ATTEMPT = st.tuples(
  st.sampled_from([0, 0.25, 0.5, 1]),
  st.sampled_from([0, 1, None]),
  st.sampled_from([0, -0.02, -0.4, -1]),
)


@given(
  st.sampled_from(["product", "weighted", "none"]),
  st.lists(_ATTEMPT, min_size=1, max_size=4),
)
@example("none", [(0.1 + 0.2, 1, 0), (0.3, 1, 0), (0.3, 1, -1)])  # rounding
def test_groups_are_filtered_by_right_answers(format, attempts):
  weight = 0.5 if format == "weighted" else 0.0
  group, scores = [], []
  for answer, form, penalty in attempts:
    if form is None:
      group.append(Trajectory("t"))
      continue
    base = {"product": answer * form, "none": answer, "weighted": (answer + form) / 2}
    parts = {"answer": answer, "format": form, "overlong": penalty}
    group.append(Trajectory("t", reward=base[format] + penalty, reward_parts=parts))
    scores.append(answer * form if format == "product" else answer)
  single = Trajectory("t", reward=1.0, reward_parts={"answer": 1.0, "format": 1.0})
  mixed = bool(scores) and max(scores) - min(scores) > 1e-6
  found = rl.has_mixed_answers(ShapingConfig(format, weight), [group, [single]])
  assert found.tolist() == [mixed, False]


@pytest.mark.slow
def test_under_a_grammar_an_update_is_on_policy_too(config, tmp_path):
  constrained = config.copy_and_resolve_references()
  constrained.algo.steps = 2
  constrained.rollout.update(constrain=True, top_k=50)
  results = rl.run(constrained, str(tmp_path))
  assert 0 < results["logp_diff"] < 2e-5
  log = read_metrics(f"{tmp_path}/metrics.jsonl", "rl")
  for row in log:
    assert 0 < row["removed_mass"] < 1
    assert row["ratio"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.slow
def test_a_step_that_teaches_nothing_still_ends(config, tmp_path):
  stuck = config.copy_and_resolve_references()
  tasks = tmp_path / "tasks.jsonl"
  tasks.write_text('{"question": "sky", "answers": ["green"]}\n')
  stuck.tasks.uri = stuck.dev.uri = str(tasks)
  stuck.algo.update(steps=3, sampling=dict(samples=2, prompts=1))
  stuck.dev.every = 2
  results = rl.run(stuck, str(tmp_path / "w"))
  assert results["logp_diff"] is None and results["reward"] == 0.0
  log = read_metrics(str(tmp_path / "w" / "metrics.jsonl"), "rl")
  assert [("dev_accuracy" in row) for row in log] == [True, False, True]
  phase = sum(row.get("seconds_dev", 0.0) for row in log)
  assert results["seconds_dev"] == pytest.approx(phase)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"algo.batch.length": 64}, r"batch\.length=64 is shorter than rollout\.max"),
    ({"tools.tools": ("code", "x")}, "no tool 'x'"),
    ({"init": ""}, "config lacks field 'init'"),
  ],
)
def test_refusals_come_before_any_work(config, tmp_path, changes, message):
  bad = config.copy_and_resolve_references()
  bad.update_from_flattened_dict(changes)
  with pytest.raises(ValueError, match=message):
    rl.run(bad, str(tmp_path / "w"))
  assert not (tmp_path / "w").exists()


def test_the_phases_of_every_step_add_up_to_its_wall_time(trained):
  log = read_metrics(f"{trained[0]}/metrics.jsonl", "rl")
  spent = [sum(s for k, s in row.items() if k.startswith("seconds_")) for row in log]
  took = np.diff([0.0, *(row["seconds"] for row in log)])
  # `seconds` is rounded to milliseconds, and the clocks stop at different lines.
  np.testing.assert_allclose(spent, took, rtol=0.05, atol=0.3)
  for row in log:
    assert min(row["seconds_decode"], row["seconds_sync"], row["seconds_tools"]) > 0
    rate = row["generated_tokens"] / row["seconds_decode"]
    assert row["decode_tokens_per_second"] == pytest.approx(rate)
  assert all(row["learn_tokens_per_second"] > 0 for row in log if "ratio" in row)


@pytest.mark.slow
def test_a_collapse_is_noticed_and_stops_the_run_after_a_checkpoint(
  config, tmp_path, capsys
):
  """A far too high learning rate; without `watch.stop` the run only warns."""
  bad = config.copy_and_resolve_references()
  bad.algo.steps = 8
  bad.optim.update(lr=3.0, schedule="constant", clip_norm=0.0)
  bad.dev.every = 8
  bad.checkpoint.every = 100
  bad.watch = dict(stop=True, patience=2)
  with pytest.raises(
    CollapsedError, match=r"stopped at step \d \(saved\) as watch.stop"
  ):
    rl.run(bad, str(tmp_path / "w"))
  log = read_metrics(str(tmp_path / "w" / "metrics.jsonl"), "rl")
  assert 2 <= len(log) < 8
  (saved,) = (tmp_path / "w" / "checkpoints").glob("[0-9]*")
  assert int(saved.name) == log[-1]["step"]
  assert not (tmp_path / "w" / "model").exists()
  warned = [x for x in capsys.readouterr().err.splitlines() if "warning: step" in x]
  assert warned and all("watch." in line for line in warned)
  # Without `watch.stop` the run resumes: a workdir does not bind section `watch`.
  bad.watch.stop = False
  assert rl.run(bad, str(tmp_path / "w"))["steps"] == 8


@pytest.mark.slow
def test_an_update_that_diverges_ends_the_run_and_is_never_saved(
  config, tmp_path, monkeypatch
):
  """Also without `watch.stop`; a run resumes from the checkpoint before."""
  bad = config.copy_and_resolve_references()
  bad.checkpoint.update(every=1)
  learn = rl.PolicyUpdate.__call__

  def diverging(self, state, *args):
    state, values = learn(self, state, *args)
    return state, values | {"loss": float("nan")} if int(state.step) == 3 else values

  monkeypatch.setattr(rl.PolicyUpdate, "__call__", diverging)
  with pytest.raises(CollapsedError, match=r"step 3 \(not saved.*loss is nan"):
    rl.run(bad, str(tmp_path))
  assert whole_steps(str(tmp_path / "checkpoints")) == [1, 2]


@pytest.mark.slow
def test_an_interrupted_run_is_stopped_where_it_would_have_been(config, tmp_path):
  watched = config.copy_and_resolve_references()
  watched.checkpoint.every = 1
  # No share reaches 2, so the third step warns.
  limits = dict(reward_variance_share=2.0)
  watched.watch = dict(stop=True, patience=3, limits=limits)
  with guessing.killed_before_log_of(3):
    rl.run(watched, str(tmp_path))
  for _ in range(2):  # the second stops before any rollout
    with pytest.raises(CollapsedError, match=r"stopped at step 3 \(saved\)"):
      rl.run(watched, str(tmp_path))
    assert len(read_metrics(str(tmp_path), "rl")) == 3
