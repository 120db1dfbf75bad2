"""The engine on a real `vllm serve`: sampled tokens and served weights.

Needs a real vLLM (`real_vllm`).
"""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Iterator

import guessing
import httpx
import jax
import ml_collections
import numpy as np
import pytest
import real_vllm
import toy

from coa_jax import rl
from coa_jax.data.tasks.task import Task
from coa_jax.learner.algorithms import BatchConfig
from coa_jax.learner.teachers import ModelTeacher
from coa_jax.model import transformer
from coa_jax.model.config import ModelConfig
from coa_jax.model.decode_params import decoding_views
from coa_jax.model.hf.io import load_model, save_model
from coa_jax.model.sharding import ONE_DEVICE
from coa_jax.protocol.trajectory import Author, Status, read_trajectories
from coa_jax.report.metrics import read_metrics
from coa_jax.rollout.setup import make_worker
from coa_jax.rollout.types import RolloutConfig
from coa_jax.rollout.vllm import weights
from coa_jax.rollout.vllm.client import VllmConfig, VllmError
from coa_jax.rollout.vllm.teacher import ServerTeacher
from coa_jax.rollout.worker import RolloutWorker

pytestmark = real_vllm.NEEDED

# vLLM's CPU kernels need a head dimension of 32. vLLM pads this vocabulary. The output
# matrix is untied: on a CPU vLLM does not reload a tied one.
CFG = ModelConfig(
  vocab_size=400,
  width=64,
  layers=2,
  heads=4,
  kv_heads=2,
  head_dim=32,
  ff=128,
  tie_embeddings=False,
)
TIED = dataclasses.replace(CFG, tie_embeddings=True)
CONFIG = RolloutConfig(style="brief", slots=4, max_len=toy.MAX_LEN)
# Small blocks, filled by one prompt: otherwise no prefix would be cached.
FLAGS = ("--logprobs-mode=processed_logprobs", "--block-size=32")


@functools.cache
def policy(steps: int) -> dict:
  """CFG trained on the scripts for N steps."""
  return toy.train(toy.trajectories(), steps, CFG).params


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
  """A server started from an untrained CFG."""
  folder = tmp_path_factory.mktemp("served")
  save_model(folder / "model", CFG, transformer.init_params(CFG, 7), toy.tokenizer())
  path = str(folder / "model")
  with real_vllm.served(path, str(folder / "log"), *FLAGS) as client:
    yield str(client.base_url)


def over_vllm(url: str, folder, model: ModelConfig = CFG, **changes) -> RolloutWorker:
  """Makes a worker on the server; both compute in float32, so differences are small."""
  config = dataclasses.replace(CONFIG, **changes)
  vllm = VllmConfig(
    folder=str(folder / "export"), url=url, max_logp_diff=1e-4, timeout_s=60.0
  )
  return make_worker(model, toy.tokenizer(), config, toy.TOOLS, vllm=vllm)


def groups(
  worker: RolloutWorker, params, samples: int, temperature: float, seed: int = 0
):
  toolbox = toy.TableToolbox()
  return worker.generate_groups(params, toy.TASKS, toolbox, samples, temperature, seed)


def assert_same_tokens(theirs: list, ours: list) -> None:
  for (a,), (b,) in zip(theirs, ours, strict=True):
    assert [s.ids for s in a.segments] == [s.ids for s in b.segments]


@pytest.mark.parametrize("steps", [200, 20])
def test_greedy_trajectories_are_those_of_our_own_sampler(url, tmp_path, steps: int):
  params = policy(steps)
  on = over_vllm(url, tmp_path)
  theirs = groups(on, params, 1, 0.0)
  ours = groups(make_worker(CFG, toy.tokenizer(), CONFIG, toy.TOOLS), params, 1, 0.0)
  assert_same_tokens(theirs, ours)
  for (a,), (b,) in zip(theirs, ours, strict=True):
    assert (a.status, a.reward, a.text) == (b.status, b.reward, b.text)
    assert [c.arguments for c in a.calls] == [c.arguments for c in b.calls]
    logps = toy.sampled_logps(a)
    np.testing.assert_allclose(logps, toy.sampled_logps(b), atol=1e-4)
  if steps == 200:
    assert all(t.status == Status.ENDED and t.reward == 1.0 for (t,) in theirs)


def test_prefixes_that_other_weights_cached_are_forgotten(url, tmp_path):
  task = Task("long", "how far is it from here to there " * 4, ("x",))
  on = over_vllm(url, tmp_path)
  own = make_worker(CFG, toy.tokenizer(), CONFIG, toy.TOOLS)
  for seed in (0, 1):
    args = (transformer.init_params(CFG, seed), [task], toy.TableToolbox(), 1, 0.0, 0)
    ((theirs,),), ((ours,),) = on.generate_groups(*args), own.generate_groups(*args)
    assert theirs.usage.prompt > 64
    assert [s.ids for s in theirs.segments] == [s.ids for s in ours.segments]
    logps = toy.sampled_logps(theirs)
    np.testing.assert_allclose(logps, toy.sampled_logps(ours), atol=1e-4)


@pytest.mark.parametrize("truncated", [False, True])
def test_sampled_log_probs_are_the_learners(url, tmp_path, truncated: bool):
  params = policy(15)
  changes = dict(top_k=30, top_p=0.95) if truncated else {}
  on = over_vllm(url, tmp_path, **changes)
  played = [t for g in groups(on, params, 4, 0.8) for t in g]
  assert len({t.text for t in played}) > len(toy.TASKS)
  cut = on.engine.config.truncation
  expected = toy.logps_of(CFG, params, played, 0.8, cut)
  for t, logps in zip(played, expected, strict=True):
    np.testing.assert_allclose(toy.sampled_logps(t), logps, atol=1e-4)
    policy_ids = [s for s in t.segments if s.author == Author.POLICY]
    assert sum(len(s.ids) for s in policy_ids) == t.usage.generated > 0
  other = [t.text for g in groups(on, params, 4, 0.8, seed=1) for t in g]
  assert other != [t.text for t in played]


def test_a_server_scores_as_the_folder_that_it_serves(url, tmp_path):
  """A teacher on a real server."""
  over_vllm(url, tmp_path).engine.server.refresh(policy(20))
  trajectories = toy.trajectories()
  for s in (s for t in trajectories for s in t.segments):
    s.logps = [0.0] * len(s.ids)  # in place of the sampler's
  by_server = ServerTeacher(url, toy.MAX_LEN, CFG.vocab_size)(trajectories, None)
  batch = BatchConfig(rows=2, length=toy.MAX_LEN)
  by_model = ModelTeacher(CFG, policy(20), batch, ONE_DEVICE)(trajectories, None)
  for theirs, ours in zip(by_server, by_model, strict=True):
    np.testing.assert_allclose(theirs, ours, atol=1e-4)


def leaf_names() -> list[str]:
  paths = jax.tree_util.tree_leaves_with_path(transformer.init_params(CFG, 0))
  return sorted({path[-1].key for path, _ in paths})


def test_every_kind_of_array_reaches_the_server(url, tmp_path):
  """Even the arrays that vLLM packs together; its log-probs show it."""
  engine = over_vllm(url, tmp_path).engine.server
  one, other = transformer.init_params(CFG, 0), transformer.init_params(CFG, 1)
  engine.refresh(one)

  def own(params) -> np.ndarray:
    return weights.score(CFG, ONE_DEVICE, decoding_views(CFG, params)[0], range(3, 40))

  before = own(one)
  assert len(leaf_names()) >= 12
  for name in leaf_names():

    def pick(path, x, y, name=name):
      return (y * 1.3 if "norm" in name else y) if path[-1].key == name else x

    mixed = jax.tree_util.tree_map_with_path(pick, one, other)
    engine.refresh(mixed)  # raises if the server's log-probs differ
    assert np.abs(own(mixed) - before).mean() > 50 * 1e-4, name


def test_a_tied_output_matrix_that_vllm_left_behind_is_found_out(tmp_path):
  """In vLLM 0.32 on a CPU the reload omits it."""
  path = str(tmp_path / "model")
  save_model(path, TIED, transformer.init_params(TIED, 0), toy.tokenizer())
  with real_vllm.served(
    path, str(tmp_path / "log"), *FLAGS, "--enforce-eager"
  ) as client:
    engine = over_vllm(str(client.base_url), tmp_path, TIED).engine.server
    with pytest.raises(VllmError, match="does not compute what"):
      engine.refresh(transformer.init_params(TIED, 1))
    engine.refresh(transformer.init_params(TIED, 0))


@pytest.fixture
def started(tmp_path, monkeypatch) -> VllmConfig:
  """Config for a server that the run starts and ends."""
  monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
  return VllmConfig(
    folder=str(tmp_path / "export"),
    serve=real_vllm.VLLM,
    flags=("--block-size=32", "--enforce-eager"),
    max_logp_diff=1e-4,
    timeout_s=60.0,
  )


def test_a_server_that_the_run_starts_serves_its_policy(started, tmp_path):
  """It replaces a separately started server, and ends with the worker."""
  on = make_worker(CFG, toy.tokenizer(), CONFIG, toy.TOOLS, vllm=started)
  own = make_worker(CFG, toy.tokenizer(), CONFIG, toy.TOOLS)
  for seed in (0, 1):
    params = transformer.init_params(CFG, seed)
    assert_same_tokens(groups(on, params, 1, 0.0), groups(own, params, 1, 0.0))
  (log,) = tmp_path.glob("export.*.log")
  port = log.name.split(".")[1]
  assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
  del on
  gc.collect()  # the worker is part of a cycle
  with pytest.raises(httpx.ConnectError):
    httpx.get(f"http://127.0.0.1:{port}/health")


def test_under_the_grammar_vllm_samples_what_our_sampler_would(started):
  """Greedy tokens are the same; sampled ones have our sampler's log-probs."""
  config = dataclasses.replace(CONFIG, constrain=True)
  on = make_worker(CFG, toy.tokenizer(), config, toy.TOOLS, vllm=started)
  own = make_worker(CFG, toy.tokenizer(), config, toy.TOOLS)
  for params in (policy(60), policy(0)):
    assert_same_tokens(groups(on, params, 1, 0.0), groups(own, params, 1, 0.0))
    sampled = [t for group in groups(on, params, 4, 1.0) for t in group]
    assert params is policy(0) or sum(len(t.calls) for t in sampled) >= 4
    for t, logps in zip(sampled, own.rescore(params, sampled, 1.0), strict=True):
      np.testing.assert_allclose(toy.sampled_logps(t), logps, atol=1e-4)
    # The grammar did forbid some tokens.
    free = dataclasses.replace(CONFIG, constrain=False)
    free = make_worker(CFG, toy.tokenizer(), free, toy.TOOLS)
    logp_diff = np.concatenate(free.rescore(params, sampled, 1.0)) - np.concatenate(
      [toy.sampled_logps(t) for t in sampled]
    )
    assert logp_diff.min() < -1e-3 and logp_diff.max() < 1e-4


def journey(
  url: str, tmp_path, staleness: int = 0, **algo
) -> ml_collections.ConfigDict:
  """RL config for a policy with different answers to one question."""
  config = guessing.rl_config(tmp_path, CFG, steps=200)
  with config.unlocked():
    config.update(
      optim=dict(schedule="cosine", b2=0.95),
      rollout=dict(slots=8),
      vllm=dict(folder=str(tmp_path / "export"), url=url, max_logp_diff=1e-4),
      dev=dict(every=2),
      checkpoint=dict(every=2),
    )
    config.algo = dict(
      sampling=dict(prompts=2, samples=8, rounds=2, staleness=staleness),
      loss=dict(is_clip=2.0),
      batch=dict(rows=8, length=128),
      **algo,
    )
  return config


@pytest.mark.slow
def test_rl_whose_rollouts_run_ahead(url, tmp_path):
  """Weights change within trajectories, between requests."""
  config = journey(url, tmp_path, steps=6, staleness=1, keep_every=1)
  with config.unlocked():
    config.vllm.request_tokens = 8
  rl.run(config, str(tmp_path / "w"))
  log = read_metrics(str(tmp_path / "w" / "metrics.jsonl"), "rl")
  assert len(log) == 6 and max(row["staleness_max"] for row in log) == 1
  assert all(row["infrastructure"] == 0 for row in log)
  played = read_trajectories(str(tmp_path / "w" / "trajectories" / "step_000005.jsonl"))
  versions = [v for t in played for s in t.segments for v in s.versions]
  assert set(versions) <= {4, 5}
  # The first policy sampled all tokens of the first step.
  first = read_trajectories(str(tmp_path / "w" / "trajectories" / "step_000000.jsonl"))
  params = load_model(str(tmp_path / "model"))[1]
  expected = toy.logps_of(CFG, params, first)
  for t, logps in zip(first, expected, strict=True):
    assert {v for s in t.segments for v in s.versions} == {0}
    np.testing.assert_allclose(toy.sampled_logps(t), logps, atol=1e-4)
