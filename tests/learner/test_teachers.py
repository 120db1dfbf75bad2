"""On-policy distillation: the teachers' term by hand, and its properties."""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np
import pytest
import toy
from test_update import BATCH, CFG, build, groups, host, moved

from coa_jax.learner.algorithms import BatchConfig
from coa_jax.learner.teachers import (
  DistillationConfig,
  ModelTeacher,
  Teachers,
  make_hinted,
)
from coa_jax.model.sharding import ONE_DEVICE
from coa_jax.model.transformer import init_params
from coa_jax.protocol.grammar.automaton import compile_constraint
from coa_jax.protocol.trajectory import Author, Segment, Trajectory

COEF = 0.5


def log(*p: float) -> list[float]:
  return [math.log(x) for x in p]


def unchanged(trajectory: Trajectory) -> Trajectory:
  return trajectory


def folder(seed: int = 1, batch: BatchConfig = BATCH, **options) -> ModelTeacher:
  """A teacher whose weights differ from the policy's."""
  return ModelTeacher(CFG, init_params(CFG, seed), batch, ONE_DEVICE, **options)


def flat() -> list[Trajectory]:
  return [t for group in groups() for t in group]


def as_sampled(t: Trajectory) -> Trajectory:
  """The trajectory with its policy text cut into spans, as in a rollout."""
  segments = []
  for s in t.segments:
    if s.author == Author.POLICY:
      segments += toy.tokenizer().policy_segments(s.ids, s.logps, [0] * len(s.ids))
    else:
      segments.append(s)
  return dataclasses.replace(t, segments=segments)


def test_a_case_by_hand():
  """Probabilities: student .5, .25, observation, .8; teacher .125, .5, -, .4."""
  t = Trajectory(
    "t",
    [
      Segment(Author.PROMPT, "question", "", [1, 2]),
      Segment(Author.POLICY, "think", "", [3, 4], log(0.5, 0.25)),
      Segment(Author.TOOL, "observation", "", [5, 6]),
      Segment(Author.POLICY, "answer", "", [7], log(0.8)),
    ],
  )
  config = DistillationConfig(teacher="x", coef=COEF)
  scorers = {"x": lambda trajectories, policy: [np.array(log(0.125, 0.5, 0.4))]}
  (term,), figures = Teachers(config, scorers, unchanged).terms([t], None)
  np.testing.assert_allclose(term / COEF, [-1.386294, 0.693147, -0.693147], atol=1e-6)
  assert figures["teacher_kl"] == pytest.approx(0.462098, abs=1e-6)
  assert figures["teacher_share"] == 1
  # By role: only the answer.
  config = DistillationConfig(roles={"answer": "x"})
  (term,), figures = Teachers(config, scorers, unchanged).terms([t], None)
  np.testing.assert_allclose(term, [0, 0, -0.693147], atol=1e-6)
  assert figures["teacher_share"] == pytest.approx(1 / 3)


def test_the_policy_as_its_own_teacher_changes_nothing():
  teacher = ModelTeacher(CFG, toy.params(layers=1), BATCH, ONE_DEVICE)
  teachers = Teachers(DistillationConfig(teacher="x"), {"x": teacher}, unchanged)
  terms, figures = teachers.terms(flat(), None)
  assert max(abs(x).max() for x in terms) < 1e-5
  assert abs(figures["teacher_kl"]) < 1e-6


def test_two_teachers_of_one_folder_are_one():
  trajectories = [as_sampled(t) for t in flat()]
  same = folder()
  one = Teachers(DistillationConfig(teacher="x"), {"x": same}, unchanged)
  two = Teachers(
    DistillationConfig(teacher="y", roles={"think": "x"}),
    {"x": same, "y": same},
    unchanged,
  )
  for a, b in zip(
    one.terms(trajectories, None)[0], two.terms(trajectories, None)[0], strict=True
  ):
    np.testing.assert_array_equal(a, b)


def test_batching_changes_nothing():
  whole = folder(batch=BatchConfig(rows=2, length=256))(flat(), None)
  alone = folder(batch=BatchConfig(rows=1, length=128))
  for expected, t in zip(whole, flat(), strict=True):
    np.testing.assert_allclose(alone([t], None)[0], expected, atol=2e-5)


def test_teachers_by_role_then_family():
  config = DistillationConfig(teacher="a", roles={"code": "b"}, families={"sum": "c"})
  assert config.sources == ["b", "c", "a"]
  t = as_sampled(flat()[0])
  t.meta["family"] = "sum"
  roles = [s.role for s in t.segments if s.author == Author.POLICY for _ in s.ids]
  assert "code" in roles and len(set(roles)) > 2
  assert config.of_tokens(t) == ["b" if r == "code" else "c" for r in roles]


@pytest.mark.slow
def test_a_teacher_reads_the_grammar_over_its_own_vocabulary(tokenizer):
  """Forced tokens cost neither model anything; padded vocabulary is never allowed."""
  constraint = compile_constraint(toy.VARIANT, tokenizer, CFG.vocab_size)
  params = init_params(CFG, 1)
  free = ModelTeacher(CFG, params, BATCH, ONE_DEVICE)
  masked = ModelTeacher(CFG, params, BATCH, ONE_DEVICE, constraint=constraint)
  # The same model with embedding rows for unused ids.
  wide = dataclasses.replace(CFG, vocab_size=CFG.vocab_size + 64)
  more = jax.random.normal(jax.random.key(0), (64, CFG.width))
  padded = {**params, "embed": jax.numpy.concatenate([params["embed"], more])}
  same = ModelTeacher(wide, padded, BATCH, ONE_DEVICE, constraint=constraint)
  scores = zip(
    free(flat(), None), masked(flat(), None), same(flat(), None), strict=True
  )
  for by_free, by_masked, by_same in scores:
    assert (by_masked >= by_free - 1e-5).all() and (by_masked > by_free + 0.1).any()
    np.testing.assert_allclose(by_same, by_masked, atol=1e-5)


def test_a_hint_is_read_by_the_teacher_alone(tokenizer):
  hinted = make_hinted(
    "The answer is {answers}.", tokenizer, toy.VARIANT, "brief", length=256
  )
  t = flat()[0]
  t.meta = {"question": "What is it?", "answers": ["12", "twelve"]}
  out = hinted(t)
  assert out.segments[0].text == "What is it?\n\nThe answer is 12|twelve."
  own = [s for s in t.segments if s.author != Author.PROMPT]
  assert out.segments[-len(own) :] == own
  assert make_hinted("x" * 500, tokenizer, toy.VARIANT, "brief", 256)(t) is None


def test_a_trajectory_that_no_teacher_can_read_is_not_scored():
  config = DistillationConfig(hint="{answers}")
  assert config.sources == [""]
  teachers = Teachers(config, {"": folder()}, lambda t: None)
  assert teachers.is_policy
  terms, figures = teachers.terms(flat(), None)
  assert not any(x.any() for x in terms)
  assert figures == {"teacher_kl": 0.0, "teacher_share": 0.0}


def updated(teachers: Teachers | None, equal: bool = False):
  """The parameters after an update, and its metrics."""
  update, state, frozen = build(lr=0.05, teachers=teachers)
  played = groups()
  if equal:
    for t in (t for group in played for t in group):
      t.reward = 0.5
  state, values = update(state, frozen, played)
  return host(update.policy(state, frozen)), values


@pytest.mark.slow
def test_groups_with_equal_rewards_learn_from_a_teacher():
  before = host(toy.params(layers=1))
  without, _ = updated(None, equal=True)
  assert not moved(before, without)
  teachers = Teachers(DistillationConfig(teacher="x"), {"x": folder()}, unchanged)
  taught, values = updated(teachers, equal=True)
  assert moved(before, taught)
  assert values["teacher_kl"] > 0 and values["teacher_share"] == 1


@pytest.mark.slow
def test_without_the_tasks_reward_it_does_not_count():
  alone = DistillationConfig(teacher="x", task=0.0)
  a, _ = updated(Teachers(alone, {"x": folder()}, unchanged))
  b, _ = updated(Teachers(alone, {"x": folder()}, unchanged), equal=True)
  assert not moved(a, b)


@pytest.mark.slow
def test_a_teacher_of_equal_scores_leaves_the_tasks_update():
  mirror = {
    "x": lambda trajectories, policy: [np.array(logps(t)) for t in trajectories]
  }
  expected, _ = updated(None)
  same, values = updated(Teachers(DistillationConfig(teacher="x"), mirror, unchanged))
  assert not moved(expected, same)
  assert values["teacher_kl"] == 0


def logps(t: Trajectory) -> list[float]:
  return [x for s in t.segments if s.author == Author.POLICY for x in s.logps]


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({}, "no teacher: set teacher"),
    ({"roles": {"coder": "x"}}, "no tag 'coder'; did you mean 'code'"),
  ],
)
def test_refused(fields: dict, message: str):
  with pytest.raises(ValueError, match=message):
    DistillationConfig(**fields)
