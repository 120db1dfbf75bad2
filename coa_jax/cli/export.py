"""Exports any kept checkpoint of an SFT or RL run as a Hugging Face folder.

  coa export --workdir=DIR --out=DIR [--step=N]

Writes OUT/model, and OUT/adapter for a run with section lora, as the run itself does at
its end. The run may still be running; without --step the newest checkpoint is used. The
policy is exported, a critic is not.
"""

from __future__ import annotations

import dataclasses
import os

from absl import flags

from coa_jax.cli.launch import prepare, run_program
from coa_jax.runtime.lock import hold


def _define_flags() -> None:
  # Not on import: other programs have the same flags, and tests import both.
  flags.DEFINE_string("workdir", None, "The run's folder.", required=True)
  flags.DEFINE_string("out", None, "The folder for model/.", required=True)
  flags.DEFINE_integer("step", None, "The checkpoint's step; by default the newest.")


def export(workdir: str, out: str, step: int | None = None) -> int:
  """Writes the model of a checkpoint, by default the newest; returns the step.

  Raises:
    FileNotFoundError: there is no run.
    ValueError: the run has no such checkpoint, or the checkpoint is damaged.
  """
  from coa_jax.learner.checkpoint import read_params, whole_steps
  from coa_jax.model import lora
  from coa_jax.model.config import ModelConfig
  from coa_jax.model.hf.folder import save_run
  from coa_jax.model.hf.io import load_config, load_params
  from coa_jax.model.transformer import init_params
  from coa_jax.plan.sft import DataConfig, read_model, with_vocabulary
  from coa_jax.protocol.origin import Origin
  from coa_jax.protocol.tokens import Tokenizer
  from coa_jax.report.card import write_model_cards
  from coa_jax.runtime.config import read_config
  from coa_jax.runtime.record import read_origin_of, read_run

  # --- The checkpoint.
  config_file = os.path.join(workdir, "config.json")
  folder = os.path.join(workdir, "checkpoints")
  for path in (config_file, folder):
    if not os.path.exists(path):
      raise FileNotFoundError(f"{path}: not there; {workdir} holds no SFT or RL run")
  config = read_run(config_file)
  steps = whole_steps(folder)
  if not steps or (step is not None and step not in steps):
    choice = ", ".join(map(str, steps)) or "none"
    name = "a checkpoint"
    if step is not None:
      name = f"checkpoint {step}"
    raise ValueError(f"{folder}: there is no {name}; kept are {choice}")
  if step is None:
    step = steps[-1]

  # --- The trained parameters: all or adapters; in RL the policy, not the critic.
  trained = read_params(folder, step)
  if "algo" in config:
    trained = trained["policy"]
  lora_config = None
  if config.get("lora"):
    lora_config = read_config(config["lora"], lora.LoraConfig, "lora")
  load = read_model(config.get("model") or {}, config)

  # --- The initial model: drawn by the run, or read.
  init = config.get("init") or ""
  base = None  # needed only with adapters
  tokenizer = Tokenizer.load(init or os.path.join(workdir, "tokenizer"))
  if isinstance(load, ModelConfig):  # a model drawn by the run itself
    cfg = with_vocabulary(load, tokenizer)
    if lora_config:
      data = read_config(config.get("data"), DataConfig, "data")
      base = init_params(cfg, data.seed)
  else:
    # The model is not run here, so its attention kernel may be unavailable.
    load = dataclasses.replace(load, attention="auto")
    cfg = load_config(init, load)
    if lora_config:
      base = load_params(init, cfg)
  origin = Origin.of_run(read_origin_of(workdir), step)
  save_run(out, cfg, trained, base, lora_config, tokenizer, init, origin)
  write_model_cards(out, workdir, init, step)
  return step


def main() -> None:
  """Exports the checkpoint named by the flags."""
  prepare("")
  out = flags.FLAGS.out
  if os.path.exists(os.path.join(out, "config.json")):
    raise ValueError(
      f"--out={out} holds a run, whose model would be replaced; name another folder"
    )
  with hold(out):
    step = export(flags.FLAGS.workdir, out, flags.FLAGS.step)
  print(f"step {step}: {os.path.join(out, 'model')}")


def command() -> None:
  """Runs the command line."""
  _define_flags()
  run_program(main)
