"""The SFT journey: what it trains on, what it leaves out, what it refuses."""

from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys

import jax
import ml_collections
import numpy as np
import pytest
import toy

from coa_jax import sft
from coa_jax.config import ConfigError
from coa_jax.learner.checkpoint import whole_steps
from coa_jax.learner.dataset import Dataset
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
from coa_jax.report.metrics import read_metrics


@pytest.fixture
def config(tmp_path) -> ml_collections.ConfigDict:
  """Fresh parameters, 4 scripts five times over, each time as other tasks."""
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
      model=dict(width=32, layers=2, heads=4, kv_heads=2, head_dim=8, ff=64),
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
  assert len(list((workdir / "tensorboard" / "sft").iterdir())) == 1
  # The held-out scripts are those trained on, so both losses fall together.
  assert log[0]["loss"] > 5.5 > 4.5 > log[-1]["loss"] == results["loss"]
  assert abs(results["validation_loss"] - results["loss"]) < 0.5
  cfg, params = load_model(workdir / "model")
  tok = Tokenizer.load(workdir / "model")
  assert cfg.vocab_size % 64 == 0 and 0 <= cfg.vocab_size - tok.vocab_size < 64
  assert results["parameters"] == count_params(params)
  assert len(tok.encode("</answer>")) == 1


def test_long_trajectories_are_left_out_and_counted(config, tmp_path):
  config.data.length = 64
  config.data.validation = 0
  results = sft.run(config, str(tmp_path / "w"))
  tok = Tokenizer.load(tmp_path / "w" / "tokenizer")
  examples = [toy.written(q, s, tok) for q, s in toy.SCRIPTS.items()]
  long = [t.num_tokens > 64 for t in examples]
  assert 0 < sum(long) < 4
  assert results["left_out_too_long"] == 5 * sum(long)
  assert results["trajectories"] == 20 - 5 * sum(long)
  assert results["validation_loss"] is None  # nothing was held out


def test_without_updates_the_model_is_as_it_begins(config, tmp_path):
  config.data.steps = 0
  results = sft.run(config, str(tmp_path / "w"))
  assert results["steps"] == 0 and "loss" not in results
  cfg, params = load_model(str(tmp_path / "w" / "model"))
  fresh = init_params(cfg, config.data.get("seed", 0))
  assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), params, fresh))
  Tokenizer.load(str(tmp_path / "w" / "model"))


def test_no_copy_of_a_held_out_task_is_trained_on(config, tmp_path):
  path = tmp_path / "trajectories.jsonl"
  examples = read_trajectories(path)
  write_jsonl(path, examples + examples[:6])
  config.data.steps = 1
  results = sft.run(config, str(tmp_path / "w"))
  # 26 in all; 4 are held out, and so are their copies; the other two copies are not.
  assert results["trajectories"] == 26 - 4 - 4


@pytest.mark.parametrize(
  ("section", "field", "value", "message"),
  [
    ("model", "kv_heads", 3, "'model': kv_heads 3 does not divide heads 4"),
    ("optim", "name", "sgd", "'optim': name 'sgd'; accepted: adamw, muon"),
    ("data", "stepz", 1, "'data' has no field 'stepz'; did you mean 'steps'"),
    ("data", "trajectories", "nowhere.jsonl", "nowhere.jsonl"),
    # What could not be written in the end is not trained.
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


def test_nothing_left_to_train_on_is_said_and_can_be_mended(config, tmp_path):
  config.data.validation, validation = 20, config.data.validation
  with pytest.raises(ValueError, match=r"20 read, 20 within .* 20 kept for validation"):
    sft.run(config, str(tmp_path / "w"))
  config.data.validation, config.data.steps = validation, 1
  assert sft.run(config, str(tmp_path / "w"))["trajectories"] == 16


def test_an_empty_file_is_said(config, tmp_path):
  (tmp_path / "trajectories.jsonl").write_text("")
  with pytest.raises(ValueError, match="there is no trajectory in it"):
    sft.run(config, str(tmp_path / "w"))


def test_a_broken_row_is_named_and_a_mended_file_may_use_the_workdir(config, tmp_path):
  path, workdir = tmp_path / "trajectories.jsonl", str(tmp_path / "w")
  whole = path.read_text()
  path.write_text(whole + '{"task_id": 1}\n')
  with pytest.raises(ValueError, match=r"trajectories\.jsonl:21: field .task_id. is 1"):
    sft.run(config, workdir)
  path.write_text(whole)
  config.data.steps = 1
  assert sft.run(config, workdir)["trajectories"] == 16


def test_what_was_tokenised_is_not_tokenised_again(config, tmp_path, monkeypatch):
  """A run that is continued finds its tokens, and no other run's."""
  config.data.steps, workdir = 2, str(tmp_path / "w")
  config.checkpoint.every = 1
  first = sft.run(config, workdir)
  monkeypatch.setattr(Tokenizer, "encode_trajectory", None)
  assert sft.run(config, workdir) == first
  path = tmp_path / "trajectories.jsonl"
  path.write_text("\n".join(path.read_text().splitlines()[1:]))
  with pytest.raises(ConfigError, match=r"other contents of data\.trajectories"):
    sft.run(config, workdir)


@pytest.mark.parametrize("made", [toy.tokenizer, toy.stock_tokenizer])
def test_an_answer_ends_with_what_other_engines_stop_at(made, config, tmp_path):
  """With the token that its tag is, or, where the tag is text, with end-of-text."""
  tokenizer, folder = made(), tmp_path / "start"
  cfg = toy.MODEL
  save_model(folder, cfg, init_params(cfg, 0), tokenizer)
  config.init, config.model = str(folder), {}
  config.data.steps, config.data.length = 0, 1024
  sft.run(config, str(tmp_path / "w"))
  trained = Dataset(str(tmp_path / "w" / "data"))
  for i in range(len(trained)):
    ids, ours = trained.read(i)
    assert ids[-1] == tokenizer.end_id and ours[-1]
    text = tokenizer.decode(ids).removesuffix(tokens.IM_END)
    assert text.endswith("</answer>")


@pytest.mark.parametrize("bad", [-7, 10**6])
def test_a_wrong_id_anywhere_in_the_file_is_named(config, tmp_path, bad):
  path, tok = tmp_path / "trajectories.jsonl", toy.tokenizer()
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


@pytest.mark.parametrize("at_end", [False, True])
def test_one_flipped_bit_of_what_was_derived_is_said_and_mended(
  config, tmp_path, caplog, at_end
):
  config.data.steps, config.checkpoint.every, config.checkpoint.keep = 4, 2, 2
  whole, broken = tmp_path / "whole", tmp_path / "broken"
  kept = sft.run(config, str(whole))
  shutil.copytree(whole, broken)
  if not at_end:  # as if it had been killed on its way
    shutil.rmtree(broken / "checkpoints" / "4")
  derived = ("data/tokens.int32", "data/sequences.npy", "tokenizer/tokenizer.json")
  for name in derived:
    damaged = bytearray((broken / name).read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (broken / name).write_bytes(damaged)
  assert sft.run(config, str(broken))["loss"] == kept["loss"]
  assert caplog.text.count("has other bytes than were written") == 2
  for name in derived:
    assert (broken / name).read_bytes() == (whole / name).read_bytes()
  for name in os.listdir(whole / "model"):
    ours, theirs = (w / "model" / name for w in (broken, whole))
    assert ours.read_bytes() == theirs.read_bytes()


def test_a_kernel_that_the_platform_lacks_is_refused_before_training(config, tmp_path):
  config.model.attention = "splash"
  with pytest.raises(ValueError, match=r"model\.attention='splash' needs a TPU"):
    sft.run(config, str(tmp_path / "w"))
  assert not (tmp_path / "w" / "checkpoints").exists()


def test_trajectories_without_the_policy_are_left_out_and_counted(config, tmp_path):
  """A row of nothing else has no mean loss: 0 / 0."""
  path = tmp_path / "trajectories.jsonl"
  examples = read_trajectories(path)
  for t in examples[4:8]:
    t.segments = [s for s in t.segments if s.author != Author.POLICY]
  write_jsonl(path, examples)
  config.data.update(steps=3, rows=1, validation=0)
  config.data.validate_every = 0  # at the end alone
  results = sft.run(config, str(tmp_path / "w"))
  assert results["left_out_without_policy"] == 4 and results["trajectories"] == 16
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
  """The launcher twice, with --distributed; both write one workdir."""
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{s.getsockname()[1]}"
  overrides = {"trajectories": config.data.trajectories, "rows": 4, "steps": 6}
  command = [sys.executable, "-m", "experiments.sft", "--compile_cache="]
  command += ["--config=configs/sft_world.py:tiny", f"--workdir={tmp_path / 'two'}"]
  command += [f"--config.data.{k}={v}" for k, v in overrides.items()]
  command += ["--config.data.validation=4", "--config.checkpoint.every=3"]
  env = {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
  }
  root = pathlib.Path(__file__).parent.parent
  both = [
    subprocess.Popen(
      [*command, f"--distributed={address},2,{i}"],
      cwd=root,
      env=env,
      stderr=subprocess.PIPE,
      text=True,
    )
    for i in range(2)
  ]
  # Both are read at once: one whose pipe is full would hold up the other.
  with concurrent.futures.ThreadPoolExecutor(2) as threads:
    errors = list(threads.map(lambda p: p.communicate(timeout=1500)[1], both))
  assert [p.returncode for p in both] == [0, 0], [e[-3000:] for e in errors]
  alone = [w.replace(str(tmp_path / "two"), str(tmp_path / "one")) for w in command]
  subprocess.run(alone, cwd=root, env={**env, "XLA_FLAGS": ""}, check=True)
  results = [
    json.loads((tmp_path / n / "results.json").read_text())["validation_loss"]
    for n in ("one", "two", "two/process_1")
  ]
  assert results == pytest.approx([results[0]] * 3, rel=1e-5)
  a, b = (load_model(tmp_path / n / "model")[1] for n in ("one", "two"))
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_allclose(x, y, atol=2e-3 * float(np.abs(x).max()))
