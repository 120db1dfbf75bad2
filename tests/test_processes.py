"""Two processes are one: rollouts token for token, and the training that follows."""

from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest
import toy
from rollout import scripted_vllm

from coa_jax.protocol.trajectory import Status, Trajectory, read_trajectories
from coa_jax.report.metrics import read_metrics
from coa_jax.tasks.sampling import TaskSampler
from coa_jax.tasks.task import Task
from tests.backend import BACKEND

ROOT = pathlib.Path(__file__).parent.parent
SUMS = {"2 + 3": "5", "4 * 4 + 1": "17"}  # questions of toy.SCRIPTS


@pytest.fixture(scope="module")
def sections(tmp_path_factory) -> dict:
  """A policy that calls a tool and guesses, tasks for it, and what journeys share."""
  folder = tmp_path_factory.mktemp("policy")
  right = {"sky": "blue", "sea": "blue", "rose": "red", "wine": "red"}
  examples = [
    toy.written(q, (toy.code("print(2+3)"), "5", toy.end(a)), toy.tokenizer())
    for q in right
    for a in ("red", "blue")
  ]
  toy.save_policy(str(folder / "model"), toy.train(examples, 200).params)
  tasks = folder / "tasks.jsonl"
  rows = [{"id": q, "question": q, "answers": [a]} for q, a in right.items()]
  tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return dict(
    init=str(folder / "model"),
    rollout=dict(style="brief", slots=8, max_len=toy.MAX_LEN, inject_rows=4),
    tools=dict(tools=["code"], sandbox=BACKEND),
    tasks=dict(uri=str(tasks)),
  )


def run(
  journey: str, sections: dict, out: pathlib.Path, processes: int, devices: int
) -> None:
  """Runs it in so many processes of so many devices each."""
  out.mkdir()
  config = out / "config.in"
  config.write_text(json.dumps(sections))
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{s.getsockname()[1]}"
  command = [sys.executable, str(ROOT / "tests" / "in_processes.py"), journey]
  command += [str(config), str(out / "run"), str(devices)]
  env = {**os.environ, "PYTHONPATH": str(ROOT)}
  started = [
    subprocess.Popen(
      [*command, *([address, str(processes), str(i)] if processes > 1 else [])],
      env=env,
      stderr=subprocess.PIPE,
      text=True,
    )
    for i in range(processes)
  ]

  def finish(process: subprocess.Popen) -> None:
    _, errors = process.communicate(timeout=1500)
    assert process.returncode == 0, errors[-3000:]

  # All are read at once: one whose pipe is full would hold up the other.
  with concurrent.futures.ThreadPoolExecutor(processes) as threads:
    list(threads.map(finish, started))


def content(t: Trajectory) -> tuple:
  segments = [(s.author, s.text, s.ids, s.logps) for s in t.segments]
  return t.task_id, t.sample, segments, [c.result for c in t.calls], t.status, t.reward


@pytest.mark.slow
def test_evaluation_in_two_processes_is_that_of_one(sections, tmp_path):
  config = {**sections, "eval": dict(greedy=True, samples=3)}
  one, two, split = tmp_path / "one", tmp_path / "two", tmp_path / "split"
  run("evaluate", config, one, processes=1, devices=1)
  run("evaluate", config, two, processes=2, devices=1)
  config["mesh"] = dict(tensor=2)
  run("evaluate", config, split, processes=2, devices=2)
  for name in ("greedy.jsonl", "sampled.jsonl"):
    expected = [content(t) for t in read_trajectories(one / "run" / name)]
    assert sum(bool(t[3]) for t in expected) >= 4
    for folder in (two / "run", two / "run" / "process_1"):
      assert [content(t) for t in read_trajectories(folder / name)] == expected
  # Over `tensor` products are added up in another order: the same tokens, greedily.
  again = read_trajectories(split / "run" / "greedy.jsonl")
  tokens = [[s.ids for s in t.segments] for t in again]
  once = read_trajectories(one / "run" / "greedy.jsonl")
  assert tokens == [[s.ids for s in t.segments] for t in once]


@pytest.mark.slow
def test_evaluation_over_vllm_in_two_processes_is_that_of_one(tmp_path):
  """Each plays its own task over one server, which is given the weights once."""
  toy.save_policy(str(tmp_path / "model"), toy.params())
  tasks = tmp_path / "tasks.jsonl"
  rows = [{"id": q, "question": q, "answers": [a]} for q, a in SUMS.items()]
  tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
  with scripted_vllm.ScriptedVllm(toy.tokenizer()) as server:
    config = dict(
      init=str(tmp_path / "model"),
      rollout=dict(style="brief", slots=2, max_len=toy.MAX_LEN),
      tools=dict(tools=["code"], sandbox=BACKEND),
      tasks=dict(uri=str(tasks)),
      eval=dict(greedy=True, samples=2),
      vllm=dict(url=server.url, folder=str(tmp_path / "served"), retries=0),
    )
    for name, processes in {"one": 1, "two": 2}.items():
      server.requests.clear()
      run("evaluate", config, tmp_path / name, processes, devices=1)
      paths = [r.path for r in server.requests]
      assert paths.count("/collective_rpc") == 1
      assert paths.count("/weight_checker") == processes
      assert len(server.completions()) == 3 * (2 + 3)  # turns of the scripts
  for name in ("greedy.jsonl", "sampled.jsonl"):
    expected = [content(t) for t in read_trajectories(tmp_path / "one/run" / name)]
    assert [t[-2:] for t in expected] == [(Status.ENDED, 1.0)] * len(expected)
    for folder in ("two/run", "two/run/process_1"):
      again = read_trajectories(tmp_path / folder / name)
      assert [content(t) for t in again] == expected


@pytest.mark.slow
def test_rl_in_two_processes_is_that_of_one(sections, tmp_path):
  config = {
    **sections,
    "optim": dict(lr=1e-3),
    "algo": dict(
      steps=2,
      keep_every=1,
      sampling=dict(prompts=4, samples=4, rounds=1),
      batch=dict(rows=4, length=toy.MAX_LEN),
    ),
    "dev": dict(every=1, uri=sections["tasks"]["uri"]),
    "checkpoint": dict(every=1),
  }
  one, two = tmp_path / "one", tmp_path / "two"
  run("rl", config, one, processes=1, devices=1)
  run("rl", config, two, processes=2, devices=1)
  first = "trajectories/step_000000.jsonl"
  expected = [content(t) for t in read_trajectories(one / "run" / first)]
  for folder in (two / "run", two / "run" / "process_1"):
    assert [content(t) for t in read_trajectories(folder / first)] == expected
  losses = [
    [row["loss"] for row in read_metrics(str(folder / "metrics.jsonl"), "rl")]
    for folder in (one / "run", two / "run", two / "run" / "process_1")
  ]
  np.testing.assert_allclose(losses[1][0], losses[0][0], atol=1e-7)
  np.testing.assert_array_equal(losses[1], losses[2])
  assert (two / "run" / "model" / "config.json").exists()


@pytest.mark.slow
def test_rl_whose_rollouts_run_ahead_in_two_processes(sections, tmp_path):
  """Each plays every second group; both learn all of them, in the stream's order."""
  steps, prompts = 6, 3
  config = {
    **sections,
    "optim": dict(lr=1e-3),
    "algo": dict(
      steps=steps,
      keep_every=1,
      sampling=dict(prompts=prompts, samples=4, filter_groups=False, staleness=1),
      loss=dict(is_clip=2.0),
      batch=dict(rows=4, length=toy.MAX_LEN),
    ),
    "dev": dict(every=2, uri=sections["tasks"]["uri"]),
    "checkpoint": dict(every=2),
  }
  run("rl", config, tmp_path / "two", processes=2, devices=1)
  both = [tmp_path / "two" / "run", tmp_path / "two" / "run" / "process_1"]
  rows = pathlib.Path(sections["tasks"]["uri"]).read_text().splitlines()
  ids = [json.loads(row)["id"] for row in rows]
  draw = TaskSampler([Task(i, i, ("x",)) for i in ids], 0)
  for step in range(steps):
    name = f"trajectories/step_{step:06d}.jsonl"
    first, second = (read_trajectories(folder / name) for folder in both)
    assert [content(t) for t in first] == [content(t) for t in second]
    groups = range(step * prompts, (step + 1) * prompts)
    expected = [(draw.task(n, 0).id, k) for n in groups for k in range(4)]
    assert [(t.task_id, t.sample) for t in first] == expected
    versions = [v for t in first for s in t.segments for v in s.versions]
    assert step - 1 <= min(versions) and max(versions) <= step
  logs = [read_metrics(str(folder / "metrics.jsonl"), "rl") for folder in both]
  for name in ("loss", "dev_accuracy"):
    first, second = ([row.get(name) for row in log] for log in logs)
    assert first == second
  assert max(row["staleness_max"] for row in logs[0]) == 1
