"""Two processes equal one: the same rollout tokens, and the same training."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import os
import pathlib
import subprocess
import sys

import pytest
import toy
from programs import free_address
from rollout import scripted_vllm

from coa_jax.data.tasks.sampling import TaskSampler
from coa_jax.data.tasks.task import Task
from coa_jax.protocol.trajectory import Status, Trajectory, read_trajectories
from coa_jax.report import viewer
from coa_jax.report.metrics import read_metrics
from coa_jax.report.timers import RATE
from tests.backend import BACKEND

ROOT = pathlib.Path(__file__).parent.parent
RIGHT = {"sky": "blue", "sea": "blue", "rose": "red", "wine": "red"}
SUMS = {"2 + 3": "5", "4 * 4 + 1": "17"}  # questions of toy.SCRIPTS


@pytest.fixture(scope="module")
def sections(tmp_path_factory) -> dict:
  """Shared config sections: a policy that calls a tool and guesses, and its tasks."""
  folder = tmp_path_factory.mktemp("policy")
  examples = [
    toy.written(q, (toy.code("print(2+3)"), "5", toy.end(a)), toy.tokenizer())
    for q in RIGHT
    for a in ("red", "blue")
  ]
  toy.save_policy(str(folder / "model"), toy.train(examples, 200).params)
  tasks = folder / "tasks.jsonl"
  rows = [{"id": q, "question": q, "answers": [a]} for q, a in RIGHT.items()]
  tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return dict(
    init=str(folder / "model"),
    rollout=dict(style="brief", slots=8, max_len=toy.MAX_LEN, prefill_rows=4),
    tools=dict(tools=["code"], sandbox=BACKEND),
    tasks=dict(uri=str(tasks)),
  )


def run(
  journey: str,
  sections: dict,
  out: pathlib.Path,
  processes: int,
  devices: int,
  kill: str = "",
) -> None:
  """Runs `processes` processes with `devices` devices each; see `in_processes`."""
  out.mkdir(exist_ok=True)
  config = out / "config.in"
  config.write_text(json.dumps(sections))
  address = free_address()
  command = [sys.executable, str(ROOT / "tests" / "in_processes.py"), journey]
  command += [str(config), str(out / "run"), str(devices)]
  env = {**os.environ, "PYTHONPATH": str(ROOT), "KILL": kill}
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
    try:
      _, errors = process.communicate(timeout=1500)
    finally:
      process.kill()
    assert (process.returncode == 0) == (not kill), errors[-3000:]

  # Read all pipes at once: a process with a full pipe would block the other.
  with concurrent.futures.ThreadPoolExecutor(processes) as threads:
    list(threads.map(finish, started))


def timeless(row: dict) -> dict:
  """A metrics row without timings and per-process values."""
  clock = ("seconds", "mfu", "goodput", "useful_seconds", "processes")
  return {k: v for k, v in row.items() if not k.startswith(clock) and RATE not in k}


def content(t: Trajectory) -> tuple:
  segments = [(s.author, s.text, s.ids, s.logps) for s in t.segments]
  return t.task_id, t.sample, segments, [c.result for c in t.calls], t.status, t.reward


def folders(out: pathlib.Path, processes: int) -> list[pathlib.Path]:
  """Each process's output folder."""
  rest = [out / "run" / f"process_{i}" for i in range(1, processes)]
  return [out / "run", *rest]


def dealt(where: list[pathlib.Path], name: str, first: int, count: int) -> list:
  """Merges groups of 4 trajectories into the order of a single process.

  Args:
    where: the processes' folders, each with only its own groups.
    name: the file's name.
    first: the first group's number.
    count: the number of groups.
  """
  each = [iter(read_trajectories(folder / "trajectories" / name)) for folder in where]
  out = []
  for n in range(first, first + count):
    out += itertools.islice(each[n % len(each)], 4)
  assert not any(list(rest) for rest in each)
  return out


def played(out: pathlib.Path, processes: int, name: str) -> list[Trajectory]:
  """Merges an evaluation's trajectories; each process must have its own tasks."""
  each = [read_trajectories(folder / name) for folder in folders(out, processes)]
  tasks = list(RIGHT)
  for number, attempts in enumerate(each):
    ids = list(dict.fromkeys(t.task_id for t in attempts))
    assert ids == tasks[number::processes]
  every = itertools.chain.from_iterable(each)
  return sorted(every, key=lambda t: (tasks.index(t.task_id), t.sample))


def results(folder: pathlib.Path) -> dict:
  """An evaluation's results without timing."""
  out = json.loads((folder / "results.json").read_text())
  del out["usage"]["seconds"]
  return out


@pytest.mark.soak
def test_evaluation_in_two_processes_is_that_of_one(sections, tmp_path):
  """Each process writes its own trajectories and total results, even after a kill."""
  config = {**sections, "eval": dict(greedy=True, samples=3)}
  one, two, split = tmp_path / "one", tmp_path / "two", tmp_path / "split"
  run("evaluate", config, one, processes=1, devices=1)
  run("evaluate", config, two, processes=2, devices=1, kill="sampled.jsonl")
  found = [(folder / "sampled.jsonl").exists() for folder in folders(two, 2)]
  assert found == [True, False]
  run("evaluate", config, two, processes=2, devices=1)
  expected = results(one / "run")
  for folder in folders(two, 2):
    assert results(folder) == expected
  for name in ("greedy.jsonl", "sampled.jsonl"):
    attempts = [content(t) for t in read_trajectories(one / "run" / name)]
    assert sum(bool(t[3]) for t in attempts) >= 4
    assert [content(t) for t in played(two, 2, name)] == attempts
  assert len(viewer.find_files([str(two / "run")])) == 4

  # --- One process resumes and plays the missing tasks; then two, with duplicates.
  for processes in (1, 2):
    (two / "run" / "results.json").unlink()
    run("evaluate", config, two, processes, devices=1)
    assert results(two / "run") == expected
    assert len(read_trajectories(two / "run" / "sampled.jsonl")) == 3 * len(RIGHT)

  # --- `tensor` changes the order of summation: the greedy tokens stay the same.
  config["mesh"] = dict(tensor=2)
  run("evaluate", config, split, processes=2, devices=2)
  tokens = []
  for out, processes in ((one, 1), (split, 2)):
    again = played(out, processes, "greedy.jsonl")
    tokens.append([[s.ids for s in t.segments] for t in again])
  assert tokens[0] == tokens[1]


@pytest.mark.soak
def test_evaluation_over_vllm_in_two_processes_is_that_of_one(tmp_path):
  """Each process plays its own task on one server, which gets the weights once."""
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
      vllm=dict(url=server.url, folder=str(tmp_path / "served")),
    )
    for name, processes in {"one": 1, "two": 2}.items():
      server.requests.clear()
      run("evaluate", config, tmp_path / name, processes, devices=1)
      paths = [r.path for r in server.requests]
      assert paths.count("/collective_rpc") == 1
      compared = [r for r in server.requests if "prompt_logprobs" in (r.json or {})]
      assert len(compared) == processes
      assert len(server.completions()) == 3 * (2 + 3)  # the scripts' turns
  for name in ("greedy.jsonl", "sampled.jsonl"):
    expected = [content(t) for t in read_trajectories(tmp_path / "one/run" / name)]
    assert [t[-2:] for t in expected] == [(Status.ENDED, 1.0)] * len(expected)
    again: list[tuple] = []
    for folder in folders(tmp_path / "two", 2):
      again += map(content, read_trajectories(folder / name))
    assert again == expected  # one task per process


def two_steps(sections: dict) -> dict:
  """An RL config of two steps, each with an evaluation and a checkpoint."""
  return {
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


@pytest.mark.slow
def test_rl_in_two_processes_is_that_of_one(sections, tmp_path):
  """The same trajectories, each process writing its share, and the same training.

  Also if both learn on their first device and generate rollouts on their second.
  """
  config = two_steps(sections)
  one, two, apart = tmp_path / "one", tmp_path / "two", tmp_path / "apart"
  run("rl", config, one, processes=1, devices=2)
  run("rl", config, two, processes=2, devices=1)
  run("rl", {**config, "mesh": dict(rollout=2)}, apart, processes=2, devices=2)
  for step in range(2):
    name = f"step_{step:06d}.jsonl"
    expected = [content(t) for t in dealt(folders(one, 1), name, 4 * step, 4)]
    for out in (two, apart):
      assert [content(t) for t in dealt(folders(out, 2), name, 4 * step, 4)] == expected
  assert len(viewer.find_files([str(two / "run")])) == 4  # one page shows them all
  logs = []
  for folder in [*folders(one, 1), *folders(two, 2)]:
    rows = read_metrics(str(folder / "metrics.jsonl"), "rl")
    logs.append([timeless(row) for row in rows])
  assert logs[0] == logs[1] == logs[2]
  weights = [
    (out / "run/model/model.safetensors").read_bytes() for out in (one, two, apart)
  ]
  assert weights[0] == weights[1] == weights[2]


@pytest.mark.soak
@pytest.mark.parametrize("apart", [False, True])
def test_rl_whose_rollouts_run_ahead_in_two_processes(sections, tmp_path, apart: bool):
  """Each process plays every second group; both learn all groups, in stream order.

  Two-device replicas need devices apart from the learner's.
  """
  steps, prompts = 6, 3
  devices = 1
  if apart:
    devices = 3
    of_replicas = {**sections["rollout"], "tensor": 2}
    sections = {**sections, "mesh": dict(rollout=4), "rollout": of_replicas}
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
  run("rl", config, tmp_path / "two", processes=2, devices=devices)
  both = folders(tmp_path / "two", 2)
  rows = pathlib.Path(sections["tasks"]["uri"]).read_text().splitlines()
  ids = [json.loads(row)["id"] for row in rows]
  draw = TaskSampler([Task(i, i, ("x",)) for i in ids], 0)
  for step in range(steps):
    played = dealt(both, f"step_{step:06d}.jsonl", step * prompts, prompts)
    groups = range(step * prompts, (step + 1) * prompts)
    expected = [(draw.task(n, 0).id, k) for n in groups for k in range(4)]
    assert [(t.task_id, t.sample) for t in played] == expected
    versions = [v for t in played for s in t.segments for v in s.versions]
    assert step - 1 <= min(versions) and max(versions) <= step
  logs = [read_metrics(str(folder / "metrics.jsonl"), "rl") for folder in both]
  for name in ("loss", "dev_accuracy"):
    first, second = ([row.get(name) for row in log] for log in logs)
    assert first == second
  assert max(row["staleness_max"] for row in logs[0]) == 1
