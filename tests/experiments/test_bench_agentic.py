"""The benchmarks of trajectories with tools: our worker, its counters, the tables."""

from __future__ import annotations

import json

import numpy as np
import pytest

from coa_jax.model.hf.io import load_model
from experiments.bench import agentic, agentic_work, scaling
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
  "trajectories": 3,
  "length": 6 + 3 * 4 + 2 * 3,
}


@pytest.mark.slow
def test_our_worker_goes_on_after_every_observation_as_the_model_would(tmp_path):
  (tmp_path / "job.json").write_text(json.dumps(JOB))
  plain.write_work(str(tmp_path))
  play = agentic_work.ours(str(tmp_path), JOB)
  plan = agentic_work.make_plan(JOB, 3, latency=False)
  last, counted = play(plan)
  # prompts + observations, each once; three turns of every slot.
  assert counted["prefilled"] == 3 * (6 + 2 * 3)
  assert 0 < counted["utilisation"] <= 1
  from coa_jax.model.transformer import Transformer

  cfg, params = load_model(str(tmp_path / "model"))

  def likeliest(ids: list[int]) -> int:
    place = np.arange(len(ids))[None]
    model, row = Transformer(cfg), np.array([ids])
    hidden, _ = model.apply({"params": params}, row, place, np.ones_like(row))
    logits = model.apply({"params": params}, hidden, method="logits")
    return int(np.argmax(logits[0, -1]))

  for i in range(3):
    ids, turn = list(plan.prompts[i]), []
    for n in range(3):
      turn = []
      for _ in range(4):
        turn.append(likeliest(ids))
        ids.append(turn[-1])
      ids += plan.observations[i][n] if n < 2 else []
    assert last[i] == turn


def test_tools_take_their_time_or_none():
  slow = agentic_work.make_plan(JOB, 5, latency=True)
  quick = agentic_work.make_plan(JOB, 5, latency=False)
  assert all(0.1 <= s <= 0.3 for row in slow.seconds for s in row)
  assert all(s == 0 for row in quick.seconds for s in row)
  assert slow.observations == quick.observations and slow.prompts == quick.prompts


@pytest.mark.slow
def test_a_table_of_our_own(monkeypatch):
  rows = agentic.measure(
    "tiny", MODEL, "float32", {}, [False], rounds=1, trajectories=2, new=2
  )
  (row,) = rows
  assert row["contestant"] == "ours" and row["trajectories_per_second"] > 0
  assert row["prefilled"] == 2 * (agentic.PROMPT + 3 * 48)
  theirs = {**row, "contestant": "tunix", "trajectories_per_second": 1.0}
  assert agentic.ratios([row, theirs]) == {
    "tiny, tools of 0 s, over tunix": pytest.approx(row["trajectories_per_second"])
  }


def test_sweeps_do_what_they_say():
  for n, job in scaling.SWEEPS["length"].items():
    assert job["length"] == n == job["prompt"] + job["new"]
  generated = {
    (job["calls"] + 1) * job["new"] for job in scaling.SWEEPS["turns"].values()
  }
  assert generated == {1_984}
  point = scaling.measure(MODEL, scaling._job(2, 140, 2))
  assert point["prefilled"] == 2 * (64 + 48) and point["peak_mb"] > 50
  rows = [{"sweep": "slots", "at": n, **point} for n in (1, 2)]
  assert len(scaling.draw(rows).axes) == 2
