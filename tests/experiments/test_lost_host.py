"""One process of several dies or hangs: all end, and the run goes on as it was."""

from __future__ import annotations

import json
import pathlib
import signal
import socket
import subprocess
import time

import pytest
import toy
from programs import config_file, reached, start

from coa_jax.protocol.trajectory import write_jsonl
from coa_jax.report.metrics import read_metrics

STEPS = 12
HEARTBEAT_S = 10


@pytest.fixture(scope="module")
def configs(tmp_path_factory) -> dict[str, str]:
  """Config files of runs that save every third step."""
  folder = tmp_path_factory.mktemp("inputs")
  toy.save_policy(str(folder / "model"), toy.params())
  write_jsonl(folder / "data.jsonl", toy.trajectories() * 4)
  rows = [{"question": q, "answers": ["5"]} for q in ("2 + 3", "1 + 4")]
  (folder / "tasks.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
  tasks = dict(uri=str(folder / "tasks.jsonl"))
  common = dict(init=str(folder / "model"), checkpoint=dict(every=3, keep=2))
  data = dict(trajectories=str(folder / "data.jsonl"), validation=2, length=toy.MAX_LEN)
  sections = {
    "sft": common | dict(data=data | dict(steps=STEPS, rows=2)),
    "rl": common
    | dict(
      rollout=dict(style="brief", slots=4, max_len=64),
      tools=dict(tools=["code"], enabled=False),
      tasks=tasks,
      dev=dict(every=STEPS, **tasks),
      algo=dict(
        steps=STEPS,
        sampling=dict(prompts=2, samples=2, rounds=1),
        batch=dict(rows=2, length=64),
      ),
    ),
  }
  return {
    name: config_file(folder / f"{name}.py", config)
    for name, config in sections.items()
  }


def start_both(journey: str, config: str, workdir: pathlib.Path) -> list:
  """Two processes of one run."""
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{s.getsockname()[1]}"
  processes = []
  for i in range(2):
    flags = [f"--distributed={address},2,{i}", f"--heartbeat_s={HEARTBEAT_S}"]
    processes.append(start(journey, config, workdir, *flags))
  return processes


def end_all(processes: list[subprocess.Popen]) -> None:
  """Waits until all have ended well."""
  for process in processes:
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors[-3000:]


def model(workdir: pathlib.Path) -> bytes:
  return (workdir / "model" / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
  ("journey", "lost"),
  [
    ("sft", [(2, 1, signal.SIGKILL), (7, 0, signal.SIGSTOP)]),
    ("rl", [(2, 0, signal.SIGKILL), (7, 1, signal.SIGSTOP)]),
  ],
)
def test_a_lost_process_ends_all_and_the_run_goes_on(configs, journey, lost, tmp_path):
  end_all(start_both(journey, configs[journey], tmp_path / "whole"))

  # SIGKILL is a host that is gone, SIGSTOP one that hangs; process 0 leads the others.
  workdir = tmp_path / "lost"
  for step, index, number in lost:
    processes = start_both(journey, configs[journey], workdir)
    while reached(workdir) < step:
      for process in processes:
        assert process.poll() is None, process.communicate()
      time.sleep(0.02)
    processes[index].send_signal(number)
    began = time.monotonic()
    other = processes[1 - index]
    other.communicate(timeout=120)
    assert other.returncode != 0
    # A dead one is noticed at once by who talks to it, a silent one by its heartbeat.
    assert time.monotonic() - began < 6 * HEARTBEAT_S
    processes[index].kill()  # a scheduler kills what is left of the job
    processes[index].communicate()

  end_all(start_both(journey, configs[journey], workdir))
  assert model(workdir) == model(tmp_path / "whole")
  steps = [row["step"] for row in read_metrics(workdir, journey)]
  assert steps == list(range(1, STEPS + 1))
