"""Writes fixtures/golden with the code of an older commit.

  PYTHONPATH=OLD_CHECKOUT python tests/golden_files.py WORLD OUT

WORLD is a folder from `make_world`; OUT is created. fixtures/README.md has all
commands. Imports only modules that the older commit has too. `test_golden.py` uses
these configs, so that it repeats the older commit's runs.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import os
import pathlib
import shutil
import sys
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from coa_jax import distill, rl, sft
from coa_jax.model.hf.io import load_model
from coa_jax.model.transformer import Transformer
from coa_jax.protocol.tokens import Tokenizer
from coa_jax.protocol.trajectory import read_trajectories

TRAJECTORIES = "distill/trajectories.jsonl"
PLAYED = "rl/trajectories/step_000000.jsonl"
STEPS, MORE_STEPS = 3, 6  # of the stored runs; of resumed ones
TEXTS = (
  "<answer>Uruk</answer>",
  "print(17 * 3) \u00e4\u4e2d\U0001f600\n",
  "no <tag> of ours",
)
ROW = tuple(range(7, 384, 31))  # token ids; their logits are stored
COLUMNS = (0, 5, 17, 100, 255, 300, 383)  # the stored logits of each
# Files not read by any test.
DROPPED = (
  *("*/.lock", "*/results.json", "*/events.out.*", "resumed", "uninterrupted"),
  *(
    "distill/*.png",
    "distill/[!mt]*",
    "distill/metrics.jsonl",
    "distill/teacher.jsonl",
  ),
  *("fresh/checkpoints", "fresh/data", "fresh/tokenizer"),
  *("tuned/model", "rl/checkpoints", "rl/model"),
)

Config = ml_collections.ConfigDict


def distill_config(world: str) -> Config:
  """Distillation from the scripted team on a world's tasks that need both tools."""
  return Config(
    dict(
      tasks=dict(
        uri=f"{world}/train_tasks.jsonl", families=("arithmetic", "comparison")
      ),
      tools=dict(
        tools=("wiki_search", "code"), corpus=f"{world}/train_pages.jsonl", top_k=1
      ),
      teacher=dict(backend="scripted", workers=1, variant="unified", prompt="brief"),
      scripted=dict(seed=0),
      filters=dict(min_activations=5, corrected_copies=1),
    )
  )


def fresh_config(steps: int) -> Config:
  """SFT of a fresh model."""
  return Config(
    dict(
      init="",
      model=dict(width=16, layers=1, heads=2, kv_heads=1, head_dim=8, ff=32),
      optim=dict(name="muon", lr=0.02, adam_lr=0.01, schedule="constant", warmup=2),
      data=dict(
        trajectories=TRAJECTORIES,
        steps=steps,
        rows=1,
        length=320,
        validation=1,
        validate_every=3,
        vocab_size=384,
        seed=0,
      ),
      checkpoint=dict(every=3, keep=1),
    )
  )


def tuned_config(steps: int) -> Config:
  """SFT of the `fresh` model."""
  config = fresh_config(steps)
  config.init = "fresh/model"
  config.model = dict(remat="none")
  config.optim = dict(name="adamw", lr=0.01, schedule="constant", warmup=2)
  return config


def rl_config(steps: int) -> Config:
  """RL of the `fresh` model, with a tool."""
  return Config(
    dict(
      init="fresh/model",
      optim=dict(name="adamw", lr=0.001, schedule="constant"),
      rollout=dict(
        style="brief", slots=2, window=8, max_len=160, constrain=True, seed=0
      ),
      tools=dict(tools=("code",), sandbox="subprocess"),
      tasks=dict(uri="tasks.jsonl"),
      dev=dict(every=100, uri="tasks.jsonl"),
      algo=dict(
        steps=steps,
        sampling=dict(prompts=1, samples=2, rounds=1),
        batch=dict(rows=2, length=160),
      ),
      checkpoint=dict(every=1, keep=1),
    )
  )


def evaluate_config() -> Config:
  """A greedy evaluation of the `fresh` model on one task."""
  config = rl_config(1)
  for name in ("optim", "algo", "dev", "checkpoint"):
    del config[name]
  config.eval = dict(greedy=True, samples=0)
  return config


def logits_of(cfg: Any, params: Any) -> np.ndarray:
  """The logits of ROW, [T, V], in float32."""
  model = Transformer(cfg)
  tokens_BT = jnp.asarray([ROW])
  position_BT = jnp.arange(len(ROW))[None]
  segment_BT = jnp.ones_like(tokens_BT)

  def logits(given: Any) -> jax.Array:
    hidden_BTD, _ = model.apply(given, tokens_BT, position_BT, segment_BT)
    return model.apply(given, hidden_BTD, method=model.logits)

  return np.asarray(jax.jit(logits)({"params": params})[0], np.float32)


def losses_of(workdir: pathlib.Path) -> list[list[float | None]]:
  """[step, loss, validation loss or None] of every SFT step."""
  out = []
  for line in (workdir / "metrics.jsonl").read_text().splitlines():
    row = json.loads(line)
    if row["stage"] == "sft":
      out.append([row["step"], row["loss"], row.get("validation_loss")])
  return out


def described(
  path: str | pathlib.Path, tokenizer: Tokenizer | None = None
) -> list[dict[str, Any]]:
  """A trajectory file as JSON values; the ids are the tokenizer's, if one is given."""
  out = []
  for t in read_trajectories(path):
    if tokenizer:
      tokenizer.encode_trajectories([t])
    row = {
      "task_id": t.task_id,
      "sample": t.sample,
      "status": t.status.value,
      "reward": t.reward,
      "reward_parts": t.reward_parts,
      "calls": [[c.name, c.arguments, c.result, c.status.value] for c in t.calls],
      "segments": [[s.author.value, s.role, s.text] for s in t.segments],
      "ids": [s.ids for s in t.segments],
      "versions": [s.versions for s in t.segments],
      "logps": sum(sum(s.logps) for s in t.segments),
      "usage": {
        name: value
        for name, value in dataclasses.asdict(t.usage).items()
        if name != "tool_turns"  # newer than the files
      },
      "meta": t.meta,
    }
    out.append(row)
  # Through JSON: lists instead of tuples.
  return json.loads(json.dumps(out))


def main(world: str, out: str) -> None:
  """Runs the stages in OUT, and keeps the files for tests."""
  world = os.path.relpath(world, out)
  os.makedirs(out)
  os.chdir(out)
  # --- Trajectories, and a model trained on them.
  distill.run(distill_config(world), "distill")
  lines = pathlib.Path(world, "rl_tasks.jsonl").read_text().splitlines()
  pathlib.Path("tasks.jsonl").write_text("\n".join(lines[:1]) + "\n")
  sft.run(fresh_config(STEPS), "fresh")
  # --- Train it further: `resumed` in two runs, `uninterrupted` in one.
  sft.run(tuned_config(STEPS), "tuned")
  shutil.copytree("tuned", "resumed")
  sft.run(tuned_config(MORE_STEPS), "resumed")
  sft.run(tuned_config(MORE_STEPS), "uninterrupted")
  losses = losses_of(pathlib.Path("uninterrupted"))
  assert losses_of(pathlib.Path("resumed")) == losses
  rl.run(rl_config(2), "rl")
  # --- Values that this code reads in these files.
  cfg, params = load_model("fresh/model")
  tokenizer = Tokenizer.load("fresh/model")
  logits_TV = logits_of(cfg, params)
  expected = {
    "losses": losses,
    "logits": logits_TV[:, COLUMNS].tolist(),
    "largest_logit": float(abs(logits_TV).max()),
    "ids": [tokenizer.encode(text) for text in TEXTS],
    "distilled": described(TRAJECTORIES, tokenizer),
    "played": described(PLAYED),
  }
  with open("expected.json", "w", encoding="utf-8") as f:
    json.dump(expected, f, separators=(",", ":"))
    f.write("\n")
  # --- Delete files not read by any test.
  for path in DROPPED:
    for found in glob.glob(path):
      shutil.rmtree(found) if os.path.isdir(found) else os.remove(found)


if __name__ == "__main__":
  main(*sys.argv[1:])
