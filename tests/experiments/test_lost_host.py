"""A process dies or hangs: its peers end too, and the run resumes bit-identical."""

from __future__ import annotations

import pathlib
import signal
import time

import guessing
import pytest
import toy
from programs import config_file, ended, start_together, wait_for_step

from coa_jax.protocol.trajectory import write_jsonl
from coa_jax.report.metrics import read_metrics

STEPS = 9
HEARTBEAT_S = 10
SLOW = pytest.mark.slow
SOAK = pytest.mark.soak
FLAGS = (f"--heartbeat_s={HEARTBEAT_S}", "--config.mesh.fsdp=-1")


@pytest.fixture(scope="module")
def configs(tmp_path_factory) -> dict[str, str]:
  """Config files for runs that learn, and save every third step."""
  folder = tmp_path_factory.mktemp("inputs")
  of_rl = guessing.rl_config(folder, steps=100).to_dict()
  of_rl["algo"] |= dict(steps=STEPS, keep_every=1)
  of_rl["algo"]["sampling"] |= dict(prompts=4, samples=4)
  of_rl["algo"]["batch"] = dict(rows=4, length=toy.MAX_LEN)
  of_rl["rollout"]["slots"] = 4
  of_rl["dev"]["every"] = STEPS
  write_jsonl(folder / "data.jsonl", toy.trajectories() * 4)
  data = dict(trajectories=str(folder / "data.jsonl"), validation=2)
  data |= dict(length=toy.MAX_LEN, steps=STEPS, rows=4)
  sft = dict(init=of_rl["init"], data=data)
  out = {}
  for name, config in {"sft": sft, "rl": of_rl}.items():
    config["checkpoint"] = dict(every=3, keep=2)
    out[name] = config_file(folder / f"{name}.py", config)
  return out


def model(workdir: pathlib.Path) -> bytes:
  return (workdir / "model" / "model.safetensors").read_bytes()


def losses(workdir: pathlib.Path, journey: str) -> list[tuple[int, float]]:
  return [(row["step"], row["loss"]) for row in read_metrics(workdir, journey)]


@pytest.mark.parametrize(
  ("journey", "count", "lost"),
  [
    pytest.param(
      "sft", 2, [(2, 1, signal.SIGKILL), (5, 0, signal.SIGSTOP)], marks=SLOW
    ),
    pytest.param("rl", 2, [(2, 0, signal.SIGKILL), (5, 1, signal.SIGSTOP)], marks=SOAK),
    pytest.param(
      "sft", 4, [(2, 2, signal.SIGKILL), (5, 3, signal.SIGSTOP)], marks=SOAK
    ),
    pytest.param("rl", 4, [(2, 3, signal.SIGKILL), (5, 1, signal.SIGSTOP)], marks=SOAK),
  ],
)
def test_a_lost_process_ends_all_and_the_run_goes_on(
  configs, journey, count, lost, tmp_path
):
  whole = tmp_path / "whole"
  ended(start_together(journey, configs[journey], whole, count, *FLAGS))

  # SIGKILL simulates a lost host, SIGSTOP a hanging one; process 0 leads the others.
  workdir = tmp_path / "lost"
  for step, index, number in lost:
    processes = start_together(journey, configs[journey], workdir, count, *FLAGS)
    wait_for_step(processes, workdir, step)
    processes[index].send_signal(number)
    began = time.monotonic()
    for other in processes[:index] + processes[index + 1 :]:
      other.communicate(timeout=120)
      assert other.returncode != 0
    # Peers notice a dead process at once, and a silent one by its missing heartbeat.
    assert time.monotonic() - began < 6 * HEARTBEAT_S
    processes[index].kill()  # a scheduler kills the rest of the job
    processes[index].communicate()

  ended(start_together(journey, configs[journey], workdir, count, *FLAGS))
  assert model(workdir) == model(whole)
  expected = losses(whole, journey)
  assert [step for step, _ in expected] == list(range(1, STEPS + 1))
  assert len({loss for _, loss in expected}) > STEPS / 2  # it learns something
  for folder in (workdir, workdir / f"process_{count - 1}"):
    assert losses(folder, journey) == expected
