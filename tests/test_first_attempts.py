"""Runs drop tasks with long prompts, and warn about problems in first attempts."""

from __future__ import annotations

import json
import pathlib

import guessing
import ml_collections
import pytest

from coa_jax import evaluate, rl
from coa_jax.protocol.trajectory import read_trajectories

pytestmark = pytest.mark.slow

LONG = {"id": "long", "question": "sky sea " * 40, "answers": ["blue"]}


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> ml_collections.ConfigDict:
  config = guessing.rl_config(tmp_path_factory.mktemp("policy"))
  with config.unlocked():
    config.algo.steps = 1
    config.algo.keep_every = 1
    config.dev.every = 1
    config.reward = dict(shaping=dict(format="none"))
  return config


def with_long(config, folder: pathlib.Path) -> ml_collections.ConfigDict:
  """Returns the config with a long-prompt task between the others."""
  path = folder / "tasks.jsonl"
  first, *others = pathlib.Path(config.tasks.uri).read_text().splitlines()
  path.write_text("\n".join([first, json.dumps(LONG), *others]) + "\n")
  changed = config.copy_and_resolve_references()
  changed.tasks.uri = str(path)
  if "dev" in changed:
    changed.dev.uri = str(path)
  return changed


def of_evaluation(config) -> ml_collections.ConfigDict:
  sections = ("init", "model", "rollout", "tools", "tasks")
  config = config.copy_and_resolve_references()
  out = ml_collections.ConfigDict({name: config[name] for name in sections})
  out.eval = ml_collections.ConfigDict(dict(samples=2))
  return out


def test_evaluation_counts_what_it_drops(config, tmp_path, capfd):
  config = of_evaluation(config)
  without = evaluate.run(config, str(tmp_path / "a"))
  found = evaluate.run(with_long(config, tmp_path), str(tmp_path / "b"))
  assert without["dropped_tasks"] == 0
  for results in (found, without):  # contains seconds
    del results["usage"]
  assert found == without | {"dropped_tasks": 1}
  assert "warning: " not in capfd.readouterr().err


def test_a_run_of_long_prompts_alone_is_refused(config, tmp_path):
  config = of_evaluation(config)
  config.rollout.max_prompt = 1
  with pytest.raises(ValueError, match=r"2 of 2 tasks dropped: .*max_prompt=1\); the"):
    evaluate.run(config, str(tmp_path / "run"))
  assert not (tmp_path / "run" / "config.json").exists()


def test_rl_and_evaluation_report_dropped_tasks_silence_and_sentences(
  config, tmp_path, caplog, capfd
):
  rows = [
    {"id": "sky", "question": "sky", "answers": ["It is as blue as a sea."]},
    LONG,
  ]
  path = tmp_path / "tasks.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  config = config.copy_and_resolve_references()
  config.tasks.uri = config.dev.uri = str(path)
  config.rollout.max_len = 10  # truncated before any call
  results = rl.run(config, str(tmp_path / "rl"))
  assert results["dropped_tasks"] == results["dropped_dev_tasks"] == 1
  dropped = [line.partition(":")[0] for line in caplog.messages if "dropped" in line]
  assert dropped == ["1 of 2 tasks dropped", "1 of 2 dev tasks dropped"]
  played = read_trajectories(tmp_path / "rl/trajectories/step_000000.jsonl")
  assert {t.task_id for t in played} == {"sky"}
  of_rl = capfd.readouterr().err
  evaluate.run(of_evaluation(config), str(tmp_path / "evaluation"))
  for text, where in ((of_rl, "step 1: "), (capfd.readouterr().err, "")):
    err = " ".join(text.split())
    assert err.count(f"warning: {where}none of ") == 1
    assert err.count(f"warning: {where}exact match compares whole sentences in ") == 1
