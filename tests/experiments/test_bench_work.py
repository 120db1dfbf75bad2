"""Contestants of a benchmark do the work described in its table."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
import toy

from coa_jax import rl
from coa_jax.learner import log_probs
from coa_jax.learner.algorithms import PRESETS, preset
from coa_jax.learner.batch import Batch
from coa_jax.model.cache import row_bytes
from coa_jax.model.hf.io import load_model
from coa_jax.model.variants import variant
from coa_jax.runtime.config import read_config
from configs import rl_qwen
from experiments.bench import (
  algorithms,
  gpu_work,
  hlo_text,
  peers,
  rl_work,
  run_programs,
  train,
  train_work,
)

FIELDS = train_work.model_fields(V=64, D=16, L=1, N=2, K=1, H=8, F=32)
SIZE = train_work.Size(FIELDS, rows=2, steps=1, length=64)
JOB = {
  "model": FIELDS,
  "dtype": "float32",
  "prompt": 6,
  "new": 4,
  "calls": 2,
  "observation": 3,
  "trajectories": 3,
  "prompts": 2,
  "samples": 2,
  "length": 6 + 3 * 4 + 2 * 3,
}


def test_a_plan_of_rl_has_groups_of_one_prompt_and_no_padding():
  plan = rl_work.make_plan(JOB, latency=True)
  assert plan.prompts[0] == plan.prompts[1] != plan.prompts[2] == plan.prompts[3]
  assert plan.observations[0] != plan.observations[1]
  fixed = [*plan.prompts, *(o for os in plan.observations for o in os)]
  assert all(min(ids) > 0 for ids in fixed)


@pytest.mark.slow
def test_micro_batches_are_all_rows_and_the_loss_is_the_librarys(tmp_path):
  folder = str(tmp_path)
  peers.write_job(folder, {"size": dataclasses.asdict(SIZE), "settings": {}})
  train_work.write_work(folder)
  work = train_work.Work(folder, {"rows": 1})
  first = work.micro_batches()
  (whole,) = train_work.Work(folder, {"rows": 9}).micro_batches()
  for name, x in whole.items():
    assert np.array_equal(np.concatenate([b[name] for b in first]), x)
  cfg, params = load_model(str(tmp_path / "model"))
  zeros = np.zeros_like(whole["weight"])
  batch = Batch(
    tokens_BT=whole["tokens"],
    segment_BT=whole["segment"],
    position_BT=whole["position"],
    loss_mask_BT=whole["weight"],
    advantage_BT=zeros,
    logp_BT=zeros,
    grammar_BT=np.full_like(whole["tokens"], -1),
  )
  logp_BT, *_ = log_probs.token_logps(cfg, params, batch)
  loss = float(log_probs.nll(logp_BT, batch.loss_mask_BT) / work.tokens)
  (row,) = train.measure("tiny", SIZE, {}, {"ours": {"rows": 1}}, rounds=1)
  assert row["first_loss"] == pytest.approx(loss, rel=1e-5)


def test_a_step_of_decoding_reads_the_weights_once_and_every_sequences_cache():
  # Published: 7.6B parameters, 0.54B of them in the input embedding.
  cfg = variant("qwen2.5-7b")
  empty = gpu_work.step_bytes(cfg, 1, 0)
  assert empty == pytest.approx(2 * (7.616e9 - 0.545e9), rel=0.01)
  # 28 layers with 4 kv heads of width 128: 56 KiB per token.
  cached = gpu_work.step_bytes(cfg, 32, 100) - gpu_work.step_bytes(cfg, 32, 0)
  assert cached == 32 * 100 * 57_344


# --- RL benchmarks.


@pytest.mark.parametrize(("name", "quick"), [(n, n == "ppo") for n in PRESETS])
def test_every_algorithm_has_its_presets_fields_and_the_same_budget(
  name, quick, tmp_path
):
  (tmp_path / "sft" / "model").mkdir(parents=True)

  algo, other = (
    read_config(algorithms.config_of(n, str(tmp_path), 2, 5, quick), rl.RLConfig).algo
    for n in (name, "dapo")
  )
  for section, fields in preset(name).items():
    values = {k: getattr(getattr(algo, section), k) for k in fields}
    assert values == fields | ({"rounds": 1} if "rounds" in fields else {})
  assert algo.sampling.rounds == 1
  assert algo.steps == other.steps == (2 if quick else 5)
  assert algo.sampling.prompts == other.sampling.prompts
  assert algo.sampling.samples == other.sampling.samples


# --- A run's programs.


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_every_kind_of_program_can_be_lowered(staleness: int, monkeypatch):
  """For one local device: not every machine has the TPU compiler."""
  monkeypatch.setattr(run_programs, "variant", lambda *_, **__: toy.MODEL)
  config = rl_qwen.get_config("tiny")
  config.algo.loss.update(kl_coef=0.1, is_clip=2.0)  # adds the reference's scores
  config.algo.sampling.staleness = staleness
  settings = read_config(config, rl.RLConfig)
  run = run_programs.make_run(settings, jax.devices()[:1], hbm=1e9, model="toy")
  programs = {p.name: p for p in run_programs.programs(run, live=100)}
  deciding = [p.name for p in programs.values() if p.decides]
  assert deciding == [
    "learn",
    "score",
    "convert",
    "prefill 1 x 512, 4 of 16 pages",
    "window 4 x 8, 4 of 16 pages",
  ]
  for name in deciding:
    assert "func" in programs[name].lower().as_text()
  # The whole state stays in memory during decoding. With staleness, rollouts continue
  # during learning, so two views and the cache stay in memory.
  state = run_programs.device_bytes(run.state) + run_programs.device_bytes(run.frozen)
  assert programs[deciding[-1]].beside >= state
  view = run_programs.device_bytes(run_programs.decoding_params(run))
  cache = row_bytes(run.decoder, 1024) * 4
  assert programs["learn"].beside == staleness * (2 * view + cache)
  # On their own devices, rollouts share no memory with the learner.
  mesh = dataclasses.replace(run.settings.mesh, rollout=1)
  settings = dataclasses.replace(run.settings, mesh=mesh)
  apart = run_programs.programs(dataclasses.replace(run, settings=settings), live=100)
  beside = {p.name: p.beside for p in apart if p.name in deciding}
  assert beside["learn"] == 0 and beside[deciding[-1]] == staleness * view


def test_bytes_of_types_and_of_collectives_and_groups_in_every_notation():
  shape = "(bf16[2,3]{1,0:T(8,128)(2,1)}, pred[4], f8e4m3fn[5], s4[6], f32[])"
  assert hlo_text.array_bytes(shape) == [12, 4, 5, 3, 4]
  # Per device, in a group of four.
  for kind, sent in (("all-gather", 75), ("all-reduce", 150)):
    assert hlo_text.Collective(kind, 3, 100, 4, "").sent == 3 * sent
  groups = {
    "replica_groups=[16,4]<=[64]": 4,
    "replica_groups={{0,1,2},{3,4,5}}": 3,
    "replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0','axis_1'}": 8,
    "replica_groups=mesh['axis_0'=8] {'axis_0':(2)4}": 4,
    "source_target_pairs={{0,1}}": 64,
  }
  assert {text: hlo_text.group_size(text, 64) for text in groups} == groups
