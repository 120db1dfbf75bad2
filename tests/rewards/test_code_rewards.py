"""Programs graded by hidden tests in the real jail: RL, evaluation, released rows."""

from __future__ import annotations

import json
import pathlib

import ml_collections
import numpy as np
import pytest
import toy

from coa_jax import evaluate, rl
from coa_jax.data.tasks.sources import load_tasks
from coa_jax.data.tasks.task import Kind
from coa_jax.protocol.trajectory import Status, read_trajectories
from coa_jax.report.metrics import read_metrics
from coa_jax.rewards.grader import Grader
from tests.backend import needs_jail

ROWS = pathlib.Path(__file__).parents[1] / "fixtures/livecodebench.jsonl"
STEPS = 14
RIGHT, WRONG = "print(int(input())*2)", "print(int(input())+2)"
ROW = {
  "id": "twice",
  "question": "2 + 3",  # text that the toy tokenizer knows; the tests define the task
  "answers": ["a program"],
  "kind": "code",
  "meta": {"tests": {"stdin": ["2", "5"], "expected_output": ["4", "10"]}},
}
pytestmark = needs_jail


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> ml_collections.ConfigDict:
  """A policy that writes one of two programs, and a task that only one solves."""
  folder = tmp_path_factory.mktemp("coder")
  examples = [
    toy.written("2 + 3", (toy.code("print(2+3)"), "5", toy.end(p)), toy.tokenizer())
    for p in (RIGHT, WRONG)
  ]
  assert max(t.num_tokens for t in examples) <= toy.MAX_LEN
  toy.save_policy(str(folder / "model"), toy.train(examples * 2, 250).params)
  tasks = folder / "tasks.jsonl"
  tasks.write_text(json.dumps(ROW) + "\n")
  return ml_collections.ConfigDict(
    dict(
      init=str(folder / "model"),
      model=dict(remat="none"),
      rollout=dict(style="brief", slots=16, max_len=toy.MAX_LEN),
      tools=dict(tools=("code",)),
      tasks=dict(uri=str(tasks)),
      reward=dict(
        code=dict(test_s=20.0),
        shaping=dict(tool_cost=dict(per_call=0.1)),
      ),
    )
  )


@pytest.mark.slow
def test_rl_learns_from_hidden_tests_what_no_answer_says(config, tmp_path):
  learning = config.copy_and_resolve_references()
  with learning.unlocked():
    learning.optim = dict(lr=2e-3, schedule="linear", b2=0.99)
    learning.algo = dict(
      steps=STEPS,
      keep_every=1,
      sampling=dict(prompts=1, samples=16, rounds=1),
      batch=dict(rows=16, length=128),
    )
    learning.dev = dict(every=STEPS, uri=learning.tasks.uri)
    learning.checkpoint = dict(every=STEPS)
  results = rl.run(learning, str(tmp_path))
  log = read_metrics(f"{tmp_path}/metrics.jsonl", "rl")
  answer = [row["answer"] for row in log]
  assert 0.2 < answer[0] < 0.8 and np.mean(answer[-3:]) > 0.9
  assert results["dev_accuracy"] == 1.0
  assert all(row["tool_cost"] <= 0 and "format" in row for row in log)
  played = read_trajectories(f"{tmp_path}/trajectories/step_000000.jsonl")
  seen = {t.meta["graded"]["outcome"] for t in played if t.status == Status.ENDED}
  assert {"passed", "wrong"} <= seen
  for t in played:
    parts = t.reward_parts
    base = parts["answer"] * parts["format"]
    assert t.reward == pytest.approx(base + parts["tool_cost"])
    assert parts["tool_cost"] == pytest.approx(-0.1 * len(t.calls))


@pytest.mark.slow
def test_evaluation_runs_hidden_tests_too(config, tmp_path):
  whole = config.copy_and_resolve_references()
  with whole.unlocked():
    whole.reward = dict(code=dict(test_s=20.0, partial=True))
    whole.eval = dict(greedy=False, samples=12)
  results = evaluate.run(whole, str(tmp_path))
  played = read_trajectories(f"{tmp_path}/sampled.jsonl")
  for t in played:
    if t.status == Status.ENDED and RIGHT in t.text.rpartition("<answer>")[2]:
      assert t.reward_parts["answer"] == 1.0
    if t.status == Status.ENDED and WRONG in t.text.rpartition("<answer>")[2]:
      assert t.reward_parts["answer"] == 0.5  # 2 + 2 is 2 * 2
  share = np.mean([t.reward_parts["answer"] == 1 for t in played])
  assert 0 < share < 1 and results["pass1_sampled"] == pytest.approx(share)
  assert share < results["reward_parts"]["answer"] < 1


# Solutions for the fixture's tasks, by id: (right, wrong).
SOLUTIONS = {
  "written-1": (
    """class Solution:
  def count_parts(self, s: str, k: int) -> int:
    parts = [s[i:j] for i in range(len(s)) for j in range(i + 1, len(s) + 1)]
    return sum(min(p.count("0"), p.count("1")) <= k for p in parts)""",
    """class Solution:
  def count_parts(self, s: str, k: int) -> int:
    return len(s)""",
  ),
  "written-2": (
    """import itertools
n, k = map(int, input().split())
functions = [tuple(map(int, input().split())) for _ in range(n)]
values = []
for chosen in itertools.permutations(functions, k):
  value = 1
  for a, b in chosen:
    value = a * value + b
  values.append(value)
print(max(values))""",
    "print(26)",
  ),
}


@pytest.mark.slow
def test_released_rows_are_graded_by_their_own_tests():
  tasks = {t.id: t for t in load_tasks(ROWS)}
  assert len(tasks) == 4 and {t.kind for t in tasks.values()} == {Kind.CODE}
  toolbox = toy.TableToolbox()
  with Grader() as grader:
    grader.check(tasks.values(), 1000)  # every row's tests can be read
  for name, programs in SOLUTIONS.items():
    for program, right in zip(programs, (1.0, 0.0), strict=True):
      answer = toy.end(f"```py\n{program}\n```")
      turns = [toy.code("print(2+3)"), answer]
      t = toy.drive(toy.episode(tasks[name], toolbox), turns)
      assert t.reward_parts == {"answer": right, "format": 1.0}, (name, program)
      assert t.meta["graded"]["outcome"] == ("passed" if right else "wrong")
