"""A vLLM server's weights, refused servers, and whole evaluations."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import sys

import ml_collections
import numpy as np
import pytest
import scripted_vllm
import toy
from playing import threads
from scripted_vllm import ScriptedVllm, play, vllm_worker

from coa_jax import evaluate
from coa_jax.learner.algorithms import BatchConfig
from coa_jax.learner.teachers import ModelTeacher
from coa_jax.model.hf.io import save_model
from coa_jax.model.sharding import ONE_DEVICE
from coa_jax.protocol.trajectory import Author, Status, read_trajectories
from coa_jax.rollout.vllm.client import PROCESSOR, VllmConfig, VllmError, VllmServer
from coa_jax.rollout.vllm.teacher import ServerTeacher
from tests.backend import BACKEND


def test_weights_are_loaded_once_and_whenever_they_change(server, tmp_path):
  def loads() -> list[str]:
    paths = [r.path for r in server.requests]
    names = ("/collective_rpc", "/reset_prefix_cache")
    return [p for p in paths if p in names]

  on, one = vllm_worker(server, tmp_path), toy.params()
  play(on, params=one)
  once = ["/collective_rpc", "/reset_prefix_cache"]
  assert loads() == once and server.folder == str(tmp_path / "served")
  play(on, params=one)
  assert loads() == once
  # Only one array differs.
  other = {**one, "final_norm": one["final_norm"] * 1.5}
  play(on, params=other)
  assert loads() == once * 2


@pytest.mark.slow
def test_other_weights_than_ours_are_found_out(server, tmp_path):
  other = str(tmp_path / "other")
  save_model(other, toy.MODEL, toy.params(1))
  on = vllm_worker(server, tmp_path)
  play(on)
  server.stale = other
  changed = {**toy.params(), "final_norm": toy.params()["final_norm"] * 1.01}
  # After a failed refresh no weights count as served, not even the earlier ones.
  for params in (changed, changed, toy.params()):
    with pytest.raises(VllmError, match="does not compute what"):
      play(on, params=params)
  server.stale = ""
  assert len(play(on, params=changed)) == 8


@pytest.mark.slow
def test_a_server_scores_as_the_folder_that_it_serves(server, tmp_path):
  """A teacher needs no flags; prompts and observations are not scored."""
  server.folder, server.model = str(tmp_path / "served"), None
  save_model(server.folder, toy.MODEL, toy.params(1))
  trajectories = toy.trajectories()
  for s in (s for t in trajectories for s in t.segments):
    s.logps = [0.0] * len(s.ids)  # in place of the sampler's
  by_server = ServerTeacher(server.url, 256, toy.MODEL.vocab_size)
  batch = BatchConfig(rows=2, length=256)
  by_model = ModelTeacher(toy.MODEL, toy.params(1), batch, ONE_DEVICE)
  expected = by_model(trajectories, None)
  for theirs, ours in zip(by_server(trajectories, None), expected, strict=True):
    np.testing.assert_allclose(theirs, ours, atol=1e-5)
  server.max_model_len = 256
  with pytest.raises(VllmError, match="serves rows of 256 tokens"):
    ServerTeacher(server.url, 256, toy.MODEL.vocab_size)


@pytest.mark.parametrize(
  ("says", "message"),
  [
    ({"max_model_len": 255}, "rows of 255 tokens, rollout.max_len=256: .*--max-model"),
    ({"model": None}, "server_info.* status 404.*VLLM_SERVER_DEV_MODE=1"),
    ({"model": {"logprobs_mode": "raw_logprobs"}}, "--logprobs-mode=processed_logprob"),
  ],
)
def test_a_server_without_a_flag_is_refused_by_name(server, tmp_path, says, message):
  for name, value in says.items():
    setattr(server, name, value)
  with pytest.raises(VllmError, match=message):
    vllm_worker(server, tmp_path)


def test_a_grammar_wants_our_logits_processor_and_tells_it_each_turns_state(
  server, tmp_path
):
  with pytest.raises(
    VllmError, match=r"constrain=True: .* does not mask tokens by our"
  ):
    vllm_worker(server, tmp_path, constrain=True)
  server.model = {**server.model, "logits_processors": [PROCESSOR]}
  on = vllm_worker(server, tmp_path, constrain=True)
  played = play(on)
  assert all((t.status, t.reward) == (Status.ENDED, 1.0) for t in played.values())
  (path,) = map(str, tmp_path.glob("served.*.npz"))
  with np.load(path, allow_pickle=False) as tables:
    np.testing.assert_array_equal(tables["class_V"], on.constraint.class_V)
    np.testing.assert_array_equal(tables["next_SC"], on.constraint.next_SC)
  arguments = [body["vllm_xargs"] for body in server.completions()]
  assert {x["coa_grammar"] for x in arguments} == {path}
  # The grammar state of our own sampler at the start of each turn.
  expected = []
  for t in played.values():
    state, last = 0, None
    for s in t.segments:
      if s.author == Author.TOOL:
        state = int(on.constraint.resume_S[state])
      elif s.author == Author.POLICY:
        if state == 0 or last == Author.TOOL:
          expected.append(state)
        state = on.constraint.states(s.ids, state)[-1]
      last = s.author
  assert sorted(x["coa_state"] for x in arguments) == sorted(expected)
  assert len(set(expected)) > 1


def test_a_token_that_the_grammar_does_not_allow_ends_the_run(server, tmp_path):
  server.model = {**server.model, "logits_processors": [PROCESSOR]}

  def other(answer: dict) -> dict:
    answer["choices"][0]["token_ids"][0] = scripted_vllm.PAST
    return answer

  server.faults = lambda body: other
  with pytest.raises(VllmError, match=r"sampled token 7, which rollout\.constrain"):
    play(vllm_worker(server, tmp_path, constrain=True))


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"url": "localhost:8000"}, "must start with http://"),
    ({"folder": ""}, "name a folder"),
    ({"serve": sys.executable, "url": "http://x"}, "leave one of them out"),
    ({"serve": "/no/vllm"}, "serve '/no/vllm' is no program"),
    ({"flags": ("--x",)}, r"flags need vllm\.serve"),
  ],
)
def test_impossible_sections_are_refused(changes, message: str):
  with pytest.raises(ValueError, match=message):
    VllmConfig(**{"folder": "x", **changes})


def journey(server: ScriptedVllm, folder) -> ml_collections.ConfigDict:
  toy.save_policy(str(folder / "model"), toy.params())
  tasks = folder / "tasks.jsonl"
  tasks.write_text(
    '{"id": "2 + 3", "question": "2 + 3", "answers": ["5"], "kind": "qa"}\n'
  )
  vllm = dict(url=server.url, folder=str(folder / "served"))
  return ml_collections.ConfigDict(
    dict(
      init=str(folder / "model"),
      rollout=dict(style="brief", slots=2, max_len=128),
      tools=dict(tools=("code",), sandbox=BACKEND),
      tasks=dict(uri=str(tasks)),
      eval=dict(samples=2),
      vllm=vllm,
    )
  )


@pytest.mark.slow
def test_evaluate_plays_on_the_server(server, tmp_path):
  """Greedy and sampled attempts, with the real tool."""
  results = evaluate.run(journey(server, tmp_path), str(tmp_path / "w"))
  assert results["usage"]["generated"] > 0
  temperatures = sorted(body["temperature"] for body in server.completions())
  assert temperatures == [0.0] * 2 + [1.0] * 4
  for name, number in (("greedy", 1), ("sampled", 2)):
    played = read_trajectories(str(tmp_path / "w" / f"{name}.jsonl"))
    assert [(t.status, t.reward) for t in played] == [(Status.ENDED, 1.0)] * number


def test_no_server_is_one_clear_error_before_any_work(server, tmp_path):
  config = journey(server, tmp_path)
  config.vllm.url = "http://127.0.0.1:9"
  with pytest.raises(
    VllmError, match=r"127\.0\.0\.1:9/v1/models gave no usable answer"
  ):
    evaluate.run(config, str(tmp_path / "w"))
  assert not (tmp_path / "w").exists()


def test_a_client_that_nobody_has_leaves_nothing_behind(server, tmp_path):
  gc.collect()
  before = len(threads("vllm"))
  config = server.config(str(tmp_path))
  with pytest.raises(VllmError, match=r"rollout\.max_len=5000"):
    VllmServer(config, 5000, 10)
  assert len(threads("vllm")) == before
  clients = [VllmServer(config, 100, 10) for _ in range(3)]
  assert len(threads("vllm")) == before + 3
  clients[0].close()
  assert len(threads("vllm")) == before + 2
  clients[0].close()  # no effect the second time
  hung = clients[1].submit(asyncio.sleep(600))
  del clients
  gc.collect()
  assert len(threads("vllm")) == before
  with pytest.raises(concurrent.futures.CancelledError):
    hung.result(60)


@pytest.mark.parametrize("t", [1e-9, 1e-4])
def test_a_temperature_that_vllm_would_change_is_not_asked_for(server, tmp_path, t):
  on = vllm_worker(server, tmp_path)
  if t > 1e-5:
    with pytest.raises(ValueError, match=r"temperature 0\.0001: vLLM would sample at"):
      play(on, temperature=t)
  else:  # greedy here, so greedy on the server
    play(on, temperature=t)
    assert {body["temperature"] for body in server.completions()} == {0.0}
