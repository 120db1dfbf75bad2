"""The generation benchmark: our worker, the check of tokens, the ratios."""

from __future__ import annotations

import json

import numpy as np
import pytest

from coa_jax.model.hf.io import load_model
from experiments.bench import rollout, rollout_work
from experiments.bench.train_work import model_fields

MODEL = model_fields(V=64, D=16, L=1, N=2, K=1, H=8, F=32)


def test_our_worker_continues_prompts_as_the_model_would(tmp_path):
  job = {"model": MODEL, "dtype": "float32", "prompt": 6, "new": 5}
  (tmp_path / "job.json").write_text(json.dumps(job))
  rollout_work.write_work(str(tmp_path))
  generate = rollout_work.ours(str(tmp_path), job)
  given = rollout_work.prompts(3, 6, 64)
  new = generate(given, 5)
  assert [len(ids) for ids in new] == [5, 5, 5]
  # Greedy: every token is the likeliest after those before it.
  from coa_jax.model.transformer import Transformer

  cfg, params = load_model(str(tmp_path / "model"))
  ids = np.array([a + b for a, b in zip(given, new, strict=True)])
  place = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
  model = Transformer(cfg)
  hidden, _ = model.apply({"params": params}, ids, place, np.ones_like(ids))
  logits = model.apply({"params": params}, hidden, method="logits")
  np.testing.assert_array_equal(np.argmax(logits, -1)[:, 5:-1], ids[:, 6:])


@pytest.mark.slow
def test_a_table_of_our_own_has_every_batch():
  rows = rollout.measure("tiny", MODEL, "float32", {}, [2, 1], rounds=1, new=4)
  assert [(r["batch"], r["contestant"]) for r in rows] == [(2, "ours"), (1, "ours")]
  assert all(r["slowest"] <= r["tokens_per_second"] <= r["fastest"] for r in rows)


def test_other_tokens_are_refused():
  same = {"ours": [[1, 2], [3]], "vllm": [[1, 2], [3]]}
  rollout.check_tokens(same)
  with pytest.raises(ValueError, match=r"tunix continues prompt 1 by \[4\], ours by"):
    rollout.check_tokens(same | {"tunix": [[1, 2], [4]]})


def test_ratios_are_ours_over_theirs():
  def row(who: str, speed: float):
    case = {"size": "5M", "dtype": "float32", "batch": 16}
    return {**case, "contestant": who, "tokens_per_second": speed}

  assert rollout.ratios([row("ours", 30.0), row("vllm", 20.0)]) == {
    "5M float32 batch 16 over vllm": 1.5
  }
