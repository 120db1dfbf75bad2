"""A guessing policy, and RL that teaches it the right answers."""

from __future__ import annotations

import contextlib
import functools
import json
import pathlib
from collections.abc import Iterator

import ml_collections
import pytest
import toy

from coa_jax import rl
from coa_jax.model.config import ModelConfig
from coa_jax.report.metrics import Metrics
from tests.backend import BACKEND

STEPS = 24
RIGHT = {"sky": "blue", "sea": "blue"}  # question -> answer


@functools.cache
def policy(model: ModelConfig = toy.MODEL, steps: int = 300) -> dict:
  """Parameters of a policy that calls the tool, then guesses red or blue."""
  examples = [
    toy.written(q, (toy.code("print(2+3)"), "5", toy.end(a)), toy.tokenizer())
    for q in RIGHT
    for a in ("red", "blue")
  ]
  return toy.train(examples, steps, model).params


def rl_config(
  folder: pathlib.Path, model: ModelConfig = toy.MODEL, steps: int = 300
) -> ml_collections.ConfigDict:
  """Writes the policy and its tasks to the folder; returns an RL config for them."""
  toy.save_policy(str(folder / "model"), policy(model, steps), model)
  rows = [{"id": q, "question": q, "answers": [a]} for q, a in RIGHT.items()]
  tasks = folder / "tasks.jsonl"
  tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return ml_collections.ConfigDict(
    dict(
      init=str(folder / "model"),
      model=dict(remat="none"),
      optim=dict(lr=1.5e-3, schedule="linear", b2=0.99),
      rollout=dict(style="brief", slots=16, max_len=toy.MAX_LEN),
      tools=dict(tools=("code",), sandbox=BACKEND),
      tasks=dict(uri=str(tasks)),
      algo=dict(
        steps=STEPS,
        sampling=dict(prompts=2, samples=8, rounds=1),
        batch=dict(rows=8, length=128),
        guards=dict(max_logp_diff=0.1, max_logp_diff_share=1.0),
      ),
      dev=dict(every=STEPS - 1, uri=str(tasks)),
      checkpoint=dict(every=STEPS),
    )
  )


def check_resume(config: ml_collections.ConfigDict, folder: pathlib.Path) -> None:
  """A run killed in its second step and resumed writes the whole run's model."""
  config = config.copy_and_resolve_references()
  config.algo.steps = 3
  config.dev.every = 3
  config.checkpoint.every = 1
  whole, parts = folder / "whole", folder / "parts"
  rl.run(config, str(whole))
  with killed_before_log_of(2):
    rl.run(config, str(parts))
  rl.run(config, str(parts))
  file = "model/model.safetensors"
  assert (parts / file).read_bytes() == (whole / file).read_bytes()


@contextlib.contextmanager
def killed_before_log_of(step: int) -> Iterator[None]:
  """Interrupts the run inside it after learning a step, before its log and save."""
  log = Metrics.log

  def deadly(self, number, *args, **kwargs):
    if number == step:
      raise KeyboardInterrupt
    return log(self, number, *args, **kwargs)

  with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
    patch.setattr(Metrics, "log", deadly)
    yield
