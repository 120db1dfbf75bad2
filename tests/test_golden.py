"""An older commit's files are read, resumed or refused, as docs/guide.md promises.

Commit 6bfab07 wrote fixtures/golden (see `golden_files.py`). `expected.json` there
has the commit's own values for these files, and the losses of its resumed run.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil

import numpy as np
import pytest
from golden_files import (
  COLUMNS,
  MORE_STEPS,
  PLAYED,
  STEPS,
  TEXTS,
  TRAJECTORIES,
  described,
  evaluate_config,
  fresh_config,
  logits_of,
  losses_of,
  rl_config,
  tuned_config,
)

from coa_jax import evaluate, rl, sft
from coa_jax.learner.checkpoint import whole_steps
from coa_jax.model.hf.io import load_model
from coa_jax.protocol.tokens import Tokenizer
from coa_jax.protocol.trajectory import read_trajectories
from coa_jax.runtime.config import ConfigError

GOLDEN = pathlib.Path(__file__).parent / "fixtures" / "golden"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
COMMIT = "6bfab0701314700d2859925f948145d45c5476a0"


@pytest.fixture
def golden(tmp_path, monkeypatch) -> pathlib.Path:
  """A copy of the files as the current folder: their configs use relative paths."""
  folder = tmp_path / "golden"
  shutil.copytree(GOLDEN, folder)
  monkeypatch.chdir(folder)
  return folder


def contents(folder: pathlib.Path) -> dict[str, bytes]:
  """Returns all files below a folder except the lock: a refused run takes it, too."""
  out = {}
  for path in folder.rglob("*"):
    if path.is_file() and path.name != ".lock":
      out[str(path.relative_to(folder))] = path.read_bytes()
  return out


def test_trajectories_are_read_and_tokenized_as_then():
  tokenizer = Tokenizer.load(GOLDEN / "fresh" / "model")
  distilled = described(GOLDEN / TRAJECTORIES, tokenizer)
  assert distilled == EXPECTED["distilled"]
  names = {name for row in distilled for name, *_ in row["calls"]}
  assert len(distilled) == 3 and names == {"wiki_search", "code"}
  # An RL step's trajectories, with token ids, log-probs and policy versions.
  played = described(GOLDEN / PLAYED)
  assert played == EXPECTED["played"]
  assert all(row["versions"] and row["logps"] < 0 for row in played) and played


def test_a_model_folder_gives_the_logits_and_ids_of_then():
  cfg, params = load_model(GOLDEN / "fresh" / "model")
  logits_TV = logits_of(cfg, params)
  largest = EXPECTED["largest_logit"]
  assert abs(logits_TV).max() == pytest.approx(largest, rel=2e-5)
  was = np.array(EXPECTED["logits"])
  np.testing.assert_allclose(logits_TV[:, COLUMNS], was, rtol=0, atol=2e-5 * largest)
  tokenizer = Tokenizer.load(GOLDEN / "fresh" / "model")
  assert [tokenizer.encode(text) for text in TEXTS] == EXPECTED["ids"]
  assert [tokenizer.decode(ids) for ids in EXPECTED["ids"]] == list(TEXTS)


@pytest.mark.slow
def test_a_run_whose_fields_all_exist_goes_on_with_the_losses_of_then(golden):
  """SFT from a model folder: checkpoint, optimizer state and data are the old ones."""
  before = contents(golden / "tuned")
  assert whole_steps("tuned/checkpoints") == [STEPS]
  sft.run(tuned_config(MORE_STEPS), "tuned")
  losses = losses_of(golden / "tuned")
  assert losses[:STEPS] == EXPECTED["losses"][:STEPS]  # the old log
  assert len(losses) == MORE_STEPS
  for now, was in zip(losses, EXPECTED["losses"], strict=True):
    # A step without validation has None in both.
    assert [x for x in now if x] == pytest.approx([x for x in was if x], rel=2e-5)
  after = contents(golden / "tuned")
  assert after["data/tokens.int32"] == before["data/tokens.int32"]
  assert whole_steps("tuned/checkpoints") == [MORE_STEPS]
  assert not list(golden.glob("tuned/checkpoints/*_*"))  # no checkpoint was set aside


@pytest.mark.parametrize(
  ("workdir", "run", "config", "field", "advice"),
  [
    (
      "fresh",
      sft.run,
      fresh_config(MORE_STEPS),
      "'model.windows' ([])",
      ", with --config.init=fresh/model to start from its model",
    ),
    ("rl", rl.run, rl_config(2), "'rollout.in_flight' (0)", ""),
  ],
)
def test_a_run_with_a_field_that_is_gone_is_refused_and_left_as_it_is(
  golden, workdir, run, config, field, advice
):
  before = contents(golden / workdir)
  with pytest.raises(ConfigError) as e:
    run(config, workdir)
  assert str(e.value) == (
    f"{workdir} holds a run of another version: {workdir}/config.json has the field "
    f"{field}, which this version does not have; finish it with commit {COMMIT[:12]}, "
    f"or choose another workdir{advice}"
  )
  assert contents(golden / workdir) == before


@pytest.mark.slow
def test_a_new_run_starts_from_the_model_and_the_trajectories(golden):
  """As the refusal advises; rows and first loss equal the older commit's."""
  sft.run(tuned_config(1), "new")
  tokens = (golden / "new" / "data" / "tokens.int32").read_bytes()
  assert tokens == (golden / "tuned" / "data" / "tokens.int32").read_bytes()
  ((step, loss, _),) = losses_of(golden / "new")
  assert step == 1 and loss == pytest.approx(EXPECTED["losses"][0][1], rel=2e-5)
  about = json.loads((golden / "new" / "model" / "coa.json").read_text())
  was = json.loads((golden / "fresh" / "model" / "coa.json").read_text())
  # That commit's dialects lack the last field.
  assert about["dialects"] == [{**row, "parallel": 1} for row in was["dialects"]]
  assert was["commit"] == COMMIT


def test_a_model_folder_is_evaluated(golden, caplog):
  results = evaluate.run(evaluate_config(), "eval")
  (played,) = read_trajectories("eval/greedy.jsonl")
  assert results["tasks"] == 1 and played.num_policy > 0
  # The folder still records its training; only its tools differ from this run's.
  (said,) = (line for line in caplog.messages if "was trained with" in line)
  assert said.startswith("fresh/model was trained with tools 'code, wiki_search' and")


def test_the_files_are_few_and_name_no_folder_of_another_machine():
  files = [path for path in GOLDEN.rglob("*") if path.is_file()]
  assert sum(os.path.getsize(path) for path in files) < 300_000
  for path in files:
    # Orbax records its output path; golden_files.py ran in /tmp/golden.
    text = path.read_bytes().replace(b"/tmp/golden/", b"")
    assert not re.search(rb"/(home|root|work|tmp|Users)/", text), path
