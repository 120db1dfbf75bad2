"""The filters: each drop reason, the sampling ratios, and counts that add up."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from written import END, GOOD, PLAIN, SEEN, UNIFIED, judge, make

from coa_jax.data.teacher.filters import (
  STAGES,
  FiltersConfig,
  filter_trajectories,
)
from coa_jax.protocol.trajectory import ToolCall

POOR = [("reflection", "wrong page tool_effectiveness : Poor")]
MENDED = [*PLAIN, *POOR, *PLAIN[:3], ("wiki_search", "Tarn"), SEEN, *END]
FAILED_CHECK = [
  *PLAIN, ("suggested_answer", "y"), ("double_check", "1"),
  ("think", "t"), ("wiki_search", "Ivo"), SEEN, ("reflection", "r"), *END,
]  # fmt: skip


def kept(*pairs, grade=judge, **config):
  return filter_trajectories(pairs, UNIFIED, grade, FiltersConfig(**config))


def run(spans, **config):
  left, funnel = kept(make(spans), **config)
  return len(left), funnel


def test_a_good_trajectory_passes_once_with_its_reward():
  left, funnel = kept(make(GOOD), corrected_copies=3)
  assert len(left) == 1 and left[0].reward == 1.0
  assert left[0].reward_parts == {"answer": 1.0}
  assert funnel == {
    "in": 1,
    "complexity": {"kept": 1, "dropped": {}},
    "quality": {"kept": 1, "dropped": {}},
    "contamination": {"kept": 1, "dropped": {}},
    "reflection": {"kept": 1, "dropped": {}},
    "duplicates": {"kept": 1, "dropped": {}},
    "error_correction": {
      "ungraded": 0, "reflected": 1, "corrected": 0, "added": 0, "kept": 1
    },
  }  # fmt: skip


@pytest.mark.parametrize(
  "spans, config, stage, reason",
  [
    (GOOD, dict(min_activations=8), "complexity", "few_activations"),
    (GOOD, dict(min_calls=2), "complexity", "few_calls"),
    ([*GOOD[:-1], ("answer", "y")], {}, "quality", "wrong_answer"),
    (GOOD[1:], {}, "quality", "protocol_illegal_transition"),
    ([*PLAIN, *PLAIN[2:], *END], {}, "quality", "redundant_calls"),
    ([*PLAIN, *END], dict(keep_unreflected=0.0), "reflection", "no_reflection"),
  ],
)
def test_each_reason_drops_at_its_stage(spans, config, stage, reason):
  count, funnel = run(spans, **config)
  assert count == 0 and funnel[stage] == {"kept": 0, "dropped": {reason: 1}}


@pytest.mark.parametrize(
  ("parts", "left"),
  [
    ({"answer": 0.0}, 0),  # the verdict of a test run, for example
    ({"answer": 1.0, "format": 0.0}, 1),
    ({}, 1),  # the judge decides, right
  ],
)
def test_a_verdict_that_comes_with_a_trajectory_is_kept(parts, left):
  task, trajectory = make(GOOD)
  trajectory.reward_parts = parts
  out, funnel = kept((task, trajectory))
  assert len(out) == left
  assert funnel["quality"]["dropped"] == ({} if left else {"wrong_answer": 1})


def test_thresholds_are_reached_exactly():
  assert run(GOOD, min_activations=7)[0] == 1  # all spans except observation and answer
  assert run(GOOD, min_calls=1)[0] == 1
  assert run([*PLAIN, *PLAIN[2:], *END], max_repeats=1, keep_unreflected=1.0)[0] == 1


def test_inputs_that_differ_in_white_space_are_the_same():
  twice = [*PLAIN, ("think", "t"), ("wiki_search", " Tarn  Hollow "), SEEN, *END]
  assert run(twice)[1]["quality"]["dropped"] == {"redundant_calls": 1}


@pytest.mark.parametrize("spans", [MENDED, FAILED_CHECK])
def test_a_corrected_call_is_a_repetition(spans):
  left, funnel = kept(make(spans), corrected_copies=3)
  assert [t.meta.get("copy") for t in left] == [None, 1, 2]
  assert len({t.text for t in left}) == 1
  last = funnel["error_correction"]
  assert (last["corrected"], last["added"], last["kept"]) == (1, 2, 3)


@pytest.mark.parametrize("reward", [None, 0.0])
def test_only_what_is_known_to_have_ended_right_is_repeated(reward):
  config = dict(corrected_copies=3, min_reward=0.0)
  left, funnel = kept(make(MENDED), grade=lambda *_: reward, **config)
  assert len(left) == 1 and funnel["error_correction"]["corrected"] == 0


def test_down_sampling_keeps_its_share_and_does_not_look_at_others():
  pairs = [make([*PLAIN, *END], i) for i in range(1000)]
  left, _ = kept(*pairs, keep_unreflected=0.3)
  assert 250 < len(left) < 350
  alone, _ = kept(*pairs[::7], keep_unreflected=0.3)
  assert {t.task_id for t in alone} == {t.task_id for t in left} & {
    task.id for task, _ in pairs[::7]
  }


KINDS = [GOOD, MENDED, FAILED_CHECK, GOOD[1:], [*PLAIN, *END], END, [*GOOD, *GOOD]]


@settings(max_examples=60, deadline=None)
@given(
  st.lists(st.sampled_from(KINDS), max_size=30),
  st.floats(0, 1),
  st.integers(1, 3),
  st.integers(0, 8),
)
def test_the_funnel_adds_up(chosen, share, copies, least):
  pairs = [make(spans, i) for i, spans in enumerate(chosen)]
  config = dict(keep_unreflected=share, corrected_copies=copies)
  left, funnel = kept(*pairs, min_activations=least, **config)
  reached = funnel["in"]
  assert reached == len(pairs)
  for stage in STAGES:
    assert reached == funnel[stage]["kept"] + sum(funnel[stage]["dropped"].values())
    reached = funnel[stage]["kept"]
  last = funnel["error_correction"]
  assert last["kept"] == reached + last["added"] == len(left)
  assert last["added"] == last["corrected"] * (copies - 1)


def test_an_unjudgeable_trajectory_is_kept_and_counted():
  left, funnel = kept(make(GOOD), grade=lambda *_: None)
  assert left[0].reward is None and funnel["error_correction"]["ungraded"] == 1


def test_near_duplicates_keep_the_first(tmp_path):
  words = " ".join(f"w{i}" for i in range(60))
  spans = [("think", words), *PLAIN[1:], ("reflection", "r"), *END]
  close = [("think", words + " more"), *spans[1:]]
  other = [("think", " ".join(f"v{i}" for i in range(60))), *spans[1:]]
  pairs = [make(s, i) for i, s in enumerate([spans, close, other])]
  left, funnel = kept(*pairs, max_similarity=0.8)
  assert [t.task_id for t in left] == ["t0", "t2"]
  assert funnel["duplicates"]["dropped"] == {"near_duplicate": 1}
  assert len(kept(*pairs)[0]) == 3


def test_tasks_of_an_evaluation_set_are_dropped(tmp_path):
  question = "Which river runs through the town where Mira Quill was born?"
  path = tmp_path / "eval.jsonl"
  path.write_text(json.dumps({"question": question, "answer": "x"}) + "\n")
  leaked = f"Forum: {question.lower()} The answer is x."
  leak = [*PLAIN[:-1], ("observation", leaked), ("reflection", "r"), *END]
  left, funnel = kept(make(leak, 0), make(GOOD, 1), benchmarks=(str(path),))
  assert [t.task_id for t in left] == ["t1"]
  assert funnel["contamination"]["dropped"] == {"benchmark": 1}


def test_blocked_domains_go():
  task, trajectory = make(GOOD)
  trajectory.calls.append(ToolCall("crawl_page", "https://hf.co/datasets/gaia"))
  left, funnel = kept((task, trajectory), blocked=("hf.co/datasets",))
  assert not left and funnel["contamination"]["dropped"] == {"blocked_domain": 1}
