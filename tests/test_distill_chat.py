"""Distillation over a real endpoint: killed and resumed, best of N, a real vLLM."""

from __future__ import annotations

import json
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import time

import ml_collections
import pytest
import real_vllm
import toy
from chat_server import ChatServer

from coa_jax import distill
from coa_jax.data.tasks.sources import load_tasks
from coa_jax.data.tasks.world.build import WorldConfig, write_world
from coa_jax.data.teacher import runs
from coa_jax.data.teacher.backend import InfrastructureError, Reply
from coa_jax.data.teacher.scripted import Rates, ScriptedBackend, ScriptedConfig
from coa_jax.model import transformer
from coa_jax.model.config import ModelConfig
from coa_jax.model.hf.io import save_model
from coa_jax.protocol.trajectory import read_trajectories
from coa_jax.runtime.config import ConfigError
from tests.backend import BACKEND

ROOT = pathlib.Path(__file__).parent.parent
CONFIG = runpy.run_path(str(ROOT / "configs" / "distill_chat.py"))["get_config"]
TASKS = 16


@pytest.fixture(scope="module")
def files(tmp_path_factory):
  """A small world's pages and tasks."""
  world = WorldConfig(towns=40, people=60, films=20, companies=20, train_worlds=1)
  return write_world(tmp_path_factory.mktemp("world"), "train", TASKS, world)


def config_for(files, url: str, **teacher) -> ml_collections.ConfigDict:
  config = CONFIG("")
  config.tasks = dict(uri=files["tasks"])
  config.tools.corpus = files["corpus"]
  config.tools.sandbox = BACKEND
  config.teacher = dict(backend="chat", workers=3, **teacher)
  config.chat = dict(base_url=url, model="scripted", timeout_s=300.0)
  return config


def rows(path) -> list[dict]:
  """Returns the complete rows: a kill may have cut the last one."""
  return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


class Slow:
  """A slow backend, so that a kill arrives in the middle of replies."""

  def __init__(self, backend, seconds: float):
    self.backend, self.seconds = backend, seconds

  def __call__(self, agent, messages):
    time.sleep(self.seconds)
    return self.backend(agent, messages)


CHILD = """
import json, sys, ml_collections
from coa_jax import distill
from tests.backend import BACKEND
config = ml_collections.ConfigDict(json.load(open(sys.argv[1])))
distill.run(config, sys.argv[2])
"""


@pytest.mark.slow
def test_killed_again_and_again_no_call_is_paid_for_twice(files, tmp_path):
  """After SIGKILL in the middle of replies, the trajectories are bit-identical."""
  tasks = load_tasks(files["tasks"])
  scripted = ScriptedBackend(tasks, ScriptedConfig())
  workers, killed, lost = 3, 0, 0
  with ChatServer(Slow(scripted, 0.02)) as server:
    config = config_for(files, server.url)
    distill.run(config, str(tmp_path / "whole"))
    whole = len(server.requests)
    server.requests.clear()
    config_file = tmp_path / "config.json"
    config_file.write_text(json.dumps(config.to_dict()))
    calls = tmp_path / "cut" / "calls.jsonl"
    command = [sys.executable, "-c", CHILD, str(config_file), str(tmp_path / "cut")]
    for share in (0.3, 0.7):
      child = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
      try:
        while len(server.requests) < share * whole and child.poll() is None:
          time.sleep(0.005)
        assert child.poll() is None
      finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
      while server.clients:  # until the server has read its requests
        time.sleep(0.005)
      killed += 1
      models = sum(r["kind"] == "model" for r in rows(calls))
      assert len(server.requests) - lost - models <= workers
      lost = len(server.requests) - models
    done_before = rows(tmp_path / "cut" / "runs.jsonl")
    results = distill.run(config, str(tmp_path / "cut"))
    requests = len(server.requests)
  assert 0 < len(done_before) < TASKS
  assert sum(r["kind"] == "model" for r in rows(calls)) == whole
  assert requests - whole == lost <= killed * workers
  files, contents = [], []
  for name in ("whole", "cut"):
    files.append((tmp_path / name / "trajectories.jsonl").read_bytes())
    runs_file = rows(tmp_path / name / "runs.jsonl")
    contents.append([[e["content"] for e in run["events"]] for run in runs_file])
  assert files[0] == files[1] and contents[0] == contents[1]
  bill = results["calls"]
  for m in read_trajectories(tmp_path / "cut" / "teacher.jsonl"):
    n = m.usage.model_calls
    assert m.meta["reported"] == [100 * n, 64 * n, 7 * n]
  assert bill["calls"] == whole and bill["prompt"] == 100 * whole
  assert sum(bill["by_agent"].values()) == whole


@pytest.mark.slow
def test_faults_of_the_endpoint_are_billed_and_change_nothing(files, tmp_path):
  scripted = ScriptedBackend(load_tasks(files["tasks"]), ScriptedConfig())
  empty = {"choices": [], "usage": {"prompt_tokens": 50, "completion_tokens": 1}}
  with ChatServer(scripted) as server:
    config = config_for(files, server.url)
    plain = distill.run(config, str(tmp_path / "plain"))
    server.faults = ["ok", 500, "ok", "cut", 429, "garbage", empty, "ok", empty]
    config.chat.prices = (1.0, 0.1, 4.0)
    faulty = distill.run(config, str(tmp_path / "faulty"))
  texts = [
    (tmp_path / w / "trajectories.jsonl").read_bytes() for w in ("plain", "faulty")
  ]
  assert texts[0] == texts[1]
  assert faulty["calls"]["retries"] == 6 and plain["calls"]["retries"] == 0
  assert faulty["calls"]["prompt"] == plain["calls"]["prompt"] + 100
  calls = faulty["calls"]["calls"]
  usd = (36 * calls + 100) * 1.0 + 64 * calls * 0.1 + (7 * calls + 2) * 4.0
  assert faulty["calls"]["usd"] == pytest.approx(usd / 1e6)
  assert plain["calls"]["usd"] is None
  shown = rows(tmp_path / "faulty" / "metrics.jsonl")[-1]  # the last progress row
  assert shown["usd"] == faulty["calls"]["usd"] and shown["calls"] == calls
  faults = [
    r["reply"]["faults"]
    for r in rows(tmp_path / "faulty" / "calls.jsonl")
    if r["kind"] == "model"
  ]
  assert sum(map(len, faults)) == 6


@pytest.mark.slow
def test_a_server_that_moved_is_found_again_with_other_limits(files, tmp_path):
  scripted = ScriptedBackend(load_tasks(files["tasks"]), ScriptedConfig())
  with ChatServer(scripted) as server:
    server.faults = ["ok"] * 30 + [500] * 10_000
    config = config_for(files, server.url)
    config.chat.retries = 0
    with pytest.raises(InfrastructureError, match="in a row failed"):
      distill.run(config, str(tmp_path))
    paid = sum(r["kind"] == "model" for r in rows(tmp_path / "calls.jsonl"))
  assert paid == 30
  with ChatServer(scripted) as moved:
    config.chat.base_url, config.chat.retries, config.teacher.workers = moved.url, 3, 8
    bill = distill.run(config, str(tmp_path))["calls"]
    assert bill["calls"] == paid + len(moved.requests)
    config.chat.temperature = 0.1
    with pytest.raises(ConfigError, match=r"chat\.temperature was"):
      distill.run(config, str(tmp_path))


@pytest.mark.slow
def test_best_of_n_keeps_the_run_that_the_selector_names(files, tmp_path):
  tasks = load_tasks(files["tasks"])
  truth = {t.question: t.answers[0] for t in tasks}
  rates = Rates(slip=0.6, premature=0.5, caught=0.1)
  samples = [ScriptedBackend(tasks, ScriptedConfig(), s, rates) for s in range(3)]
  shown: list[str] = []

  def backend(agent, messages):
    """Samples make different errors; this selector knows the truth."""
    if agent != runs.SELECTOR:
      return samples[backend.sample](agent, messages)
    text = messages[1].content
    shown.append(text)
    question = text.splitlines()[0].removeprefix("Question: ")
    for number, part in enumerate(text.split("\n[candidate ")[1:], 1):
      if part.rpartition("[answer]\n")[2].strip() == truth[question]:
        return Reply(f"BEST: {number}\nWHY: right")
    return Reply("BEST: 1\nWHY: none is right")

  real = distill.solve

  def solve(task, model, call, tools, limits, encode, sample):
    backend.sample = sample
    return real(task, model, call, tools, limits, encode, sample)

  with pytest.MonkeyPatch.context() as patch, ChatServer(backend) as server:
    patch.setattr(distill, "solve", solve)
    config = config_for(files, server.url, samples=3, select=True)
    config.teacher.workers = 1  # so that the server knows the caller's sample
    results = distill.run(config, str(tmp_path))
  best = results["best_of_n"]
  assert best["tasks"] == TASKS and shown
  assert best["right"] == best["any"] > best["first"]
  assert (
    best["how"]["selector"] == len(shown) == results["calls"]["by_agent"]["selector"]
  )
  picks = {r["task_id"]: r["sample"] for r in rows(tmp_path / "selections.jsonl")}
  found = read_trajectories(tmp_path / "trajectories.jsonl")
  assert found and all(t.sample == picks[t.task_id] for t in found)
  assert results["convert"]["dropped"]["not_selected"] == 2 * TASKS


@pytest.mark.parametrize(
  "change, words",
  [
    (dict(select=True), "samples to 2"),
    (dict(backend="scripted", facts=True), "ask for backend 'chat'"),
  ],
)
def test_refusals(files, tmp_path, change, words):
  config = config_for(files, "http://localhost:9/v1")
  config.teacher.update(change)
  with pytest.raises(ConfigError, match=words):
    distill.run(config, str(tmp_path))


TEMPLATE = (
  "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}<|assistant|>"
)


@real_vllm.NEEDED
def test_garbage_from_a_real_server_is_handled(files, tmp_path):
  """A random model behind `vllm serve`: every run ends and is billed."""
  cfg = ModelConfig(
    vocab_size=384,
    width=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=32,
    ff=128,
    qk_norm=True,
    attention_bias=False,
  )
  folder, template = str(tmp_path / "model"), tmp_path / "chat.jinja"
  save_model(folder, cfg, transformer.init_params(cfg, 0), tokenizer=toy.tokenizer())
  template.write_text(TEMPLATE)
  flags = (f"--chat-template={template}", "--enable-prompt-tokens-details")
  flags += ("--max-model-len=2048", "--enable-prefix-caching", "--block-size=32")
  with real_vllm.served(folder, str(tmp_path / "log"), *flags) as client:
    url = str(client.base_url).rstrip("/") + "/v1"
    config = config_for(files, url, samples=2, select=True, facts=True)
    config.tasks.limit = 6
    config.chat = dict(base_url=url, model="m", max_tokens=48)
    results = distill.run(config, str(tmp_path / "out"))
    wrong = config.copy_and_resolve_references()
    wrong.chat.model = "another"
    with pytest.raises(Exception, match="no model 'another'"):
      distill.run(wrong, str(tmp_path / "wrong"))
  assert results["runs"] == 12 and results["infrastructure"] == 0
  assert results["right"] == 0.0 and results["kept"] == 0
  done = rows(tmp_path / "out" / "runs.jsonl")
  assert len(done) == 12
  events = [e for r in done for e in r["events"]]
  assert {r["status"] for r in done} <= {"ended", "turn_limit"}
  assert any(e["kind"] == runs.MALFORMED for e in events)
  bill = results["calls"]
  assert bill["calls"] >= 12 * 6 and bill["models"] == {"m": bill["calls"]}
  assert bill["prompt"] > bill["cached"] > 0 and bill["completion"] > 0
  reported = [e["reported"] for e in events if e["prompt"]]
  assert all(len(r) == 3 for r in reported)
  assert not rows(tmp_path / "wrong" / "calls.jsonl")
