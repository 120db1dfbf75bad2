"""`compare` on costs: our meter, the endpoint's own counts, unequal tools."""

from __future__ import annotations

import json

import pytest
from forked import finish

from coa_jax.cli.compare_cost import compare_costs as compare
from coa_jax.data.teacher.token_meter import word_ids
from coa_jax.protocol import prompts, roles
from coa_jax.protocol.trajectory import Trajectory, Usage, write_jsonl


def attempt(task: str, right: float, reported=(), **usage) -> Trajectory:
  meta = {"reported": list(reported)} if reported else {}
  parts = {"answer": right}
  return Trajectory(task, reward_parts=parts, usage=Usage(**usage), meta=meta)


def files(folder, reported, **tools) -> tuple[str, str]:
  """Writes a distillation's and an evaluation's files; `tools` changes the latter."""
  theirs = [
    attempt("a", 1.0, reported, prompt=900, cached=500, generated=100),
    attempt("b", 1.0, reported, prompt=900, cached=500, generated=100),
  ]
  ours = [attempt(t, 1.0, prompt=50, generated=40, observation=10) for t in "ab"]
  settings = {"tools": ["code"], "top_k": 3}
  for name, rows, config in (
    ("teacher", theirs, {"tools": settings, "teacher": {"backend": "chat"}}),
    ("greedy", ours, {"tools": {**settings, **tools}}),
  ):
    write_jsonl(folder / name / f"{name}.jsonl", rows)
    (folder / name / "config.json").write_text(json.dumps({"config": config}))
  return tuple(str(folder / n / f"{n}.jsonl") for n in ("teacher", "greedy"))


def test_by_the_meter_and_by_the_endpoints_own_counts(tmp_path):
  out = compare(*files(tmp_path, (1900, 0, 100), enabled=True))
  assert out["metered"]["reduction_no_cache"] == pytest.approx(0.9)
  assert out["metered"]["reduction_cache"] == pytest.approx(0.8)
  assert out["reported"]["reduction_no_cache"] == pytest.approx(0.95)
  assert out["reported"]["multi_agent"]["per_task"]["completion"] == 100
  assert "words, digits and marks" in out["notes"][0]
  assert compare(*files(tmp_path, ()))["reported"] is None


@pytest.mark.parametrize("style", ["brief", "full"])
def test_the_models_prompt_is_counted_with_its_instructions_once(tmp_path, style):
  multi, single = files(tmp_path, ())
  path = tmp_path / "greedy" / "config.json"
  record = json.loads(path.read_text())
  record["config"]["rollout"] = {"style": style}
  path.write_text(json.dumps(record))
  out = compare(multi, single)["metered"]
  assert out["reduction_no_cache"] == pytest.approx(0.9)
  instructions = prompts.instructions(roles.get_variant("unified").with_tools(["code"]))
  # A full prompt already has the instructions.
  more = len(word_ids(instructions)) if style == "brief" else 0
  assert more == out["instructions"]
  assert out["reduction_instructed"] == pytest.approx(1 - (100 + more) / 1000)


def test_a_tag_counts_as_one_token():
  assert len(word_ids("<think> 12 cats</think>")) == 5
  assert len(word_ids("<p>")) == 3


def test_other_tools_compare_nothing(tmp_path):
  with pytest.raises(ValueError, match=r"tools\.top_k is 3 for .* and 1 for the one"):
    compare(*files(tmp_path, (), top_k=1))
  multi, single = files(tmp_path, ())
  (tmp_path / "greedy" / "config.json").unlink()
  assert "were not compared" in compare(multi, single)["notes"][0]


@pytest.mark.slow
def test_the_program_prints_and_writes(tmp_path):
  multi, single = files(tmp_path, (1900, 0, 100))
  flags = (f"--single={single}", f"--json={tmp_path / 'cost.json'}")
  done = finish("compare", f"--multi={multi}", *flags)
  assert done.stdout.count("Cost of an answer") == 2 and "0.846" in done.stdout
  assert json.loads((tmp_path / "cost.json").read_text())["metered"]["tasks"] == 2
  missing = f"--multi={tmp_path / 'nothing.jsonl'}"
  finish("compare", missing, *flags, reason="nothing.jsonl")
