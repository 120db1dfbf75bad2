"""pass@k, votes, intervals and the summary, against hand-made trajectories."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
import samples
import scipy.stats

from coa_jax.protocol.trajectory import CallStatus, Status, ToolCall
from coa_jax.report import scores
from coa_jax.report.set_figures import evidence_recall


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("c", range(6))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(c, k):
  subsets = list(itertools.combinations([1] * c + [0] * (5 - c), k))
  expected = sum(map(any, subsets)) / len(subsets)
  assert scores.pass_at_k(5, c, k) == pytest.approx(expected)


def test_too_few_samples_are_refused():
  with pytest.raises(ValueError, match="needs at least 3 samples; got n=2"):
    scores.pass_at_k(2, 1, 3)
  with pytest.raises(ValueError, match="best of 3 needs 3"):
    scores.best_of_k(votes("a", "b"), 3)


def test_the_interval_covers_as_often_as_it_says():
  rng = np.random.default_rng(1)
  hits = 0
  for trial in range(100):
    low, high = scores.interval(rng.random(80) < 0.3, seed=trial)
    hits += low <= 0.3 <= high
  assert 88 <= hits <= 100


def test_the_interval_of_a_ratio_weighs_tasks_by_their_denominator():
  low, high = scores.interval([1, 0, 3], [2, 0, 6])
  assert (low, high) == (0.5, 0.5)
  assert scores.interval([], []) is None
  assert scores.interval([0, 0], [0, 0]) is None
  assert scores.interval([0, 1, 1]) == scores.interval([0, 1, 1])


@pytest.mark.parametrize(("right", "tasks"), [(0, 300), (300, 300), (17, 80), (1, 1)])
def test_a_proportion_of_yes_and_no_has_wilsons_interval(right, tasks):
  expected = scipy.stats.binomtest(right, tasks).proportion_ci(method="wilson")
  found = scores.proportion_interval([1.0] * right + [0.0] * (tasks - right))
  assert found == pytest.approx([expected.low, expected.high], abs=1e-12)


def test_no_proportion_has_an_interval_without_width():
  """A task's samples are not independent, so n is the number of tasks."""
  low, high = scores.proportion_interval([0.0, 0.0, 0.0], [4, 9, 0])
  assert (low, high) == (0, scores.wilson(0, 2)[1]) and high > 0.5
  low, high = scores.proportion_interval([4.0, 9.0], [4, 9])
  assert high == 1 and low < 0.5
  thirds = [1 / 3, 0.0, 1.0, 2 / 3] * 5
  assert scores.proportion_interval(thirds) == scores.interval(thirds)
  for share in (1 / 3, 2 / 3):
    widths = []
    for tasks in (1, 2, 50):
      low, high = scores.proportion_interval([share] * tasks)
      assert 0 < low < share < high < 1
      widths.append(high - low)
    assert widths == sorted(widths, reverse=True)
  assert scores.proportion_interval([], []) is None
  assert scores.proportion_interval([0.0], [0]) is None


@pytest.mark.parametrize(
  ("one", "other", "same"),
  [
    ("The Seine.", "seine", True),
    ("1/2", "0.5", True),
    ("1/2", "12", False),
    ("-3", "3", False),
    ("\\boxed{7}", "7.0", True),
    ("-x", "x", False),
    ("x + 1", "x+1", True),
    ("1,000", "1000", True),
  ],
)
def test_vote_key(one, other, same):
  assert (scores.vote_key(one) == scores.vote_key(other)) == same


def votes(*answers, logps=None):
  """Attempts at one task with these answers; "Paris" is right."""
  logps = logps or [-1.0] * len(answers)
  return [
    scores.scored(samples.trajectory(sample=i, answer=a, right=a == "Paris", logp=logp))
    for i, (a, logp) in enumerate(zip(answers, logps, strict=True))
  ]


@pytest.mark.parametrize(
  ("answers", "logps", "chosen"),
  [
    (("Rome", "Paris", "the Paris"), None, 1),  # the majority
    (("Rome", "Paris", "Oslo"), [-1, -0.1, -2], 1),  # in a tie, the likelier one
    (("Rome", "Paris", "Oslo"), None, 0),  # equally likely: the first
    (("Rome", "Rome", "Paris", "Paris", "Paris"), None, 0),  # only three vote
    ((None, None, "Paris"), None, 2),  # no answer, no vote
    ((None, None, None), None, 0),
  ],
)
def test_best_of_3_is_a_vote(answers, logps, chosen):
  attempts = votes(*answers, logps=logps)
  assert scores.best_of_k(attempts, 3) is attempts[chosen]


def test_mean_logp_counts_policy_tokens_only():
  t = samples.trajectory(logp=-1.0)
  t.segments[5].logps = [-100.0] * 9  # the observation's
  assert -2.1 < scores.mean_logp(t) < -1.0
  for s in t.segments:
    s.logps = []
  assert scores.mean_logp(t) == -math.inf


@pytest.mark.parametrize(
  ("name", "arguments", "bad"),
  [
    ("wiki_search", "Paris", False),
    ("wiki_search", " ", True),
    ("code", "```py\n1 / 0\n```", False),
    ("code", "print(1)", True),
    ("calculator", "1 + 1", True),
    ("wiki_search", "<think>x</think> Paris", True),
  ],
)
def test_malformed_is_not_the_same_as_a_program_that_raised(name, arguments, bad):
  call = ToolCall(name, arguments, "error", CallStatus.MODEL)
  assert scores.malformed(call) == bad


def test_summary_by_hand():
  greedy = [
    samples.trajectory("a", right=True),
    samples.trajectory("b", answer="Rome", right=False),
    samples.trajectory("c", status=Status.INFRASTRUCTURE, answer=None),
  ]
  greedy[1].calls.append(ToolCall("code", "no fence"))
  greedy[1].usage.tool_calls = 2
  sampled = [
    *(samples.trajectory("a", i, right=i < 2, answer=x) for i, x in enumerate("ppr")),
    *(samples.trajectory("b", i, right=i == 3, answer="r") for i in range(4)),
    *(samples.trajectory("c", i, right=True) for i in range(2)),
  ]
  out = scores.summary(greedy, sampled)
  assert out["pass1_greedy"] == 0.5
  assert out["pass1_sampled"] == pytest.approx((2 / 3 + 1 / 4 + 1) / 3)
  # c has two samples only, so pass@3 and the vote are over a and b
  assert out["pass3"] == pytest.approx((1 + 3 / 4) / 2)
  assert out["best_of_3"] == 0.5
  assert out["tool_calls_per_task"] == 1.5
  totals = [t.usage.total for t in greedy[:2]]
  assert out["tokens_per_task"] == sum(totals) / 2
  generated = [t.usage.generated for t in greedy[:2]]
  assert out["generated_tokens_per_task"] == sum(generated) / 2
  assert out["malformed_rate"] == pytest.approx(1 / 12)
  agent = scores.summary(greedy, sampled, tools=None)
  assert agent["malformed_rate"] is None and agent["tool_calls_per_task"] == 1.5
  assert out["protocol_ok"] == 1.0
  assert out["tasks"] == 3
  assert out["status"]["infrastructure"] == 1
  assert out["status"]["ended"] == 11
  low, high = out["ci95"]["pass1_greedy"]
  assert low <= 0.5 <= high
  assert set(out["ci95"]) == set(out) - {"ci95", "status", "tasks"}


def test_evidence_recall_by_hand():
  t = samples.trajectory("a")
  t.calls = [
    ToolCall(
      "wiki_search", "x", "1. Ure: a town.\n2. Ure Mill: by the river, near Tarn."
    ),
    ToolCall("wiki_search", "y", "17: a page whose id is its title"),
  ]
  for names, recall in (
    (["Ure"], 1.0),
    (["Tarn"], 0.0),  # named inside a page only
    (["17", "1"], 0.5),
    (["Ure Mill", "Ure", "Tarn", "a town"], 0.5),
    ([], None),
  ):
    assert evidence_recall(t, names) == recall
  # Tasks without evidence do not count.
  attempts = [scores.scored(t, evidence=["Ure", "Tarn"]), samples.trajectory("b")]
  out = scores.summary(attempts, [])
  assert out["evidence_recall"] == 0.5 and len(out["ci95"]["evidence_recall"]) == 2
  assert "evidence_recall" not in scores.summary([samples.trajectory("b")], [])


def test_figures_need_no_more_than_what_processes_send():
  """Text, tokens and calls stay in the process that played them."""
  greedy = [samples.trajectory("a"), samples.trajectory("b", answer="Rome")]
  greedy[1].calls.append(ToolCall("code", "no fence"))
  sampled = [
    samples.trajectory("a", 0, answer=None),
    samples.trajectory("a", 1, answer="Oslo", right=False, logp=-0.3),
    samples.trajectory("a", 2, answer="the Paris", logp=-1 / 3),
    samples.trajectory("b", status=Status.INFRASTRUCTURE, answer=None),
  ]
  sampled[0].segments = []  # its mean log-prob is -inf
  sent = []
  for attempts in (greedy, sampled):
    text = json.dumps([dataclasses.asdict(scores.scored(t)) for t in attempts])
    assert len(text) < 500 * len(attempts)
    sent.append([scores.Scored.from_json(row) for row in json.loads(text)])
    assert sent[-1] == [scores.scored(t) for t in attempts]
  assert scores.summary(*sent) == scores.summary(greedy, sampled)


def test_nothing_to_score_is_none_not_zero():
  out = scores.summary([], [])
  assert out["pass1_greedy"] is out["malformed_rate"] is out["ci95"]["pass3"] is None
  broken = samples.trajectory(status=Status.INFRASTRUCTURE)
  assert scores.summary([broken], [])["pass1_greedy"] is None


def test_ungraded_attempts_are_an_error_that_names_them():
  t = samples.trajectory("a", sample=2)
  t.reward_parts = {}
  with pytest.raises(ValueError, match="task 'a' sample 2: reward part 'answer'"):
    scores.summary([t], [])


def test_by_group():
  greedy = [
    samples.trajectory("a", family="one"),
    samples.trajectory("b", right=False, family="two"),
  ]
  out = scores.by_group(greedy, [], lambda t: t.meta["family"])
  assert {k: v["pass1_greedy"] for k, v in out.items()} == {"one": 1.0, "two": 0.0}


def test_pass_and_vote_of_any_k():
  attempts = votes("Rome", "Paris", "Rome", "Paris", "Paris")
  few = [samples.trajectory("few", right=True)]
  out = scores.summary([], [*attempts, *few], ks=(1, 3, 5, 8))
  assert out["pass1"] == pytest.approx((3 / 5 + 1) / 2) == out["pass1_sampled"]
  assert (out["pass3"], out["best_of_3"]) == (1.0, 0.0)  # "few" has fewer than three
  assert (out["pass5"], out["best_of_5"]) == (1.0, 1.0)
  assert out["pass8"] is out["best_of_8"] is out["ci95"]["pass8"] is None
