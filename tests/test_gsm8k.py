"""GSM8K from worked solutions to a graded model: the three tiny configs in a row."""

from __future__ import annotations

import json
import pathlib
import runpy

from coa_jax import distill, evaluate, sft
from coa_jax.protocol.trajectory import Author, read_trajectories
from tests.backend import BACKEND

ROOT = pathlib.Path(__file__).resolve().parents[1]
ROWS = ROOT / "tests" / "fixtures" / "gsm8k.jsonl"


def get_config(journey: str):
  """The tiny config of a journey on GSM8K."""
  path = ROOT / "configs" / f"{journey}_gsm8k.py"
  return runpy.run_path(str(path))["get_config"]("tiny")


def test_the_tiny_configs_in_a_row(tmp_path):
  config = get_config("distill")
  config.tasks.uri = str(ROWS)
  config.tools.sandbox = BACKEND
  distilled = distill.run(config, str(tmp_path / "distill"))
  assert distilled["tasks"] == 20
  assert distilled["convert"] == {
    "kept": 17,
    "dropped": {"answer_not_computed": 2, "no_program": 1},
  }
  assert distilled["kept"] == 17
  file = tmp_path / "distill" / "trajectories.jsonl"
  for t in read_trajectories(file):
    (prompt,) = [s.text for s in t.segments if s.author == Author.PROMPT]
    assert prompt == t.meta["question"] and "<<" not in json.dumps(t.to_json())
    assert t.reward == 1.0 and t.calls

  config = get_config("sft")
  config.data.trajectories = str(file)
  trained = sft.run(config, str(tmp_path / "sft"))
  assert trained["trajectories"] == 9 and trained["left_out_too_long"] == 0

  config = get_config("evaluate")
  config.init = str(tmp_path / "sft" / "model")
  config.tasks.uri = str(ROWS)
  config.tools.sandbox = BACKEND
  assert evaluate.run(config, str(tmp_path / "eval"))["tasks"] == 8
