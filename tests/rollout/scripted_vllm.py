"""A mock vLLM server: the HTTP endpoints that the engine uses, with scripted answers.

Every prompt must be the beginning of a script. The server continues it with the rest,
past the next turn's end: it does not stop at tags. Weights are really loaded and
scored, so a refresh can succeed or fail. Tests can inject faults.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence

import numpy as np
import toy
from http_server import Request, Server

from coa_jax.learner import batch as batching
from coa_jax.learner import log_probs
from coa_jax.model.config import ModelConfig
from coa_jax.model.hf.io import load_model
from coa_jax.protocol.tokens import Tokenizer
from coa_jax.protocol.trajectory import Author
from coa_jax.rollout.setup import make_worker
from coa_jax.rollout.types import RolloutConfig
from coa_jax.rollout.vllm.client import VllmConfig
from coa_jax.rollout.worker import RolloutWorker

CONFIG = RolloutConfig(style="brief", slots=3, max_len=256)
# Many tests inject faults: none should wait a second for each retry.
VllmConfig.backoff_s = 0.001
PAST = 7  # filler token after a script's end


class ScriptedVllm(Server):
  """See `Server`.

  Attributes:
    faults: called with each sampling request's body; returns an error status, "hang"
      (until `release` is set), "gone" (hang up, from now on), a function to change the
      answer, or None for a normal answer.
    model: the model config in /server_info; None for status 404.
    max_model_len: the limit in /v1/models.
    stale: a folder; if set, its weights are served, whatever was loaded.
    hangups: hung completions with a disconnected client.
    sampling: completions now running.
    disturbed: `sampling` at each load of weights.
  """

  keep_alive = True

  def __init__(self, tok: Tokenizer, rows: Sequence[list[int]] = ()):
    super().__init__()
    self.tokenizer = tok
    self.rows = rows or rows_of(tok)
    self.faults = lambda body: None
    self.release = threading.Event()
    self.model = {"logprobs_mode": "processed_logprobs"}
    self.max_model_len = 4096
    self.folder = ""
    self.stale = ""
    self.gone = False
    self.hangups = 0
    self.sampling = 0
    self.disturbed: list[int] = []

  def config(self, folder: str, **changes) -> VllmConfig:
    """A client config for this server."""
    fields = dict(folder=folder, url=self.url, timeout_s=300.0)
    return VllmConfig(**{**fields, **changes})

  def completions(self) -> list[dict]:
    """Bodies of the sampling requests."""
    out = [r.json for r in self.requests if r.path == "/v1/completions"]
    return [body for body in out if "prompt_logprobs" not in body]

  def __exit__(self, *error):
    self.release.set()
    super().__exit__(*error)

  def respond(self, request: Request) -> None:
    body = request.json
    sampling = request.path == "/v1/completions" and "prompt_logprobs" not in body
    with self.lock:
      self.sampling += sampling
    fault = self.faults(body) if sampling else None
    if fault == "hang" and request.wait_for_hangup(self.release):
      self.hangups += 1
      request.close_connection = True
      return
    if fault == "gone" or self.gone:
      self.gone = True
      request.close_connection = True
      return
    answer = fault if isinstance(fault, int) else self.answer(request.path, body)
    if callable(fault):
      answer = fault(answer)
    with self.lock:  # before the answer: its receiver may load other weights
      self.sampling -= sampling
    request.send_json(answer, answer if isinstance(answer, int) else 200)

  def answer(self, path: str, body: dict) -> dict | int:
    """Returns the reply: JSON, or an error status."""
    path, _, query = path.partition("?")
    if path == "/v1/models":
      return {"data": [{"id": "m", "max_model_len": self.max_model_len}]}
    if path == "/server_info" and self.model is not None:
      assert query == "config_format=json"
      return {"vllm_config": {"model_config": self.model}}
    if path == "/collective_rpc":
      assert body["method"] == "reload_weights"
      self.folder = body["kwargs"]["weights_path"]
      self.disturbed.append(self.sampling)
      return {"results": [None]}
    if path == "/reset_prefix_cache":
      return {"success": True}
    if path == "/v1/completions" and body["model"] == "m":
      return self.score(body) if "prompt_logprobs" in body else self.sample(body)
    return 404

  def sample(self, body: dict) -> dict:
    """Continues the script past the turn's end; log-probs encode the ids' positions."""
    ids = body["prompt"]
    (row,) = {tuple(r) for r in self.rows if r[: len(ids)] == ids}
    new = [*row[len(ids) :], *[PAST] * 1000][: body["max_tokens"]]
    logps = [-0.001 * (len(ids) + n) for n in range(len(new))]
    choice = {"prompt_token_ids": ids, "token_ids": new}
    return {"choices": [{**choice, "logprobs": {"token_logprobs": logps}}]}

  def score(self, body: dict) -> dict:
    """Returns the prompt's log-probs under the served weights."""
    ids = body["prompt"]
    cfg, params = load_model(self.stale or self.folder)
    batch = batching.empty(1, len(ids))
    batch.tokens_BT[0] = ids
    batch.segment_BT[:] = batch.loss_mask_BT[:] = 1
    batch.position_BT[0] = np.arange(len(ids))
    logps = np.asarray(log_probs.token_logps(cfg, params, batch)[0])[0].tolist()
    rows = [{str(i): {"logprob": x}} for i, x in zip(ids, logps, strict=True)]
    choice = {"prompt_token_ids": ids, "prompt_logprobs": [None, *rows[1:]]}
    return {"choices": [choice]}


def rows_of(tok: Tokenizer) -> list[list[int]]:
  """The token ids of every `toy` script."""
  played = [toy.written(q, script, tok) for q, script in toy.SCRIPTS.items()]
  return [[i for s in t.segments for i in s.ids] for t in played]


def turns_of(tok: Tokenizer) -> dict[str, list[list[int]]]:
  """Question -> the token ids of each policy turn."""
  out = {}
  for q, script in toy.SCRIPTS.items():
    segments = toy.written(q, script, tok).segments
    out[q] = [s.ids for s in segments if s.author == Author.POLICY]
  return out


def vllm_worker(
  server: ScriptedVllm,
  folder,
  request_tokens: int = 256,
  model: ModelConfig = toy.MODEL,
  **changes,
) -> RolloutWorker:
  """Makes a worker on the server; weights are exported below the folder."""
  config = dataclasses.replace(CONFIG, **changes)
  vllm = server.config(str(folder / "served"), request_tokens=request_tokens)
  return make_worker(
    model,
    server.tokenizer,
    config,
    toy.TOOLS,
    vllm=vllm,
    policy_changes=request_tokens < 256,
  )


def play(on: RolloutWorker, toolbox=None, samples: int = 2, seed: int = 3, **changes):
  """Plays the toy tasks; returns the trajectories by (task, sample)."""
  args = dict(temperature=1.0, version=5, params=toy.params()) | changes
  params, toolbox = args.pop("params"), toolbox or toy.TableToolbox()
  groups = on.generate_groups(params, toy.TASKS, toolbox, samples, seed=seed, **args)
  return {(t.task_id, t.sample): t for group in groups for t in group}
