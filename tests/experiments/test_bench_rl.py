"""The benchmark of RL steps: our worker learns from what it played, the tables."""

from __future__ import annotations

import dataclasses
import json
import threading

import pytest

from experiments.bench import rl, rl_tunix, rl_work
from experiments.bench import rollout_work as plain
from experiments.bench.train_work import model_fields

MODEL = model_fields(V=64, D=16, L=1, N=2, K=1, H=8, F=32)
JOB = {
  "model": MODEL,
  "dtype": "float32",
  "prompt": 6,
  "new": 4,
  "calls": 2,
  "observation": 3,
  "prompts": 2,
  "samples": 2,
  "length": 6 + 3 * 4 + 2 * 3,
}


def test_a_plan_has_groups_of_one_prompt_and_no_padding():
  plan = rl_work.make_plan(JOB, latency=True)
  assert plan.prompts[0] == plan.prompts[1] != plan.prompts[2] == plan.prompts[3]
  assert plan.observations[0] != plan.observations[1]
  given = [*plan.prompts, *(o for os in plan.observations for o in os)]
  assert all(min(ids) > 0 for ids in given)
  assert rl_work.make_plan(JOB, latency=False).observations == plan.observations


def test_our_worker_learns_from_what_it_played(tmp_path):
  (tmp_path / "job.json").write_text(json.dumps(JOB))
  plain.write_work(str(tmp_path))
  steps = rl_work.ours(str(tmp_path), JOB)
  last, phases = steps(2, False)
  assert len(last) == 4 and all(len(ids) == 4 for ids in last)
  assert set(phases) == {"sync", "decode", "tools", "learn", "other"}
  assert min(phases.values()) >= 0 and phases["learn"] > 0 and phases["decode"] > 0


@pytest.mark.slow
def test_a_table_of_our_own_and_who_is_refused():
  (row,) = rl.measure("tiny", MODEL, {}, [False], rounds=1, prompts=1, new=2)
  assert row["contestant"] == "ours" and row["trajectories_per_second"] > 0
  theirs = {**row, "contestant": "tunix", "trajectories_per_second": 1.0}
  theirs["cpu_seconds"] = 3 * row["cpu_seconds"]
  name = "tiny, tools of 0 s, over tunix"
  assert rl.ratios([row, theirs]) == {
    name: pytest.approx(row["trajectories_per_second"]),
    f"{name}, in processor time": pytest.approx(3),
  }
  ours = [[i, i] for i in range(20)]
  rl.check_tokens({"ours": ours, "tunix": [*ours[:18], [0], [0]]})
  with pytest.raises(ValueError, match=r"tunix .* 17 of 20 trajectories agree"):
    rl.check_tokens({"ours": ours, "tunix": [*ours[:17], [0], [0], [0]]})


def test_calls_of_threads_become_one_of_a_batch():
  """What we do for the peer's sampler: everybody gets the continuation of its own."""
  asked = []

  @dataclasses.dataclass
  class Output:
    text: list[str]
    tokens: list[int]
    left_padded_prompt_tokens: list[str]
    logprobs: list[float]

  def generate(texts: list[str]) -> Output:
    asked.append(sorted(texts))
    return Output([x + "!" for x in texts], texts, texts, texts)

  together, out = rl_tunix.Together(3, generate), {}

  def play(name: str) -> None:
    for turn in range(4):
      out[name, turn] = together(f"{name}{turn}").text

  threads = [threading.Thread(target=play, args=(name,)) for name in "abc"]
  for t in threads:
    t.start()
  for t in threads:
    t.join(60)
  assert asked == [[f"{name}{turn}" for name in "abc"] for turn in range(4)]
  assert out == {(n, t): [f"{n}{t}!"] for n in "abc" for t in range(4)}


def test_the_peers_template_and_tokenizer_add_nothing():
  messages = [{"content": ""}, {"content": "1 2"}, {"content": "3"}]
  text = rl_tunix.Template().parse(messages, add_generation_prompt=True)
  numbers = rl_tunix.Numbers()
  assert numbers.encode(text) == [1, 2, 3] and numbers.decode([1, 2]) == "1 2"
