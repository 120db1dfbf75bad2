"""SFT runs: the training data, the data left out, and refused configs."""

from __future__ import annotations

import json
import os
import shutil

import jax
import ml_collections
import numpy as np
import pytest
import toy
import virtual_devices
from started import free_address, outputs

from coa_jax import sft
from coa_jax.learner.checkpoint import whole_steps
from coa_jax.learner.dataset import Dataset
from coa_jax.learner.sources import Source, mix, read_sources, validation_order
from coa_jax.learner.state import Learner
from coa_jax.model.hf.io import load_model, save_model
from coa_jax.model.transformer import count_params, init_params
from coa_jax.protocol import tokens
from coa_jax.protocol.tokens import Tokenizer
from coa_jax.protocol.trajectory import (
  Author,
  read_trajectories,
  write_jsonl,
)
from coa_jax.report import metric_names
from coa_jax.report.metrics import read_metrics
from coa_jax.runtime.config import ConfigError


@pytest.fixture
def config(tmp_path) -> ml_collections.ConfigDict:
  """A fresh model; 4 scripts five times, each time with other task ids."""
  examples = []
  for n in range(5):
    for t in toy.trajectories():
      t.task_id += f" {n}"
      for s in t.segments:
        s.ids = []
      examples.append(t)
  file = tmp_path / "trajectories.jsonl"
  write_jsonl(file, examples)
  return ml_collections.ConfigDict(
    dict(
      init="",
      model=dict(width=32, layers=1, heads=4, kv_heads=2, head_dim=8, ff=64),
      optim=dict(lr=1e-2, warmup=2),
      data=dict(
        trajectories=str(file),
        steps=12,
        rows=4,
        length=toy.MAX_LEN,
        validation=4,
        validate_every=5,
        vocab_size=384,
      ),
      checkpoint=dict(every=100, keep=1),
    )
  )


def test_a_fresh_model_learns_and_is_saved_whole(config, tmp_path):
  workdir = tmp_path / "w"
  results = sft.run(config, str(workdir))
  assert json.loads((workdir / "results.json").read_text()) == results
  assert results["trajectories"] == 16 and results["left_out_too_long"] == 0
  log = read_metrics(str(workdir / "metrics.jsonl"), "sft")
  assert [row["step"] for row in log] == list(range(1, 13))
  assert [r["step"] for r in log if "validation_loss" in r] == [5, 10, 12]
  names = {name for row in log for name in row} - {"stage", "step", "seconds"}
  assert not [name for name in names if not metric_names.find(name)]
  assert len(list(workdir.glob("events.out.tfevents.*"))) == 1
  # Held-out and training scripts are the same, so both losses fall together.
  assert log[0]["loss"] > 5.5 > 4.5 > log[-1]["loss"] == results["loss"]
  assert abs(results["validation_loss"] - results["loss"]) < 0.5
  cfg, params = load_model(workdir / "model")
  tok = Tokenizer.load(workdir / "model")
  assert cfg.vocab_size % 64 == 0 and 0 <= cfg.vocab_size - tok.vocab_size < 64
  assert results["parameters"] == count_params(params)
  assert len(tok.encode("</answer>")) == 1


def test_without_updates_the_model_is_as_it_begins(config, tmp_path):
  config.data.steps = 0
  results = sft.run(config, str(tmp_path / "w"))
  assert results["steps"] == 0 and "loss" not in results
  cfg, params = load_model(str(tmp_path / "w" / "model"))
  fresh = init_params(cfg, config.data.get("seed", 0))
  assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), params, fresh))
  Tokenizer.load(str(tmp_path / "w" / "model"))


@pytest.mark.slow
def test_no_copy_of_a_held_out_task_is_trained_on(config, tmp_path):
  path = tmp_path / "trajectories.jsonl"
  examples = read_trajectories(path)
  write_jsonl(path, examples + examples[:6])
  config.data.steps = 1
  results = sft.run(config, str(tmp_path / "w"))
  # 26 in total, less 4 held out and their 4 copies; the other 2 copies stay.
  assert results["trajectories"] == 26 - 4 - 4


@pytest.mark.parametrize(
  ("section", "field", "value", "message"),
  [
    ("model", "kv_heads", 3, "'model': kv_heads 3 does not divide heads 4"),
    ("data", "trajectories", "nowhere.jsonl", "nowhere.jsonl"),
    ("model", "attention", "splash", "model.attention='splash' needs a TPU"),
    # A model that cannot be exported is not trained.
    ("model", "attention_bias", True, "attention_bias is True and model.qk_norm True"),
  ],
)
def test_refusals_come_before_any_work(
  config, tmp_path, section, field, value, message
):
  with config.unlocked():
    config[section][field] = value
  with pytest.raises((ValueError, FileNotFoundError), match=message):
    sft.run(config, str(tmp_path / "w"))
  assert not (tmp_path / "w").exists()


def test_data_that_can_not_be_used_is_named_and_mended_in_the_same_workdir(
  config, tmp_path
):
  path, workdir = tmp_path / "trajectories.jsonl", str(tmp_path / "w")
  whole = path.read_text()
  for validation, text, message in (
    (20, whole, "20 read, 20 within .* 20 kept for validation"),
    (4, "", "there is no trajectory in it"),
    (4, whole + '{"task_id": 1}\n', r"trajectories\.jsonl:21: field .task_id. is 1"),
  ):
    config.data.validation = validation
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
      sft.run(config, workdir)
  path.write_text(whole)
  config.data.steps = 1
  assert sft.run(config, workdir)["trajectories"] == 16


@pytest.mark.slow
def test_several_files_are_mixed_by_weight(config, tmp_path, capfd):
  """A file in two parts trains like the whole; weights repeat or drop trajectories."""
  examples = read_trajectories(tmp_path / "trajectories.jsonl")
  for name, part in (("a", examples[:8]), ("b", examples[8:])):
    write_jsonl(tmp_path / f"{name}.jsonl", part)
  config.data.update(steps=3, validation=0)
  losses = []
  for names in ("trajectories.jsonl", "[ab].jsonl", "a.jsonl=2,{0}/b.jsonl=0.25"):
    config.data.trajectories = f"{tmp_path}/{names.format(tmp_path)}"
    results = sft.run(config, str(tmp_path / f"w{len(losses)}"))
    log = read_metrics(str(tmp_path / f"w{len(losses)}" / "metrics.jsonl"), "sft")
    losses.append([row["loss"] for row in log])
    assert results["trajectories"] == 20
  assert losses[0] == losses[1] != losses[2]
  rows = results["trajectories_by_source"]
  assert [row["in_an_epoch"] for row in rows.values()] == [16, 3]
  line = "b.jsonl: 12 trajectories, 12 to train on, weight 0.25: 3 in an epoch"
  assert line in capfd.readouterr().err


def test_each_file_gives_its_share_of_the_validation():
  order = validation_order([4, 2])
  assert sorted(order[:3].tolist()) == [0, 1, 4]
  assert validation_order([5]).tolist() == [0, 1, 2, 3, 4]
  mixed, _ = mix(
    [Source("a", 0.5), Source("b", 1.5)], [4, 4], np.array([0, 1, 3, 4, 5])
  )
  assert mixed.tolist() == [1, 4, 5, 5]


def test_a_file_is_named_by_its_path_whatever_stands_in_it(tmp_path):
  odd = tmp_path / "a,b=2.jsonl"
  odd.write_text("")
  assert read_sources(str(odd)) == (Source(str(odd)),)
  dated = tmp_path / "day=3"
  dated.write_text("")
  found = read_sources(f"{dated},{tmp_path}/x=1e1")
  assert found == (Source(str(dated)), Source(f"{tmp_path}/x", 10.0))


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("{0}/*.nothing", "no file matches '.*nothing'"),
    ("a.jsonl=0", "weight '0'; it must be above 0"),
    ("a.jsonl=nan", "weight 'nan'; it must be above 0"),
    ("a.jsonl=two", "weight 'two'; it must be above 0"),
    ("a.jsonl,a.jsonl", "a.jsonl comes twice; a.jsonl=2 sees it twice"),
    ("a.jsonl,,b.jsonl", "accepted: FILE, or FILE=WEIGHT and globs, by commas"),
    ("{0}", "is a folder; give .*/[*].jsonl"),
    ("{0}/foreign.json", "coa import --file=.*foreign.json --variant=VARIANT"),
    ("{0}/trajectories.jsonl=0.01", "the weights leave no trajectory"),
  ],
)
def test_files_that_can_not_be_mixed_are_refused(config, tmp_path, text, message):
  (tmp_path / "foreign.json").write_text('[{"instruction": "Who?", "output": "x"}]')
  config.data.trajectories = text.format(tmp_path)
  with pytest.raises((ValueError, FileNotFoundError), match=message):
    sft.run(config, str(tmp_path / "w"))


def test_trajectories_that_are_all_too_long_say_what_to_raise(config, tmp_path):
  config.data.length = 8
  with pytest.raises(ValueError, match=r"0 within data.length=8 .*; raise data.length"):
    sft.run(config, str(tmp_path / "w"))


@pytest.mark.slow
def test_tokenised_data_is_not_tokenised_again(config, tmp_path, monkeypatch):
  """A resumed run reuses its own tokens; changed data is refused."""
  config.data.steps, workdir = 2, str(tmp_path / "w")
  config.checkpoint.every = 1
  first = sft.run(config, workdir)
  monkeypatch.setattr(Tokenizer, "encode_trajectories", None)
  assert sft.run(config, workdir) == first
  path = tmp_path / "trajectories.jsonl"
  path.write_text("\n".join(path.read_text().splitlines()[1:]))
  with pytest.raises(ConfigError, match=r"other contents of data\.trajectories"):
    sft.run(config, workdir)


@pytest.mark.parametrize("make", [toy.tokenizer, toy.stock_tokenizer])
def test_an_answer_ends_with_what_other_engines_stop_at(make, config, tmp_path):
  """With the tag's own token, or with end-of-text if the tag is plain text."""
  tokenizer, folder = make(), tmp_path / "start"
  save_model(folder, toy.MODEL, toy.params(), tokenizer)
  config.init, config.model = str(folder), {}
  config.data.steps, config.data.length = 0, 1024
  sft.run(config, str(tmp_path / "w"))
  trained = Dataset(str(tmp_path / "w" / "data"))
  for i in range(len(trained)):
    ids, ours = trained.read(i)
    assert ids[-1] == tokenizer.end_id and ours[-1]
    text = tokenizer.decode(ids).removesuffix(tokens.IM_END)
    assert text.endswith("</answer>")


def test_a_wrong_id_anywhere_in_the_file_is_named(config, tmp_path):
  bad, path, tok = 10**6, tmp_path / "trajectories.jsonl", toy.tokenizer()
  examples = [toy.written(*x, tok) for _ in range(6) for x in toy.SCRIPTS.items()]
  examples[-1].segments[-1].ids[0] = bad
  write_jsonl(path, examples)
  toy.save_policy(str(tmp_path / "model"), toy.params())
  config.init, config.model = str(tmp_path / "model"), {}
  message = (
    rf"trajectories\.jsonl: trajectory {len(examples)}: task .* token id {bad} in"
  )
  with pytest.raises(ValueError, match=message):
    sft.run(config, str(tmp_path / "w"))


@pytest.mark.slow
def test_one_flipped_bit_of_what_was_derived_is_said_and_mended(
  config, tmp_path, caplog
):
  config.data.steps, config.checkpoint.every, config.checkpoint.keep = 4, 2, 2
  whole, broken = tmp_path / "whole", tmp_path / "broken"
  expected = sft.run(config, str(whole))
  shutil.copytree(whole, broken)
  shutil.rmtree(broken / "checkpoints" / "4")  # as if killed before step 4
  derived = ("data/tokens.int32", "data/sequences.npy", "tokenizer/tokenizer.json")
  for name in derived:
    damaged = bytearray((broken / name).read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (broken / name).write_bytes(damaged)
  assert sft.run(config, str(broken))["loss"] == expected["loss"]
  assert caplog.text.count("has other bytes than were written") == 2
  for name in derived:
    assert (broken / name).read_bytes() == (whole / name).read_bytes()
  for name in os.listdir(whole / "model"):
    ours, theirs = (w / "model" / name for w in (broken, whole))
    assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.slow
def test_unusable_trajectories_are_left_out_and_counted(config, tmp_path):
  """Too long for a row, or without policy tokens: such a row's mean loss is 0 / 0."""
  path = tmp_path / "trajectories.jsonl"
  examples = read_trajectories(path)
  for t in examples[4:8]:
    t.segments = [s for s in t.segments if s.author != Author.POLICY]
  write_jsonl(path, examples)
  config.data.update(steps=3, rows=1, length=64, validation=0)
  config.data.validate_every = 0  # only at the end
  results = sft.run(config, str(tmp_path / "w"))
  tok = Tokenizer.load(tmp_path / "w" / "tokenizer")
  whole = [toy.written(q, s, tok) for q, s in toy.SCRIPTS.items()]
  long = sum(t.num_tokens > 64 for t in whole)
  assert 0 < long < 4
  assert results["left_out_too_long"] == 4 * long
  assert results["left_out_without_policy"] == 4
  assert results["trajectories"] == 16 - 4 * long
  assert results["validation_loss"] is None  # nothing was held out
  params = load_model(tmp_path / "w" / "model")[1]
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))
  log = read_metrics(str(tmp_path / "w" / "metrics.jsonl"), "sft")
  assert [r["step"] for r in log if "validation_loss" in r] == [3]


def test_a_loss_that_is_no_number_ends_the_run_unsaved(config, tmp_path, monkeypatch):
  real, calls = Learner.step, []

  def step(self, state, *args):
    state, values = real(self, state, *args)
    calls.append(1)
    return state, values | ({"grad_norm": np.float32("nan")} if len(calls) == 3 else {})

  monkeypatch.setattr(Learner, "step", step)
  config.checkpoint.update(every=1, keep=5)
  with pytest.raises(ValueError, match=r"update 3: grad_norm is nan.*Lower optim\.lr"):
    sft.run(config, str(tmp_path / "w"))
  assert whole_steps(str(tmp_path / "w" / "checkpoints")) == [1, 2]
  assert not (tmp_path / "w" / "model").exists()


@pytest.mark.slow
def test_two_processes_train_one_model(config, tmp_path):
  """Starts the launcher twice with --distributed; both write to one workdir."""
  given = {"trajectories": config.data.trajectories, "rows": 4, "steps": 6}
  command = ["-m", "experiments.sft", "--compile_cache="]
  command += ["--config=configs/sft_world.py:tiny", "--config.data.validation=4"]
  command += [f"--config.data.{k}={v}" for k, v in given.items()]
  command += ["--config.checkpoint.every=3"]
  two = [*command, f"--workdir={tmp_path / 'two'}"]
  address, devices = free_address(), virtual_devices.environment(2)
  outputs(*([*two, f"--distributed={address},2,{i}"] for i in range(2)), **devices)
  outputs([*command, f"--workdir={tmp_path / 'one'}"])
  results = [
    json.loads((tmp_path / n / "results.json").read_text())["validation_loss"]
    for n in ("one", "two", "two/process_1")
  ]
  assert results == pytest.approx([results[0]] * 3, rel=1e-5)
  a, b = (load_model(tmp_path / n / "model")[1] for n in ("one", "two"))
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_allclose(x, y, atol=2e-3 * float(np.abs(x).max()))
