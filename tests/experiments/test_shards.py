"""Shards write one process's outputs, in any number and order, even after a kill."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import time

import forked
import ml_collections
import pytest
from programs import small_distillation, small_evaluation, start

from coa_jax import evaluate
from coa_jax.cli import select_tasks
from coa_jax.cli.shards import run_shard
from coa_jax.runtime.config import as_json, read_config
from coa_jax.runtime.shard import Shard


def contents(workdir: pathlib.Path, names: tuple[str, ...]) -> dict[str, str]:
  """The files' text without durations in seconds."""
  texts = {name: (workdir / name).read_text() for name in names}
  return {n: re.sub(r'(seconds\w*": )[^,}\n]+', r"\1", t) for n, t in texts.items()}


# --- A distillation in separate processes, one of them killed.
WRITTEN = ("runs.jsonl", "trajectories.jsonl", "teacher.jsonl", "results.json")


@pytest.fixture(scope="module")
def distillation(tmp_path_factory) -> str:
  return small_distillation(tmp_path_factory.mktemp("distillation"))


@pytest.mark.slow
def test_killed_shards_of_a_distillation_end_as_one_process(distillation, tmp_path):
  whole = start("distill", distillation, tmp_path / "whole")
  assert whole.wait(600) == 0, whole.communicate()

  # Shard 1 is killed midway, and started again as the last one.
  workdir = tmp_path / "cut"
  killed = start("distill", distillation, workdir, "--shard=1/3")
  while not (workdir / "shards" / "1-of-3" / "runs.jsonl").exists():
    assert killed.poll() is None, killed.communicate()
    time.sleep(0.01)
  killed.send_signal(signal.SIGKILL)
  killed.wait()
  for shard in ("2/3", "0/3", "0/3", "1/3"):
    process = start("distill", distillation, workdir, f"--shard={shard}", "--json")
    out, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    # Outputs are joined only after all shards are done.
    is_joined = (workdir / "results.json").exists()
    assert is_joined == (shard == "1/3"), errors
  assert json.loads(out)["tasks"] == 40
  assert contents(workdir, WRITTEN) == contents(tmp_path / "whole", WRITTEN)

  # A repeated shard joins nothing and changes nothing.
  again = start("distill", distillation, workdir, "--shard=2/3")
  assert again.wait(600) == 0, again.communicate()
  assert contents(workdir, WRITTEN) == contents(tmp_path / "whole", WRITTEN)


# --- Evaluations, in this process.
@pytest.fixture(scope="module")
def evaluation(tmp_path_factory) -> ml_collections.ConfigDict:
  return small_evaluation(tmp_path_factory.mktemp("evaluation"))


def in_shards(journey, config, config_class, workdir, numbers, count) -> dict:
  """Runs shards in this order; returns the last one's results."""
  settings = as_json(read_config(config, config_class))

  def run(folder: str, shard: Shard | None) -> dict:
    return journey(config, folder, shard=shard)

  for number in numbers:
    shard = Shard(number, count)
    results, is_all = run_shard(run, settings, str(workdir), shard, evaluate.LOGS, "")
    assert is_all == (len(numbers) == count and number == numbers[-1])
  return results


@pytest.mark.slow
def test_shards_of_an_evaluation_play_what_one_process_plays(evaluation, tmp_path):
  evaluate.run(evaluation, str(tmp_path / "whole"))
  in_shards(
    evaluate.run, evaluation, evaluate.EvaluateConfig, tmp_path / "cut", (1, 0), 2
  )
  names = ("greedy.jsonl", "sampled.jsonl", "results.json")
  assert contents(tmp_path / "cut", names) == contents(tmp_path / "whole", names)


@pytest.mark.slow
def test_shards_of_a_selection_keep_the_same_tasks(evaluation, tmp_path):
  config = evaluation.copy_and_resolve_references()
  config.eval.greedy = False
  config.select = dict(all_wrong=True, all_right=True)
  whole = select_tasks.run(config, str(tmp_path / "whole"))
  cut = in_shards(
    select_tasks.run,
    config,
    select_tasks.SelectTasksConfig,
    tmp_path / "cut",
    (0, 2, 1),
    3,
  )
  assert cut == whole
  names = ("tasks.jsonl", "selection.json")
  assert contents(tmp_path / "cut", names) == contents(tmp_path / "whole", names)


def test_shards_that_do_not_fit_are_refused(evaluation, tmp_path):
  def run(shard: Shard, config=evaluation, folder: str = "w"):
    return in_shards(
      evaluate.run,
      config,
      evaluate.EvaluateConfig,
      tmp_path / folder,
      [shard.index],
      shard.count,
    )

  run(Shard(0, 2))
  with pytest.raises(ValueError, match="has 2 shards, not 3"):
    run(Shard(0, 3))
  other = evaluation.copy_and_resolve_references()
  other.eval.samples = 1
  with pytest.raises(ValueError, match=r"the other shards have eval=.*not"):
    run(Shard(1, 2), other)
  os.makedirs(tmp_path / "whole")
  (tmp_path / "whole" / "config.json").write_text("{}")
  with pytest.raises(ValueError, match="was not cut into shards"):
    run(Shard(0, 2), folder="whole")
  claim = next(tmp_path.glob("w/**/shards.json"))
  for odd in (b"{}", b"[]", b"\xff", b'{"config": 3, "shards": 2}'):
    claim.write_bytes(odd)
    with pytest.raises(ValueError, match=r"shards\.json: "):
      run(Shard(1, 2))


@pytest.mark.parametrize(
  ("flag", "message"),
  [
    ("--shard=2/2", "I is below N"),
    ("--shard=0/0", "I is below N"),
    ("--shard=-1/2", "give I/N"),
    ("--shard=half", "give I/N"),
    ("--shard=auto/2", "says which shard this is"),
    ("--shard=0/2 --distributed=auto", "give one"),
  ],
)
def test_a_wrong_shard_is_one_line(distillation, tmp_path, flag, message):
  flags = (f"--config={distillation}", f"--workdir={tmp_path / 'w'}", *flag.split())
  assert message in forked.refused(forked.run("experiments.distill", *flags))
  assert not (tmp_path / "w").exists()
