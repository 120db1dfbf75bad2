"""The part of vLLM's HTTP that the engine speaks, with a script for a model.

It continues every row of ids that begins as a script does with the script's next turn,
and goes on past the turn's end: it stops at no tag. Weights are really loaded and
scored, so that a refresh can succeed or not. It misbehaves when told to.
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
# Faults are many here: no test waits a second for each.
VllmConfig.backoff_s = 0.001
PAST = 7  # what it goes on with after the end of a script's turn


class ScriptedVllm(Server):
  """See `Server`.

  Attributes:
    faults: of completions: called with a body, gives a status to fail with, "hang"
      (until `release` is set), "gone" (hang up), a function that changes the answer, or
      None to answer.
    model: what /server_info says of it.
    max_model_len: what /v1/models says.
    stale: a folder whose weights it goes on serving, whatever is loaded.
    hangups: completions that hung until their client left.
    sampling: completions that run.
    disturbed: those that ran at each load of weights.
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
    """A config that asks this server."""
    fields = dict(folder=folder, url=self.url, timeout_s=300.0)
    return VllmConfig(**{**fields, **changes})

  def completions(self) -> list[dict]:
    """Bodies of the requests that sample."""
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
    with self.lock:  # before the answer: who has it may load other weights
      self.sampling -= sampling
    request.send_json(answer, answer if isinstance(answer, int) else 200)

  def answer(self, path: str, body: dict) -> dict | int:
    """What the server says: JSON, or a status."""
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
    """The script's next turn, and then some; log-probs say where each id stands."""
    ids = body["prompt"]
    (row,) = {tuple(r) for r in self.rows if r[: len(ids)] == ids}
    new = [*row[len(ids) :], *[PAST] * 1000][: body["max_tokens"]]
    logps = [-0.001 * (len(ids) + n) for n in range(len(new))]
    choice = {"prompt_token_ids": ids, "token_ids": new}
    return {"choices": [{**choice, "logprobs": {"token_logprobs": logps}}]}

  def score(self, body: dict) -> dict:
    """Log-probs of the prompt under the weights that are served."""
    ids = body["prompt"]
    cfg, params = load_model(self.stale or self.folder)
    batch = batching.empty(1, len(ids))
    batch.tokens_BT[0], batch.segment_BT[:] = ids, 1
    batch.position_BT[0] = np.arange(len(ids))
    logps = np.asarray(log_probs.token_logps(cfg, params, batch)[0])[0].tolist()
    rows = [{str(i): {"logprob": x}} for i, x in zip(ids, logps, strict=True)]
    choice = {"prompt_token_ids": ids, "prompt_logprobs": [None, *rows[1:]]}
    return {"choices": [choice]}


def rows_of(tok: Tokenizer) -> list[list[int]]:
  """The ids of every script of `toy`."""
  played = [toy.written(q, script, tok) for q, script in toy.SCRIPTS.items()]
  return [[i for s in t.segments for i in s.ids] for t in played]


def turns_of(tok: Tokenizer) -> dict[str, list[list[int]]]:
  """Question -> the ids of each of its policy turns."""
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
  """A worker over the server; exports below the folder."""
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
  """Every trajectory by (task, sample)."""
  args = dict(temperature=1.0, version=5, params=toy.params()) | changes
  params, toolbox = args.pop("params"), toolbox or toy.TableToolbox()
  groups = on.generate_groups(params, toy.TASKS, toolbox, samples, seed=seed, **args)
  return {(t.task_id, t.sample): t for group in groups for t in group}
