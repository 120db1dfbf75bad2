"""A run killed anywhere and restarted is bit-identical to an uninterrupted run."""

from __future__ import annotations

import collections
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import warnings

import jax
import ml_collections
import numpy as np
import orbax.checkpoint as ocp
import pytest
import toy
import virtual_devices

from coa_jax.learner.algorithms import preset
from coa_jax.learner.checkpoint import whole_steps
from coa_jax.protocol.trajectory import write_jsonl
from coa_jax.report.timers import RATE
from tests.backend import BACKEND

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

TIMES = ("seconds", "useful_seconds", "goodput")  # prefixes of fields that differ


@pytest.fixture(scope="module")
def configs(tmp_path_factory) -> dict[str, dict]:
  """Configs of a few updates: SFT, RL, and RL with a critic and a reference."""
  folder = tmp_path_factory.mktemp("inputs")
  write_jsonl(folder / "trajectories.jsonl", toy.trajectories() * 6)
  toy.save_policy(str(folder / "model"), toy.actor(75).params)
  (folder / "tasks.jsonl").write_text(
    "".join(
      json.dumps({"id": q, "question": q, "answers": [a]}) + "\n"
      for q, a in (("2 + 3", "5"), ("4 * 4 + 1", "17"), ("mixed", "7"))
    )
  )
  tasks = str(folder / "tasks.jsonl")
  out = {
    "sft": dict(
      init=str(folder / "model"),
      model={},
      optim=dict(name="muon", lr=0.01, warmup=2),
      data=dict(
        trajectories=str(folder / "trajectories.jsonl"),
        steps=9,
        rows=2,
        length=toy.MAX_LEN,
        micro_batches=2,
        validation=2,
        validate_every=4,
      ),
      checkpoint=dict(every=2, keep=2),
    ),
    "rl": dict(
      init=str(folder / "model"),
      model={},
      optim=dict(lr=1e-3),
      rollout=dict(style="brief", slots=8, max_len=toy.MAX_LEN),
      tools=dict(tools=["code"], sandbox=BACKEND),
      tasks=dict(uri=tasks),
      algo=dict(
        steps=6,
        keep_every=1,
        sampling=dict(prompts=2, samples=4, rounds=2),
        batch=dict(rows=1, length=128, minibatches=2),
      ),
      dev=dict(every=3, uri=tasks),
      checkpoint=dict(every=2, keep=2),
    ),
  }
  ppo = preset("ppo")
  algo = dict(
    steps=3,
    sampling=dict(prompts=2, samples=4, rounds=1, **ppo["sampling"]),
    loss=dict(is_clip=2.0, critic_lr=1e-3, **ppo["loss"]),
    batch=dict(rows=8, length=128, minibatches=2),
  )
  out["ppo"] = {**out["rl"], "algo": algo}
  return out


def read(*path: str) -> bytes:
  with open(os.path.join(*path), "rb") as f:
    return f.read()


def timeless(workdir: str) -> list[dict]:
  """The metrics without timings."""
  rows = [json.loads(line) for line in read(workdir, "metrics.jsonl").splitlines()]
  return [
    {k: v for k, v in r.items() if not k.startswith(TIMES) and RATE not in k}
    for r in rows
  ]


KILL, TERM, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT
# Per run: the ends of its successive processes in one workdir; see `killed.py`.
ENDS = {
  "sft": [
    ("micro-batch", 2, KILL),
    ("log", 3, KILL),
    ("save", 2, KILL),
    ("log", 1, INT),
    ("damage", 0, 0),
  ],
  "rl": [
    ("decode", 1, KILL),
    ("tool", 2, KILL),
    ("micro-batch", 2, KILL),
    ("save", 1, KILL),
    ("seal", 1, KILL),
    ("decode", 40, TERM),
    ("damage", 0, 0),
  ],
  "ppo": [("log", 1, TERM)],
}


def lives(
  journey: str, config: dict, workdir: str, ends: list, scratch: str = ""
) -> tuple[list, str]:
  """Runs a process for each end, then one to completion; returns rows and stderr.

  With `scratch` the workdir is in a bucket, and each process acts as another machine.
  """
  job = dict(journey=journey, config=config, workdir=workdir)
  if scratch:
    job["scratch"] = scratch
  path = (scratch or workdir) + ".json"
  with open(path, "w", encoding="utf-8") as f:
    json.dump({**job, "ends": [*ends, ("", 0, 0)]}, f)
  done = subprocess.run(
    [sys.executable, os.path.join(ROOT, "tests", "killed.py"), path],
    env={
      **os.environ,
      "PYTHONPATH": os.pathsep.join([ROOT, *sys.path]),
      "XLA_FLAGS": virtual_devices.QUICK,  # in both runs
    },
    capture_output=True,
    text=True,
    timeout=900,
  )
  assert done.returncode == 0, done.stderr
  rows = [json.loads(line) for line in done.stdout.splitlines()]
  signals = [(place, n) for place, _, n in ends if n] + [("", 0)]
  for row, (place, n) in zip(rows, signals, strict=True):
    # A random kill may come too late for a quick run.
    late = place == "random" and row["code"] == 0
    expected = -n if n == KILL else n and 128 + n
    assert late or row["code"] == expected, done.stderr
  return rows, done.stderr


def trajectories(workdir: str) -> dict[str, list[dict]]:
  """All stored trajectories by file, without timings."""
  out = {}
  for name in sorted(os.listdir(os.path.join(workdir, "trajectories"))):
    rows = out[name] = []
    for line in read(workdir, "trajectories", name).splitlines():
      row = json.loads(line)
      for timed in (row["usage"], *row["calls"]):
        del timed["seconds"]
      rows.append(row)
  return out


def state(workdir: str) -> list:
  """All arrays in the last checkpoint."""
  folder = os.path.join(workdir, "checkpoints")
  path = os.path.join(folder, str(whole_steps(folder)[-1]), "state")
  with ocp.PyTreeCheckpointer() as orbax, warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that it reads shardings from the file
    return jax.tree.leaves(orbax.restore(path))


def assert_same_run(broken: str, whole: str) -> None:
  """Compares log, parameters, optimizer, model and trajectories bit for bit."""
  assert timeless(broken) == timeless(whole)
  for x, y in zip(state(broken), state(whole), strict=True):
    np.testing.assert_array_equal(x, y)
  for name in ("model.safetensors", "config.json", "tokenizer.json"):
    assert read(broken, "model", name) == read(whole, "model", name), name
  results, expected = (json.loads(read(w, "results.json")) for w in (broken, whole))
  assert set(results) == set(expected)
  clock = {k for k in expected if k.startswith(TIMES) or "tokens_per_second" in k}
  for key in set(expected) - clock:
    assert results[key] == expected[key], key
  if os.path.isdir(os.path.join(whole, "trajectories")):
    assert trajectories(broken) == trajectories(whole)


def unanswered(workdir: str) -> tuple[int, dict[int, int]]:
  """Counts kept tool results, and per process the calls a kill left unanswered."""
  counts = collections.Counter(read(workdir + ".calls").decode().split("\n")[:-1])
  kept = sum(n for what, n in counts.items() if what.endswith(" kept"))
  pids = {what.split()[0] for what in counts}
  left = {int(p): counts[p + " asked"] - counts[p + " kept"] for p in pids}
  return kept, {p: n for p, n in left.items() if n}


@pytest.mark.slow
@pytest.mark.parametrize(
  "case", ["rl", *(pytest.param(c, marks=pytest.mark.soak) for c in ("sft", "ppo"))]
)
def test_ended_anywhere_and_run_again_is_uninterrupted(configs, case, tmp_path):
  config = configs[case]
  journey = "sft" if case == "sft" else "rl"
  whole, broken = str(tmp_path / "whole"), str(tmp_path / "broken")
  lives(journey, config, whole, [])
  rows, said = lives(journey, config, broken, ENDS[case])
  assert_same_run(broken, whole)
  if case == "ppo":
    assert {"value_loss", "reference_kl", "importance"} <= set(timeless(broken)[0])
  else:
    assert "was not finished; " in said
    last, before = rows[-2]["steps"][-1], rows[-2]["steps"][-2]
    assert f"checkpoint {last} is damaged (" in said
    assert f"has other bytes than were written); resuming from {before}" in said
    assert os.path.isdir(os.path.join(broken, "checkpoints", f"damaged_{last}"))
  if case == "rl":
    expected, none = unanswered(whole)
    kept, left = unanswered(broken)
    assert kept == expected > 10 and not none
    # Both died while tool calls could be running, the first one certainly.
    in_tool, in_background = rows[1]["pid"], rows[4]["pid"]
    assert in_tool in left and set(left) <= {in_tool, in_background}
  # A finished run started again has nothing to do, and changes nothing.
  run = importlib.import_module(f"coa_jax.{journey}").run
  results = run(ml_collections.ConfigDict(config), broken)
  assert results == json.loads(read(broken, "results.json"))
  assert_same_run(broken, whole)


@pytest.mark.soak
def test_twenty_kills_at_random_change_nothing(configs, tmp_path):
  """Kills come at any time, by chance also during an update or a save."""
  config = {**configs["rl"], "algo": {**configs["rl"]["algo"], "steps": 40}}
  whole, broken = str(tmp_path / "whole"), str(tmp_path / "broken")
  lives("rl", config, whole, [])
  # Milliseconds of work before each kill; unsaved work is repeated.
  rng = random.Random(0)
  ends = [("random", rng.randrange(100, 2000), KILL) for _ in range(20)]
  rows, _ = lives("rl", config, broken, ends)
  assert_same_run(broken, whole)
  kept, left = unanswered(broken)
  assert kept == unanswered(whole)[0]
  assert set(left) <= {row["pid"] for row in rows[:-1]}
